"""The whole detector against Hugging Face's: same weights, same inputs, alternating runs.

    python benchmarks/model.py                      # R-50, one image of 800 × 1066, one thread
    python benchmarks/model.py --height 480 --width 640 --repeat 5

A training step is forward, losses, backward, clipping and AdamW, in training mode with the
published dropout. Times are medians of CPU time, which other processes disturb least; wall-clock
medians are given beside. `at_peak` is the ratio that would be left if our side did its matrix
products and convolutions at the speed of one product of 1024 × 1024 matrices, and all else in no
time; it varies with the machine's speed between the two measurements.
Peak memory is that of a whole process, one per side. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import detectron2
import torch
import transformers
from detectron2.modeling import build_model
from hugging_face import inputs, twin, weighted_losses  # type: ignore[import-not-found]
from measure import alternate, peak_mb  # type: ignore[import-not-found]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import cldetr
from cldetr.config import load_config
from cldetr.layers.cpu import keep_freed_memory
from cldetr.layers.libraries import load_libraries
from cldetr.modeling import DeformableDETR
from cldetr.modeling.structures import ImageBatch, Target

CONFIG = Path(__file__).parents[1] / "configs" / "detector" / "deformable_detr_r50.yaml"
SIDES = ("ours", "theirs")
WARM = 2  # runs of each side before those that count: the first ones ask the system for memory


class Contest:
    """Both detectors on one batch."""

    def __init__(self, batch: int, height: int, width: int) -> None:
        torch.manual_seed(0)
        cfg = load_config(str(CONFIG))
        cfg.MODEL.DETR.NUM_CLASSES = 80
        cfg.MODEL.DEVICE = "cpu"
        model = build_model(cfg)
        assert isinstance(model, DeformableDETR)
        self.model = model
        self.images = ImageBatch(torch.randn(batch, 3, height, width), [(height, width)] * batch)
        self.targets = [
            Target(torch.randint(0, 80, (10,)), torch.rand(10, 4) * 0.4 + 0.1) for _ in range(batch)
        ]

    def make(self, side: str) -> tuple[Callable[[], None], Callable[[], Any]]:
        """The training step and the inference of one side."""
        forward, losses, module = self._ours() if side == "ours" else self._theirs()
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)

        def train() -> None:
            module.train()
            optimizer.zero_grad()
            sum(losses().values(), start=torch.zeros(())).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()

        def infer() -> Any:
            module.eval()
            with torch.no_grad():
                return forward()

        return train, infer

    def _ours(self) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]], torch.nn.Module]:
        model = self.model

        def forward() -> Any:
            return model.predict(self.images)

        return forward, lambda: model.criterion(forward(), self.targets), model

    def _theirs(self) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]], torch.nn.Module]:
        theirs = twin(self.model)
        arguments = inputs(self.images.tensor, self.images.mask)
        labels = [{"class_labels": x.labels, "boxes": x.boxes} for x in self.targets]

        def losses() -> dict[str, Any]:
            return weighted_losses(self.model, theirs(**arguments, labels=labels).loss_dict)

        return lambda: theirs(**arguments), losses, theirs


def compare_speed(contest: Contest, repeat: int) -> dict[str, Any]:
    """Alternates both sides; returns medians and their ratios."""
    steps = {side: contest.make(side) for side in SIDES}
    ours, theirs = steps["ours"][1](), steps["theirs"][1]()
    difference = float((ours.logits[-1] - theirs.logits).abs().max())
    print(f"greatest difference of logits: {difference:.1e}")
    if difference > 1e-3:
        raise SystemExit("the two sides compute different things")
    speed = peak_flops()
    result: dict[str, Any] = {"logit_difference": difference, "peak_gflops": speed / 1e9}
    for index, what in enumerate(("train", "inference")):
        times: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for side in SIDES * WARM:
            steps[side][index]()
        for _ in range(repeat):
            for side in SIDES:
                wall, cpu = time.perf_counter(), time.process_time()
                steps[side][index]()
                times[side].append((time.process_time() - cpu, time.perf_counter() - wall))
        with CountOperations() as counter:
            steps["ours"][index]()
        theirs_s = statistics.median(run[0] for run in times["theirs"])
        limit = theirs_s / (counter.total / speed)
        result[f"{what}_at_peak"] = {"gflop": counter.total / 1e9, "ratio": limit}
        print(f"{what}: {limit:.2f} times as fast at the peak of matrix products")
        for clock, name in enumerate(("cpu_s", "wall_s")):
            a, b = (statistics.median(run[clock] for run in times[side]) for side in SIDES)
            result[f"{what}_{name}"] = {"ours": a, "theirs": b, "ratio": b / a}
            print(f"{what} {name}: ours {a:.2f}, theirs {b:.2f}: {b / a:.2f} times as fast")
    return result


class CountOperations(TorchDispatchMode):
    """Counts the operations of matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator and adds what it takes."""
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        packet = torch.ops.aten.addmm if packet is torch.ops.aten.addmm_ else packet
        if packet in flop_registry:
            settings = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            self.total += flop_registry[packet](*args, **settings, out_val=result)
        return result


def peak_flops() -> float:
    """Operations a second in a matrix product that is easy to do quickly."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    seconds = alternate({"product": lambda: a @ b}, repeat=20)["product"]
    return 2 * 1024**3 / seconds


def compare_memory(args: argparse.Namespace) -> dict[str, float]:
    """Peak memory of two training steps, each side in a process of its own, in MB."""
    peaks = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--memory-of", side]
        command += [f"--{key}={getattr(args, key)}" for key in ("batch", "height", "width")]
        command += [f"--threads={args.threads}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks[side] = float(done.stdout.splitlines()[-1])
    ratio = peaks["ours"] / peaks["theirs"]
    print(f"peak memory: ours {peaks['ours']:.0f} MB, theirs {peaks['theirs']:.0f} MB: {ratio:.2f}")
    return peaks | {"ratio": ratio}


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--height", type=int, default=800)
    parser.add_argument("--width", type=int, default=1066)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as train_net.py does; it helps both sides
    contest = Contest(args.batch, args.height, args.width)
    if args.memory_of:
        train, _ = contest.make(args.memory_of)
        train()
        train()
        print(peak_mb())
        return
    result = {
        "batch": args.batch,
        "size": [args.height, args.width],
        "threads": args.threads,
        "versions": {
            "cldetr": cldetr.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "detectron2": detectron2.__version__,
            "python": platform.python_version(),
        },
        "cpus": os.cpu_count(),
        "compiled_op": load_libraries()["cpu"].loaded,
        "memory_mb": compare_memory(args),
        **compare_speed(contest, args.repeat),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
