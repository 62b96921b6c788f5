"""kill −9 at every single step of a save.

First the functions that write what a run stands on, alone: killed at every line they execute (in
this project's modules and in `shutil`), and with every twentieth of the bytes of a weights file
written. Then a whole run: killed before each of its file operations, one run for each.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from cldetr.engine.checkpoint import latest_checkpoint, save_checkpoint, save_state
from cldetr.engine.ledger import Ledger
from cldetr.evaluation.results import load_results, write_results
from faults import tiny
from faults.tally import Options, Tally

PREFIXES = 20
_OPERATIONS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


def run(options: Options) -> Tally:
    """Kills at every step of every kind of save, then at every file operation of a run."""
    tally = Tally("kill in a save")
    work = options.folder("saves")
    for name, kind in SAVES.items():
        stride = {"short": 12, "nightly": 1, "long": 1}[options.size]
        for number, fault in enumerate(_kills(kind, work / name, stride)):
            folder = work / name / str(number)
            folder.mkdir(parents=True)
            kind.prepare(folder)
            child = tiny.Child(lambda: fault(folder), work / "saves.txt")  # noqa: B023 - at once
            if child.wait(60) == 0:
                break
            wrong = kind.judge(folder)
            tally.check(f"{name}: kills leave the old or the new", not wrong, f"{number}: {wrong}")
            if options.out_of_time:
                return tally
    _whole_run(options, tally)
    return tally


class Save:
    """A kind of save: what is there before, the save, and what may be there after a kill."""

    def __init__(
        self,
        prepare: Callable[[Path], None],
        act: Callable[[Path], None],
        judge: Callable[[Path], str],
    ) -> None:
        self.prepare = prepare
        self.act = act
        self.judge = judge


def _state(step: int) -> dict[str, Any]:
    return {"model": {"weight": _weight(step)}, "step": step}


def _weight(step: int) -> torch.Tensor:
    return torch.full((5000,), float(step))


def _checkpoints(*before: int) -> Save:
    """Saving step 30 beside older checkpoints."""

    def prepare(folder: Path) -> None:
        for step in before:
            save_checkpoint(folder, step, _state(step))

    def judge(folder: Path) -> str:
        for again in (False, True):
            if again:  # the run goes on and saves this step anew
                save_checkpoint(folder, 30, _state(30))
            found = latest_checkpoint(folder)
            step = found.step if found else None
            allowed = [30] if again else [30, max(before, default=None)]
            if step not in allowed:
                return f"step {step} is found, not one of {allowed}"
            if found and not torch.equal(found.state["model"]["weight"], _weight(found.step)):
                return f"step {step} has other weights"
        return ""

    return Save(prepare, lambda folder: save_checkpoint(folder, 30, _state(30)), judge)


def _stage() -> Save:
    """Finishing a stage that has checkpoints."""

    def act(folder: Path) -> None:
        ledger = Ledger(folder)
        place = ledger.folder(1, "train")
        save_state(place / "model.pth", _state(40))
        ledger.finish(1, "train", ["model.pth"], {"data": "x"}, {"steps": 40})

    def judge(folder: Path) -> str:
        ledger = Ledger(folder)
        place = ledger.folder(1, "train")
        if ledger.finished(1, "train") is None:
            found = latest_checkpoint(place / "checkpoints")
            if found is None or found.step != 20:
                return "neither finished nor resumable"
            act(folder)
        record = ledger.finished(1, "train")
        return "" if record and record["facts"]["steps"] == 40 else "the record is another"

    def prepare(folder: Path) -> None:
        _checkpoints(10, 20).prepare(folder / "phase1/train/checkpoints")

    return Save(prepare, act, judge)


def _results() -> Save:
    """Writing the results over older ones."""

    def content(number: int) -> dict[str, Any]:
        return {"format": 1, "phases": [], "number": number}

    def judge(folder: Path) -> str:
        number = load_results(folder / "results.json")["number"]
        return "" if number in (1, 2) else f"results {number}"

    return Save(
        lambda folder: write_results(content(1), folder),
        lambda folder: write_results(content(2), folder),
        judge,
    )


SAVES = {
    "first checkpoint": _checkpoints(),
    "second checkpoint": _checkpoints(20),
    "third checkpoint": _checkpoints(10, 20),
    "end of a stage": _stage(),
    "results": _results(),
}


def _kills(kind: Save, folder: Path, stride: int) -> Iterator[Callable[[Path], None]]:
    """Faults one after the other: the prefixes of weights files, then every line."""
    if "results" not in folder.name:
        for part in range(0, PREFIXES, stride):
            yield lambda place, part=part: _cut_weights(kind, place, part)  # type: ignore[misc]
    number = 1 - stride
    while True:
        number += stride
        yield lambda place, number=number: _kill_at_line(kind, place, number)  # type: ignore[misc]


def _cut_weights(kind: Save, folder: Path, part: int) -> None:
    save = torch.save

    def cut(state: Any, target: Any) -> None:
        buffer = io.BytesIO()
        save(state, buffer)
        content = buffer.getvalue()[: len(buffer.getvalue()) * part // PREFIXES]
        if hasattr(target, "write"):
            target.write(content)
            target.flush()
        else:
            Path(target).write_bytes(content)
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = cut  # type: ignore[assignment]
    kind.act(folder)


def _kill_at_line(kind: Save, folder: Path, number: int) -> None:
    """Kills at the n-th line that a save executes; ends well when it has fewer."""
    left = number

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if "/cldetr/" not in name and not name.endswith(("shutil.py", "contextlib.py")):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    kind.act(folder)
    sys.settrace(None)


def _whole_run(options: Options, tally: Tally) -> None:
    """One run for each file operation of a run: killed before it, resumed, compared."""
    base = tiny.Baseline.of(options)
    number, stride = 1, options.number(short=150, nightly=12, long=1)
    while not options.out_of_time:
        folder, log = base.work / f"run{number}", base.work / f"run{number}.txt"
        child = tiny.start(
            base.data.command(folder),
            log,
            before=lambda: count_operations(folder, lambda n: _die_at(n, number)),  # noqa: B023
        )
        if child.wait() == 0:
            tally.note(f"a run has {number - 1} file operations (every {stride}. was hit)")
            return
        wrong = base.resume(folder)
        tally.check(
            "kills before a file operation of a run recovered, bit-identical",
            not wrong,
            f"operation {number}: {wrong}",
        )
        number += stride


def _die_at(operation: int, number: int) -> None:
    if operation == number:
        os.kill(os.getpid(), signal.SIGKILL)


def count_operations(folder: Path, act: Callable[[int], object]) -> None:
    """Calls `act` with 1, 2, … before each operation of this process on files below a folder.

    Files opened for writing, renames, removals, new folders, and torch.save, which opens its file
    without Python seeing it.
    """
    number = 0
    inside = str(folder)

    def tick() -> None:
        nonlocal number
        number += 1
        act(number)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR):
                return
        elif event in _OPERATIONS:
            path = arguments[0]
        else:
            return
        if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(inside):
            tick()

    save = torch.save

    def saving(*words: Any, **more: Any) -> None:
        tick()
        save(*words, **more)

    torch.save = saving
    sys.addaudithook(hook)
