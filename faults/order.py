"""Exact resume with 0 and 2 loader workers, on one and two processes; one sample order for all.

For each number of processes an undisturbed run is compared with runs, of other numbers of workers,
that are killed and resumed: all results must be bit-identical. Every process notes the images of
every step; the steps of two processes, put together, must be those of one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cldetr.engine.step import StageTrainer
from faults import tiny
from faults.tally import Options, Tally


def run(options: Options) -> Tally:
    """Compares all combinations."""
    tally = Tally("resume")
    data = tiny.TinyData(options.work)
    work = options.folder("runs")
    orders: dict[int, list[tuple[int, list[str]]]] = {}
    cases = [(1, "0"), (1, "2"), (2, "0"), (2, "2")]
    if options.size == "short":
        cases = [(2, "0")]
    for world in (1, 2):
        folder = work / f"undisturbed{world}"
        status = _run(data, folder, world, "0")
        tally.check("undisturbed runs end well", status == 0, f"{status}")
        orders[world] = _order(folder)
        expected = tiny.artefacts(folder / "run")
        for _, workers in [case for case in cases if case[0] == world]:
            again = work / f"killed{world}_{workers}"
            for stage in ("phase1/train", "phase2/calibrate"):
                mark = again / "run" / stage / "checkpoints" / f"step_{tiny.PERIOD:08d}"
                tiny.kill_at(_start(data, again, world, workers), mark)
            status = _run(data, again, world, workers)
            wrong = tiny.difference(again / "run", expected) if status == 0 else f"status {status}"
            tally.check(
                "killed and resumed runs are bit-identical (0 and 2 workers, 1 and 2 processes)",
                not wrong,
                f"{world} processes, {workers} workers: {wrong}",
            )
            tally.check(
                "killed and resumed runs see the samples of the undisturbed one",
                _order(again) == orders[world],
                f"{world} processes, {workers} workers",
            )
    tally.check("two processes see the samples of one, in the same steps", orders[1] == orders[2])
    tally.note(f"{len(orders[1])} steps of {len(orders[1][0][1])} images were compared")
    return tally


def _run(data: tiny.TinyData, folder: Path, world: int, workers: str) -> int:
    return max(map(abs, tiny.finish(_start(data, folder, world, workers), 120)))


def _start(data: tiny.TinyData, folder: Path, world: int, workers: str) -> list[tiny.Child]:
    arguments = data.command(folder / "run", "DATALOADER.NUM_WORKERS", workers)
    return tiny.start_ranks(arguments, folder, world, _note(folder), timeout=60)


def _note(folder: Path) -> Callable[[int], None]:
    """Makes a process write down the images of each step before it takes the step."""

    def before(rank: int) -> None:
        backward = StageTrainer._backward

        def noting(self: StageTrainer, batch: list[dict[str, Any]]) -> Any:
            names = " ".join(Path(entry["file_name"]).name for entry in batch)
            with open(folder / f"steps{rank}.txt", "a", encoding="utf-8") as stream:
                stream.write(f"{self.iter} {names}\n")
            return backward(self, batch)

        StageTrainer._backward = noting  # type: ignore[method-assign]

    return before


def _order(folder: Path) -> list[tuple[int, list[str]]]:
    """The images of each step over all processes; steps done twice must have had the same."""
    steps: dict[int, dict[int, list[str]]] = {}
    for path in sorted(folder.glob("steps*.txt")):
        rank = int(path.stem.removeprefix("steps"))
        for line in path.read_text(encoding="utf-8").splitlines():
            number, *names = line.split()
            known = steps.setdefault(int(number), {}).setdefault(rank, names)
            if known != names:
                return []
    return [
        (number, [name for rank in sorted(parts) for name in parts[rank]])
        for number, parts in sorted(steps.items())
    ]
