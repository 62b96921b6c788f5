"""What the benchmarks share: alternating runs, peak memory, versions."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "configs"


def alternate(
    runs: Mapping[str, Callable[[], object]],
    repeat: int,
    clock: Callable[[], float] = time.process_time,
    warm: int = 1,
) -> dict[str, float]:
    """Runs every side in turn, again and again; the median seconds of each side."""
    return medians(take_turns(runs, repeat, clock, warm))


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    repeat: int,
    clock: Callable[[], float] = time.process_time,
    warm: int = 1,
) -> dict[str, list[float]]:
    """Runs every side in turn, again and again; the seconds of each side, round by round.

    CPU time by default: with one thread, other processes disturb it least.
    """
    for run in runs.values():
        for _ in range(warm):
            run()
    times: dict[str, list[float]] = {side: [] for side in runs}
    for _ in range(repeat):
        for side, run in runs.items():
            start = clock()
            run()
            times[side].append(clock() - start)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median seconds of each side."""
    return {side: statistics.median(found) for side, found in times.items()}


def shares(times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """The median over the rounds of each side's time over that of `base` in the same round.

    Where the machine's speed changes in the course of minutes, a round sees one speed.
    """
    return {
        side: statistics.median(a / b for a, b in zip(found, times[base], strict=True))
        for side, found in times.items()
    }


def peak_mb() -> float:
    """The peak memory of this process, in MB.

    From /proc: `getrusage` would begin with the memory of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def make_detector(config: str, classes: int, *overrides: str) -> Any:
    """The detector of a file in configs/, with random weights, on the CPU."""
    from detectron2.modeling import build_model

    from cldetr.config import load_config

    keys = ["MODEL.DEVICE", "cpu", "MODEL.DETR.NUM_CLASSES", str(classes), *overrides]
    return build_model(load_config(str(CONFIGS / config), keys))


def ask_fresh_process(file: str, *arguments: str) -> dict[str, Any]:
    """Runs a benchmark's file in a process of its own; its last line, read as JSON."""
    command = [sys.executable, file, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, this project, torch and other packages."""
    found = {"python": platform.python_version()}
    return found | {
        name: import_module(name).__version__ for name in ("cldetr", "torch", *packages)
    }


def rounded(values: Mapping[str, float], digits: int = 3) -> dict[str, float]:
    """Numbers as they are worth printing."""
    return {key: round(value, digits) for key, value in values.items()}
