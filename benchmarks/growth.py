"""How a training step's cost grows with image size, queries, classes and labels.

    python benchmarks/growth.py

The R-50 detector on one image; one thing changes at a time from 384 × 384 pixels, 300 queries, 80
classes and 20 labels. CPU time of one thread, medians of alternating runs. The last line is JSON,
with each time as a share of that of the starting point.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from measure import (  # type: ignore[import-not-found]
    make_detector,
    medians,
    rounded,
    shares,
    take_turns,
    versions,
)

from cldetr.layers.cpu import keep_freed_memory
from cldetr.modeling.structures import ImageBatch, Target

START = {"side": 384, "queries": 300, "classes": 80, "labels": 20}
CHANGES = {
    "side": (192, 576),
    "queries": (100, 900),
    "classes": (20, 1200),
    "labels": (5, 100),
}


def make_step(side: int, queries: int, classes: int, labels: int) -> Callable[[], None]:
    """A training step without the optimizer, whose cost is that of the parameters alone."""
    torch.manual_seed(0)
    words = ("MODEL.DETR.NUM_QUERIES", str(queries))
    detector = make_detector("70_10.yaml", classes, *words).train()
    images = ImageBatch(torch.randn(1, 3, side, side), [(side, side)])
    targets = [Target(torch.randint(0, classes, (labels,)), torch.rand(labels, 4) * 0.4 + 0.1)]

    def step() -> None:
        detector.zero_grad()
        losses, _ = detector.losses(images, targets)
        sum(losses.values(), start=torch.zeros(())).backward()

    return step


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as train_net.py does
    cases = {"start": START}
    for key, values in CHANGES.items():
        cases |= {f"{key} {value}": {**START, key: value} for value in values}
    times = take_turns({name: make_step(**case) for name, case in cases.items()}, args.repeat)
    seconds, of_start = medians(times), shares(times, "start")
    for name, share in of_start.items():
        print(f"{name:14}{seconds[name]:8.3f} s{share:8.2f}")
    report = {
        "benchmark": "growth",
        "start": START,
        "seconds": rounded(seconds),
        "of_start": rounded(of_start),
        "repeat": args.repeat,
        "versions": versions("detectron2"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
