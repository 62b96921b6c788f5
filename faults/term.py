"""SIGTERM and SIGINT at random moments: the state is saved, nothing is done twice, within seconds.

The signal goes to the process alone (`kill`) or to it and its loader processes (Ctrl-C, a batch
system), once each. The run must exit with 143 or 130, and after all the resumes its log of steps
must have every step exactly once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

from faults import tiny
from faults.tally import Options, Tally

SECONDS = 10.0  # limit of a stop
SIGNALS_PER_RUN = 5


def run(options: Options) -> Tally:
    """Sends `count` signals over some runs."""
    tally = Tally("SIGTERM")
    rng = random.Random(options.seed)
    base = tiny.Baseline.of(options)
    steps = _steps(base.work / "undisturbed")
    seconds = tiny.stage_seconds(base.data, base.work / "watched")
    left = options.number(short=2, nightly=20, long=100)
    slowest, number = 0.0, 0
    while left > 0 and not options.out_of_time:
        number += 1
        folder = base.work / f"run{number}"
        sent = 0
        while True:
            workers = rng.choice(["0", "2"])
            child = tiny.start(
                base.data.command(folder, "DATALOADER.NUM_WORKERS", workers),
                folder.with_suffix(".txt"),
            )
            if sent < SIGNALS_PER_RUN and left > 0:
                signum = rng.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT])
                group = rng.random() < 0.5
                if _signal_somewhere(child, folder, rng, seconds, signum, group):
                    begun = time.monotonic()
                    status = child.wait(60)
                    took = time.monotonic() - begun
                    if status == 0 and (folder / "results.json").exists():
                        break  # it came too late
                    sent, left, slowest = sent + 1, left - 1, max(slowest, took)
                    whom = f"{signum.name} to {'all' if group else 'one'}, {workers} workers"
                    tally.check(
                        "signals: exit 143 or 130 within 10 s",
                        status == 128 + signum and took <= SECONDS,
                        f"{whom}: {status} after {took:.1f} s in {tiny.present_stage(folder)}: "
                        f"{child.said()[-800:]}",
                    )
                    child.kill_all()
                    continue
            if child.wait() != 0:
                tally.check("starts ended well", False, child.said()[-600:])
            break
        wrong = tiny.difference(folder, base.expected)
        tally.check("stopped runs end bit-identical", not wrong, wrong)
        done = _steps(folder)
        tally.check(
            "stopped runs did every step exactly once", done == steps, f"{done} instead of {steps}"
        )
    tally.note(f"the slowest stop took {slowest:.1f} s")
    return tally


def _signal_somewhere(
    child: tiny.Child,
    folder: Path,
    rng: random.Random,
    seconds: dict[str, float],
    signum: signal.Signals,
    group: bool,
) -> bool:
    """Waits for a random moment in a random stage ahead; False where the run ended before."""
    target = rng.choice(tiny.PLACES[tiny.PLACES.index(tiny.present_stage(folder)) :])
    if not tiny.wait_for(child, folder, target, rng.uniform(0, seconds[target])):
        return False
    if group:
        os.killpg(child.pid, signum)
    else:
        child.send(signum)
    return True


def _steps(folder: Path) -> list[int]:
    """The steps in a run's log, in the order in which they were done."""
    lines = (folder / "metrics.json").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["iteration"] for line in lines if "total_loss" in line]
