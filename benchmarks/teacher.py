"""What the old model costs: a training step with pseudo-labels over a plain one.

    python benchmarks/teacher.py                          # R-50, one image of 480 × 640
    python benchmarks/teacher.py --height 800 --width 1066
    python benchmarks/teacher.py --model small            # 12 images of 80 × 80

Sides: `plain` has no old model; `live` asks it in every step, without gradients; `cached` gets its
predictions with the images (METHOD.PSEUDO.CACHE); `released` asks it in every step with gradients
on, as the authors' code does. A step is preprocessing, forward, losses, backward, clipping and
AdamW. Times are medians of alternating runs, CPU time of one thread, ratios medians over the
rounds. Peak memory is that of a whole process after two steps, one process per side. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from detectron2.structures import Boxes, Instances
from measure import (  # type: ignore[import-not-found]
    ask_fresh_process,
    make_detector,
    medians,
    peak_mb,
    rounded,
    shares,
    take_turns,
    versions,
)

from cldetr.config import default_config
from cldetr.engine.step import build_optimizer
from cldetr.layers.cpu import keep_freed_memory
from cldetr.methods.learner import Learner, freeze
from cldetr.methods.pseudo import PseudoRule

MODELS = {"r50": ("70_10.yaml", 80, 70), "small": ("shapes.yaml", 10, 7)}
SIDES = ("plain", "live", "cached", "released")


class ReleasedLearner(Learner):
    """Asks the teacher with gradients on, and keeps what they need until the step ends."""

    def forward(self, batched_inputs: Any) -> dict[str, torch.Tensor]:
        """As `Learner.forward` with a teacher, but without turning gradients off."""
        assert self.teacher is not None
        images = self.detector.preprocess(batched_inputs)
        self.teacher_output = self.teacher.predict(images)
        targets = self.detector.targets(batched_inputs)
        targets = self._merge(self.teacher_output, targets, batched_inputs)
        return self.detector.losses(images, targets, class_mask=self._seen)[0]


def make_batch(images: int, height: int, width: int, classes: int) -> list[dict[str, Any]]:
    """Random images with ten objects each."""
    batch = []
    for _ in range(images):
        instances = Instances((height, width))
        corner = torch.rand(10, 2) * 0.5
        boxes = torch.cat([corner, corner + 0.1 + torch.rand(10, 2) * 0.4], dim=1)
        instances.gt_boxes = Boxes(boxes * torch.tensor([width, height, width, height]))
        instances.gt_classes = torch.randint(0, classes, (10,))
        image = torch.randint(0, 255, (3, height, width), dtype=torch.uint8)
        entry = {"image": image, "instances": instances, "height": height, "width": width}
        batch.append({**entry, "classes": (), "file_name": "random"})
    return batch


def make_step(side: str, args: argparse.Namespace) -> Callable[[], None]:
    """The training step of one side."""
    torch.manual_seed(0)
    config, classes, old = MODELS[args.model]
    detector = make_detector(config, classes)
    batch = make_batch(args.batch, args.height, args.width, classes)
    # Ten labels an image, whatever an untrained detector scores.
    rule = PseudoRule(foreground=0.0)
    make = ReleasedLearner if side == "released" else Learner
    learner = make(
        detector,
        seen=range(classes),
        teacher=None if side == "plain" else freeze(detector, range(old)),
        teacher_classes=range(old),
        rule=None if side == "plain" else rule,
    )
    if side == "released":
        assert learner.teacher is not None
        for ours, theirs in zip(detector.parameters(), learner.teacher.parameters(), strict=True):
            theirs.requires_grad_(ours.requires_grad)
    if side == "cached":
        kept = learner.teacher_candidates(batch)
        batch = [{**x, "predictions": found} for x, found in zip(batch, kept, strict=True)]
        learner.dismiss_teacher()
    learner.train()
    cfg = default_config()
    cfg.SOLVER.BASE_LR = 1e-6
    optimizer = build_optimizer(cfg, detector)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step() -> None:
        optimizer.zero_grad()
        losses = learner(batch)
        sum(losses.values(), start=torch.zeros(())).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()

    return step


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="r50")
    parser.add_argument("--batch", type=int, help="images; 1 for r50, 12 for small")
    parser.add_argument("--height", type=int, help="480 for r50, 80 for small")
    parser.add_argument("--width", type=int, help="640 for r50, 80 for small")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    batch, height, width = (1, 480, 640) if args.model == "r50" else (12, 80, 80)
    args.batch, args.height, args.width = (
        args.batch or batch,
        args.height or height,
        args.width or width,
    )
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as train_net.py does
    if args.memory_of:
        step = make_step(args.memory_of, args)
        step()
        step()
        print(json.dumps({"peak_mb": peak_mb()}))
        return

    own = ["batch", "height", "width", "threads", "model"]
    words = [f"--{key}={getattr(args, key)}" for key in own]
    memory = {
        side: ask_fresh_process(__file__, f"--memory-of={side}", *words)["peak_mb"]
        for side in args.sides
    }
    times = take_turns({side: make_step(side, args) for side in args.sides}, args.repeat)
    seconds = medians(times)
    print(f"{'':10}{'seconds':>10}{'of plain':>10}{'peak, MB':>10}{'of plain':>10}")
    ratios = {
        "time": shares(times, "plain"),
        "memory": {side: memory[side] / memory["plain"] for side in args.sides},
    }
    for side in args.sides:
        time, share = ratios["time"][side], ratios["memory"][side]
        print(f"{side:10}{seconds[side]:10.3f}{time:10.3f}{memory[side]:10.0f}{share:10.3f}")
    report = {
        "benchmark": "teacher",
        **{key: getattr(args, key) for key in own},
        "repeat": args.repeat,
        "seconds": rounded(seconds),
        "peak_mb": rounded(memory, 0),
        "time_of_plain": rounded(ratios["time"]),
        "memory_of_plain": rounded(ratios["memory"]),
        "versions": versions("detectron2"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
