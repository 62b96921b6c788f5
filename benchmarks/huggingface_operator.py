"""Models of Hugging Face transformers with our operator against the same with theirs.

    python benchmarks/huggingface_operator.py                       # Deformable DETR and RT-DETR
    python benchmarks/huggingface_operator.py --height 320 --width 320 --repeat 1

Same weights, same images, logits compared. Deformable DETR attends in encoder and decoder, RT-DETR
in the decoder alone. A step is a forward and a backward pass of one image. Medians of alternating
runs, CPU time of one thread. One JSON line per model.
"""

from __future__ import annotations

import argparse
import copy
import json
from typing import Any

import torch
from measure import alternate, versions  # type: ignore[import-not-found]
from transformers import (
    AutoModelForObjectDetection,
    DeformableDetrConfig,
    ResNetConfig,
    RTDetrConfig,
)

from cldetr.modeling.huggingface_operator import use_our_operator


def build(name: str) -> Any:
    """A model of the published size with random weights."""
    if name == "rt_detr":
        return AutoModelForObjectDetection.from_config(RTDetrConfig())
    settings: dict[str, Any] = {"out_features": ["stage2", "stage3", "stage4"]}
    backbone = ResNetConfig(**settings)
    return AutoModelForObjectDetection.from_config(DeformableDetrConfig(backbone_config=backbone))


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["deformable_detr", "rt_detr"])
    parser.add_argument("--height", type=int, default=640)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        torch.manual_seed(0)
        theirs = build(name).eval()
        ours = copy.deepcopy(theirs)
        layers = use_our_operator(ours)
        pixels = torch.randn(1, 3, args.height, args.width)
        sides = {"ours": ours, "theirs": theirs}
        with torch.no_grad():
            logits = [model(pixel_values=pixels).logits for model in sides.values()]
            apart = float((logits[0] - logits[1]).abs().max())

        def infer(model: Any, pixels: torch.Tensor = pixels) -> None:
            with torch.no_grad():
                model(pixel_values=pixels)

        def step(model: Any, pixels: torch.Tensor = pixels) -> None:
            output = model(pixel_values=pixels)
            (output.logits.sum() + output.pred_boxes.sum()).backward()

        seconds = {
            what: alternate(
                {side: lambda run=run, model=model: run(model) for side, model in sides.items()},
                args.repeat,
            )
            for what, run in (("forward", infer), ("step", step))
        }
        report = {
            "benchmark": "huggingface_operator",
            "model": name,
            "size": [args.height, args.width],
            "layers": layers,
            "largest_difference_of_logits": apart,
            "cpu_s": {k: {s: round(x, 3) for s, x in v.items()} for k, v in seconds.items()},
            "ratio": {k: round(v["theirs"] / v["ours"], 2) for k, v in seconds.items()},
            "versions": versions("transformers"),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
