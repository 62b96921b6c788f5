"""Starts that fail, starts that must be refused, and many starts in one directory.

A start that fails before anything was saved must leave nothing that stops the corrected command,
which is given without `--resume`; a directory with something to lose must refuse it. Of
simultaneous starts exactly one may run.
"""

from __future__ import annotations

import time
from pathlib import Path

from faults import tiny
from faults.tally import Options, Tally


def run(options: Options) -> Tally:
    """Tries each failure once, then simultaneous starts."""
    tally = Tally("starts")
    base = tiny.Baseline.of(options)
    _many(tally, base, options.number(short=4, nightly=20, long=20))
    names = list(FAILURES)
    for name in names[::3] if options.size == "short" else names:
        folder = base.work / name.replace(" ", "_")
        words = [word.format(work=base.work) for word in FAILURES[name]]
        child = tiny.start(base.data.command(folder, *words), folder.with_suffix(".txt"))
        status = child.wait()
        tally.check(
            "starts that fail say what is wrong",
            status == 2 and "Traceback" not in child.said(),
            f"{name}: {status} {child.said()[-800:]}",
        )
        _corrected(tally, base, name, folder)
    _killed(tally, base, options.number(short=1, nightly=5, long=20))
    _refused(tally, base)
    return tally


def _corrected(tally: Tally, base: tiny.Baseline, name: str, folder: Path) -> None:
    """The corrected command, without --resume."""
    child = tiny.start(base.data.command(folder, resume=False), folder.with_suffix(".txt"))
    wrong = child.said()[-800:] if child.wait() else tiny.difference(folder, base.expected)
    tally.check(
        "starts that failed: the same folder takes the corrected command",
        not wrong,
        f"{name}: {wrong}",
    )


def _killed(tally: Tally, base: tiny.Baseline, count: int) -> None:
    """Kills a start of another run before it has saved anything."""
    for number in range(count):
        folder = base.work / f"killed{number}"
        words = ("SEED", "7", "SOLVER.CHECKPOINT_PERIOD", "0", "SCENARIO.NAME", "2+2")
        child = tiny.start(base.data.command(folder, *words), folder.with_suffix(".txt"))
        tiny.wait_for(child, folder, "phase1/train", 0.1 * number / count)
        child.kill()
        if not tiny.finished_stages(folder):
            _corrected(tally, base, "killed", folder)


def _refused(tally: Tally, base: tiny.Baseline) -> None:
    """Starts that would lose or mix something."""
    used, empty = base.work / "undisturbed", base.work / "nothing_here"
    for name, command, expected in (
        ("a used folder", base.data.command(used, resume=False), "add --resume"),
        ("--resume of nothing", base.data.command(empty, resume=True), "without --resume"),
        ("--resume of another run", base.data.command(used, "SEED", "5"), "SEED: was 0, now 5"),
    ):
        child = tiny.start(command, base.work / "refused.txt")
        tally.check(
            "starts that would lose or mix something are refused",
            child.wait() == 2 and expected in child.said(),
            f"{name}: {child.status} {child.said()[-800:]}",
        )
    wrong = tiny.difference(used, base.expected)
    tally.check("starts that were refused changed nothing", not wrong, wrong)


def _many(tally: Tally, base: tiny.Baseline, count: int) -> None:
    """Starts the same run at the same time; the others must be told who has the directory."""
    folder = base.work / "shared"
    begin = time.time() + 1.0
    children = [
        tiny.start(
            base.data.command(folder, resume=False),
            base.work / f"start{number}.txt",
            lambda: time.sleep(max(begin - time.time(), 0)),
        )
        for number in range(count)
    ]
    statuses = tiny.finish(children)
    won = statuses.count(0)
    told = [
        child for child in children if "in use by" in child.said() or "add --resume" in child.said()
    ]
    tally.check(
        f"sets of {count} simultaneous starts: exactly one runs, the others are told",
        won == 1 and len(told) == count - 1 and statuses.count(2) == count - 1,
        f"statuses {statuses}, told {len(told)}",
    )


FAILURES: dict[str, tuple[str, ...]] = {
    "unknown key": ("SOLVER.BASE_LRR", "1e-3"),
    "key that nothing obeys": ("SOLVER.MAX_ITER", "100"),
    "value of another type": ("SEED", "many"),
    "annotation file missing": ("DATASETS.TRAIN", "['{work}/nowhere.json:{work}']"),
    "image folder missing": ("DATASETS.TEST", "['{work}/../shapes/annotations/x.json:{work}']"),
    "scenario of other classes": ("SCENARIO.NAME", "9+1"),
    "unknown category": ("SCENARIO.PHASES", "[[no such thing], [square]]"),
    "unknown strategy": ("METHOD.MEMORY.STRATEGY", "best"),
    "weights missing": ("MODEL.WEIGHTS", "{work}/nowhere.pth"),
    "weights are no weights": ("MODEL.WEIGHTS", "{work}/undisturbed/identity.json"),
    "weights of another model": (
        *("MODEL.WEIGHTS", "{work}/undisturbed/phase1/train/model.pth"),
        *("MODEL.DETR.NUM_QUERIES", "9"),
    ),
    "detector missing": ("MODEL.DETECTOR", "{work}/nowhere.pth"),
    "detector of other classes": (
        *("MODEL.DETECTOR", "{work}/undisturbed/phase2/train/model.pth"),
    ),
    "batch of nothing": ("SOLVER.IMS_PER_BATCH", "0"),
}
