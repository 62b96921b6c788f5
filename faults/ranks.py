"""Processes that die or hang, a parent that is killed, and many starts in one directory.

Real command lines: `train_net.py --num-gpus 2 --timeout …` in a session of its own. Whatever
happens to one process, all of them must be gone within the timeout and a margin, and the run must
go on with `--resume`. Of simultaneous starts exactly one may run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from faults import tiny
from faults.tally import Options, Tally

ROOT = Path(__file__).parents[1]
TIMEOUT = 15.0  # seconds that a process waits for another
MARGIN = 60.0  # torch gives processes half a minute to end by themselves


def run(options: Options) -> Tally:
    """Tries each fate once, then the simultaneous starts."""
    tally = Tally("processes")
    data = tiny.TinyData(options.work)
    work = options.folder("runs")
    _many_starts(tally, data, work, options.number(short=4, nightly=20, long=20))
    fates = {} if options.size == "short" else FATES
    slowest = 0.0
    for name, fate in fates.items():
        if options.out_of_time:
            break
        folder = work / name.replace(" ", "_")
        process = _start(data, folder, work / f"{folder.name}.txt", background="&" in name)
        ready = _wait(folder / "phase1/train/checkpoints/step_00000002", process)
        if not ready:
            tally.check("fates", False, f"{name}: did not start: {_said(work, folder)}")
            _end(process)
            continue
        fate(process)
        begun = time.monotonic()
        while _members(process) and time.monotonic() - begun < TIMEOUT + MARGIN:
            time.sleep(0.1)
        took, left = time.monotonic() - begun, _members(process)
        slowest = max(slowest, took)
        tally.check(
            "fates: all processes gone in time, no orphan",
            not left,
            f"{name}: {len(left)} left after {took:.0f} s: {_said(work, folder)}",
        )
        _end(process)
        again = tiny.start(data.command(folder), work / f"{folder.name}_again.txt")
        tally.check("fates: the run goes on", again.wait() == 0, f"{name}: {again.said()[-500:]}")
    if slowest:
        tally.note(f"the slowest end took {slowest:.0f} s with a timeout of {TIMEOUT:.0f} s")
    return tally


def _many_starts(tally: Tally, data: tiny.TinyData, work: Path, count: int) -> None:
    """Starts the same run at the same time; the others must be told who has the directory."""
    folder = work / "shared"
    begin = time.time() + 1.0
    children = [
        tiny.start(
            data.command(folder, resume=False),
            work / f"start{number}.txt",
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


def _start(
    data: tiny.TinyData, folder: Path, log: Path, background: bool
) -> subprocess.Popen[bytes]:
    words = data.command(folder)
    command = [sys.executable, str(ROOT / "train_net.py"), "--num-gpus", "2"]
    command += ["--timeout", str(TIMEOUT / 60), *words]

    def ignore_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what a shell does for `command &`

    with open(log, "wb") as stream:
        return subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ignore_interrupts if background else None,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def _wait(path: Path, process: subprocess.Popen[bytes], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None and not path.exists():
        time.sleep(0.002)
    return path.exists()


def _members(process: subprocess.Popen[bytes]) -> list[int]:
    """Processes of the command's session that are still there."""
    process.poll()
    return tiny.members(process.pid)


def _ranks(process: subprocess.Popen[bytes]) -> list[int]:
    """The training processes: children of the command that run `spawn_main`, in order."""
    found = []
    for pid in sorted(_members(process)):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        if "spawn_main" in words:
            found.append(pid)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    for pid in _members(process):
        os.kill(pid, signal.SIGKILL)
    process.wait(30)


def _said(work: Path, folder: Path) -> str:
    return (work / f"{folder.name}.txt").read_text(encoding="utf-8", errors="replace")[-600:]


def _to_rank(number: int, signum: int) -> Callable[[subprocess.Popen[bytes]], None]:
    return lambda process: os.kill(_ranks(process)[number], signum)


def _to_parent(signum: int) -> Callable[[subprocess.Popen[bytes]], None]:
    return lambda process: os.kill(process.pid, signum)


FATES: dict[str, Callable[[subprocess.Popen[bytes]], None]] = {
    "first process killed": _to_rank(0, signal.SIGKILL),
    "second process killed": _to_rank(1, signal.SIGKILL),
    "first process hangs": _to_rank(0, signal.SIGSTOP),
    "second process hangs": _to_rank(1, signal.SIGSTOP),
    "parent killed": _to_parent(signal.SIGKILL),
    "parent killed, started with &": _to_parent(signal.SIGKILL),
    "parent asked to stop": _to_parent(signal.SIGTERM),
    "Ctrl-C": lambda process: os.killpg(process.pid, signal.SIGINT),
}
