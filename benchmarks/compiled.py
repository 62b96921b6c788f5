"""Whether `torch.compile` pays: a training step and inference, compiled against as they are.

    python benchmarks/compiled.py                   # the small detector, 12 images of 80 × 80
    python benchmarks/compiled.py --model r50       # R-50, one image of 384 × 384

The detector's forward pass is compiled for one size of images, with its backward pass. Times are
CPU time of one thread, ratios medians over alternating rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import make_detector, medians, rounded, shares, take_turns, versions  # type: ignore[import-not-found]
from teacher import MODELS, make_batch  # type: ignore[import-not-found]

from cldetr.layers.cpu import keep_freed_memory

SIZES = {"small": (12, 80, 31), "r50": (1, 384, 5)}  # images, their side, rounds


def make_side(model: str, compiled: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """A training step without the optimizer, and inference."""
    torch.manual_seed(0)
    config, classes, _ = MODELS[model]
    detector: Any = make_detector(config, classes)
    images, side, _ = SIZES[model]
    batch = make_batch(images, side, side, classes)
    if compiled:
        detector.predict = torch.compile(detector.predict, dynamic=False)

    def train() -> None:
        detector.train()
        detector.zero_grad()
        sum(detector(batch).values(), start=torch.zeros(())).backward()

    def infer() -> None:
        detector.eval()
        with torch.no_grad():
            detector(batch)

    return train, infer


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--repeat", type=int, help="31 for small, 5 for r50")
    args = parser.parse_args()
    args.repeat = args.repeat or SIZES[args.model][2]
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # compile as for the first time
    torch.set_num_threads(1)
    keep_freed_memory()  # as train_net.py does
    plain, compiled = make_side(args.model, False), make_side(args.model, True)
    compiling, faster, seconds = {}, {}, {}
    for index, what in enumerate(("train", "inference")):
        start = time.perf_counter()
        compiled[index]()
        compiling[what] = time.perf_counter() - start
        runs = {"plain": plain[index], "compiled": compiled[index]}
        times = take_turns(runs, args.repeat, warm=2)
        seconds[what] = rounded(medians(times))
        faster[what] = shares(times, "compiled")["plain"]
        print(f"{what}: {faster[what]:.2f} times as fast, compiled in {compiling[what]:.0f} s")
    report = {
        "benchmark": "compiled",
        "model": args.model,
        "times_faster": rounded(faster),
        "compile_s": rounded(compiling, 0),
        "seconds": seconds,
        "repeat": args.repeat,
        "versions": versions("detectron2"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
