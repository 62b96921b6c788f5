"""NaN in the loss, the gradient, the teacher or the weights, on any process.

Chosen steps are made sick, in a run of one and of two processes. A sick step must be skipped by
all processes; three in a row must stop the run, naming images; and at no time may a file with
weights or an optimizer's state that is not finite exist in the run directory.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from typing import Any

import torch

from cldetr.engine.checkpoint import load_state
from cldetr.engine.step import StageTrainer
from cldetr.methods.learner import Learner
from faults import tiny
from faults.tally import Options, Tally

FIRST_STEPS = 6  # of the first stage: later ones have a teacher


def run(options: Options) -> Tally:
    """Tries every kind on one process, and on either and both of two."""
    tally = Tally("NaN")
    data = tiny.TinyData(options.work)
    work = options.folder("runs")
    cases = list(
        itertools.product(SICKNESSES, ("once", "three in a row"), ((1, (0,)), (2, (0,)), (2, (1,))))
    )
    cases = [case for case in cases if case[:2] != ("weights", "three in a row")]
    if options.size == "short":
        cases = [
            ("teacher", "three in a row", (2, (1,))),
            ("gradient", "once", (1, (0,))),
            ("weights", "once", (1, (0,))),
        ]
    for number, (kind, how_often, (world, sick)) in enumerate(cases):
        if options.out_of_time:
            break
        folder = work / str(number)
        first = {"teacher": FIRST_STEPS, "weights": FIRST_STEPS - 1}.get(kind, 2)
        steps = range(first, first + (1 if how_often == "once" else 3))
        before = _prepare(kind, set(steps), sick)
        children = tiny.start_ranks(data.command(folder / "run"), folder, world, before, timeout=30)
        try:
            statuses = tiny.finish(children, 120)
        except TimeoutError as error:
            tally.check("sick runs: all processes agree", False, f"{kind} {how_often}: {error}")
            continue
        said = "".join(child.said() for child in children)
        what = f"{kind} {how_often}, process {sick} of {world}"
        good = _expected(kind, how_often, sick, statuses, said)
        tally.check(
            "sick runs: skipped or stopped as promised, on all processes",
            good,
            f"{what}: {statuses} {said[-1500:]}",
        )
        files = [*folder.rglob("*.pth")]
        bad = [str(path.relative_to(folder)) for path in files if not _finite(load_state(path))]
        tally.check("sick runs: no file that is not finite", not bad, f"{what}: {bad}")
        shutil.rmtree(folder)
    return tally


def stock(options: Options) -> Tally:
    """Detectron2's own loop and checkpointer with one NaN in a gradient."""
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.engine import HookBase, SimpleTrainer, hooks

    tally = Tally("NaN, stock")
    work = options.folder("run")
    model = torch.nn.Linear(4, 1)

    class Sick(HookBase):
        def after_backward(self) -> None:
            if self.trainer.iter == 3:
                model.weight.grad[0, 0] = float("nan")  # type: ignore[index]

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.inner(batch).square().mean()}

    loop = SimpleTrainer(
        Loss(), itertools.repeat(torch.ones(2, 4)), torch.optim.AdamW(model.parameters())
    )
    checkpointer = DetectionCheckpointer(model, str(work))
    loop.register_hooks([Sick(), hooks.PeriodicCheckpointer(checkpointer, 2)])
    try:
        loop.train(0, 8)
        said = "trained on to the end"
    except FloatingPointError as error:
        said = f"stopped ({str(error)[:60]})"
    files = list(work.glob("*.pth"))
    bad = [path.name for path in files if not _finite(load_state(path))]
    tally.note(f"after one NaN in a gradient: {said}; {len(bad)} of {len(files)} files not finite")
    return tally


def _expected(
    kind: str, how_often: str, sick: tuple[int, ...], statuses: list[int], said: str
) -> bool:
    if kind == "weights" and 0 not in sick:  # the stage ends: all take over what the main one saved
        return not any(statuses)
    if kind == "weights":  # nothing can be skipped any more
        told = "not finite" in said or "no finite gradient" in said
        return 2 in statuses and 0 not in statuses and told
    if how_often == "once":
        return not any(statuses)
    return 2 in statuses and 0 not in statuses and "steps in a row" in said and ".png" in said


def _prepare(kind: str, steps: set[int], sick: tuple[int, ...]) -> Callable[[int], None]:
    """What a process does before it starts, by its rank."""

    def before(rank: int) -> None:
        if rank in sick:
            SICKNESSES[kind](steps)

    return before


def _sick_loss(steps: set[int]) -> None:
    forward, calls = Learner.forward, itertools.count()

    def sometimes(self: Learner, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        losses = forward(self, batch)
        if next(calls) in steps:
            losses["loss_cls"] = losses["loss_cls"] * float("nan")
        return losses

    Learner.forward = sometimes  # type: ignore[method-assign, assignment]


def _sick_gradient(steps: set[int]) -> None:
    """One number of one parameter's gradient, before the processes average theirs."""
    backward = StageTrainer._backward

    def sometimes(self: StageTrainer, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        handle = None
        if self.iter in steps:
            handle = self._parameters[5].register_hook(_with_nan)
        losses = backward(self, batch)
        if handle is not None:
            handle.remove()
        return losses

    StageTrainer._backward = sometimes  # type: ignore[method-assign]


def _with_nan(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient.view(-1)[0] = float("nan")
    return gradient


def _sick_output(steps: set[int]) -> None:
    """The detector's own predictions."""
    _sick_predictions(steps, teacher=False)


def _sick_teacher(steps: set[int]) -> None:
    _sick_predictions(steps, teacher=True)


def _sick_predictions(steps: set[int], teacher: bool) -> None:
    forward, calls = Learner.forward, itertools.count()

    def sometimes(self: Learner, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        model = self.teacher if teacher else self.detector
        if next(calls) not in steps or model is None:
            return forward(self, batch)
        predict = model.predict

        def not_a_number(images: Any) -> Any:
            output = predict(images)
            output.logits.data[..., 0] = float("nan")
            return output

        model.predict = not_a_number  # type: ignore[method-assign]
        try:
            return forward(self, batch)
        finally:
            del model.predict

    Learner.forward = sometimes  # type: ignore[method-assign, assignment]


def _sick_weights(steps: set[int]) -> None:
    """The optimizer's step itself overflows: a finite gradient, and weights that are not."""
    step = StageTrainer.run_step

    def sometimes(self: StageTrainer) -> None:
        step(self)
        if self.iter in steps:
            with torch.no_grad():
                self._parameters[3].view(-1)[0] = float("inf")

    StageTrainer.run_step = sometimes  # type: ignore[method-assign]


SICKNESSES: dict[str, Callable[[set[int]], None]] = {
    "loss": _sick_loss,
    "gradient": _sick_gradient,
    "predictions": _sick_output,
    "teacher": _sick_teacher,
    "weights": _sick_weights,
}


def _finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return True
