"""The run that is broken: a whole two-phase run of a second or two, started by forking.

Importing torch and Detectron2 takes longer than the run, so a campaign imports them once and forks
a child for every run. The child is a process like any other: it is killed, it is sent signals, its
files are all that is left of it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cldetr.data.shapes import ShapesOptions, ensure_shapes
from cldetr.engine.checkpoint import load_state
from cldetr.train import run
from faults.tally import Options

CONFIG = Path(__file__).with_name("tiny.yaml")
STAGES = (
    *("phase1/train", "phase1/select", "phase1/evaluate"),
    *("phase2/train", "phase2/select", "phase2/calibrate", "phase2/evaluate"),
)
PLACES = ("start", *STAGES, "report")  # where a run can be
PERIOD = 2  # steps between the checkpoints of the tiny run


class TinyData:
    """The tiny data set on disk and the command lines that use it."""

    def __init__(self, work: Path, seed: int = 3) -> None:
        options = ShapesOptions(train_images=24, val_images=4, size=64, categories=4, seed=seed)
        self.paths = ensure_shapes(work / "shapes", options)

    def overrides(self) -> list[str]:
        """The settings that point to the data."""
        train, val = (
            f"{self.paths.annotations(part)}:{self.paths.images(part)}" for part in ("train", "val")
        )
        return ["DATASETS.TRAIN", f"['{train}']", "DATASETS.TEST", f"['{val}']"]

    def command(self, folder: Path, *more: str, resume: bool | None = None) -> list[str]:
        """Arguments of `train_net.py`; resumes where the folder already holds a run."""
        if resume is None:
            resume = (folder / "identity.json").exists()
        flags = [word for word in more if word.startswith("--")]
        words = [word for word in more if not word.startswith("--")]
        start = ["--config-file", str(CONFIG), *flags, *(["--resume"] if resume else [])]
        return [*start, *self.overrides(), "OUTPUT_DIR", str(folder), *words]


class Child:
    """A forked process, in a session of its own so that nothing of it can be left behind."""

    def __init__(
        self,
        work: Callable[[], int | None],
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.log = log
        self.began = time.monotonic()
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._become(work, env or {})

    def _become(self, work: Callable[[], int | None], env: Mapping[str, str]) -> None:
        status = 70
        try:
            os.setsid()
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, signal.SIG_DFL)
            os.environ.update(env)
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
            sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), write_through=True)
            torch.set_num_threads(1)
            status = work() or 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
            status = 1
        finally:
            os._exit(status)

    def poll(self) -> int | None:
        """The exit status (negative: the signal that ended it), or None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def wait(self, seconds: float = 180.0) -> int:
        """Waits for the end; a child that does not end is killed and counts as hung."""
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill_all()
                raise TimeoutError(f"still running after {seconds:.0f} s: {self.said()[-2000:]}")
            time.sleep(0.002)
        assert self.status is not None
        return self.status

    def send(self, signum: int) -> None:
        """Sends a signal to the process alone."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill −9, to the process alone, and waits until it is gone."""
        self.send(signal.SIGKILL)
        self.wait(30)

    def group(self) -> list[int]:
        """Processes of its session that are still there."""
        return [pid for pid in members(self.pid) if pid != self.pid]

    def kill_all(self) -> None:
        """Ends the process and all that it started."""
        for pid in self.group():
            os.kill(pid, signal.SIGKILL)
        self.kill()

    def said(self) -> str:
        """All that went to the console."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""


def start(
    arguments: Sequence[str],
    log: Path,
    before: Callable[[], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> Child:
    """Forks a child that does what `train_net.py` does with these arguments.

    Args:
        arguments: the command line.
        log: receives the console's output.
        before: run in the child first, to prepare a fault.
        env: variables of the child.
    """
    gc.collect()  # nothing of an earlier run is to be finalised in the child

    def work() -> int:
        if before is not None:
            before()
        return run(arguments)

    return Child(work, log, env)


def start_ranks(
    arguments: Sequence[str] | Callable[[int], Sequence[str]],
    folder: Path,
    world: int,
    before: Callable[[int], None] | None = None,
    timeout: float | None = None,
) -> list[Child]:
    """Forks the processes of one run, several of them as torchrun would number them.

    Args:
        arguments: the command line, or that of each rank.
        folder: receives the console's output of each as rank0.txt, rank1.txt, …
        world: how many.
        before: run in each child first with its rank, to prepare a fault.
        timeout: seconds that a process waits for another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    more = [] if timeout is None else ["--timeout", str(timeout / 60)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    return [
        start(
            [*more, *(arguments(rank) if callable(arguments) else arguments)],
            folder / f"rank{rank}.txt",
            None if before is None else lambda rank=rank: before(rank),  # type: ignore[misc]
            {
                **shared,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)},
            },
        )
        for rank in range(world)
    ]


class LateCopy:
    """A second machine's view of a run directory: files appear in it some seconds late."""

    def __init__(self, source: Path, target: Path, delay: float = 1.5) -> None:
        self.source, self.target, self.delay = source, target, delay
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> LateCopy:
        self.target.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._done.wait(0.1):
            for path in sorted(self.source.rglob("*")):
                with contextlib.suppress(OSError):  # it is gone again
                    self._copy(path, self.target / path.relative_to(self.source))

    def _copy(self, path: Path, target: Path) -> None:
        written = path.stat().st_mtime
        hidden = any(part.startswith(".") for part in path.relative_to(self.source).parts)
        if hidden or not path.is_file() or time.time() - written < self.delay:
            return
        if target.exists() and target.stat().st_mtime == written:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.late")
        shutil.copy2(path, partial)
        partial.replace(target)


def finish(children: Sequence[Child], seconds: float = 180.0) -> list[int]:
    """Waits for all; returns their exit statuses. Where one hangs, all are killed."""
    try:
        return [child.wait(seconds) for child in children]
    except TimeoutError:
        for child in children:
            child.kill_all()
        raise


@dataclass(frozen=True)
class Baseline:
    """What a campaign on runs begins with: data, a folder for runs, and an undisturbed run."""

    data: TinyData
    work: Path
    expected: dict[str, Any]  # its artefacts

    @staticmethod
    def of(options: Options, *more: str) -> Baseline:
        """Runs once without a fault, in `work / "undisturbed"`."""
        data, work = TinyData(options.work), options.folder("runs")
        child = start(data.command(work / "undisturbed", *more), work / "undisturbed.txt")
        if child.wait():
            raise RuntimeError(f"the undisturbed run failed: {child.said()[-2000:]}")
        return Baseline(data, work, artefacts(work / "undisturbed"))

    def resume(self, folder: Path, *more: str) -> str:
        """Lets a broken run go on; says how it ends otherwise than the undisturbed one."""
        child = start(self.data.command(folder, *more), folder.with_suffix(".txt"))
        return child.said()[-800:] if child.wait() else difference(folder, self.expected)


def artefacts(folder: Path) -> dict[str, Any]:
    """What a run ends with: weights, memory and metrics."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("phase*/*/model.pth")):
        found[path.relative_to(folder).as_posix()] = load_state(path)["model"]
    for pattern in ("phase*/select/*.json", "phase*/evaluate/metrics.json", "results.*"):
        for path in sorted(folder.glob(pattern)):
            if path.name != "stage.json":
                found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def difference(folder: Path, expected: Mapping[str, Any]) -> str:
    """Says how a run's artefacts differ from the expected ones, bit for bit; empty if not."""
    found = artefacts(folder)
    if found.keys() != expected.keys():
        return f"files differ: {sorted(found.keys() ^ expected.keys())}"
    for name, value in expected.items():
        if isinstance(value, bytes):
            if found[name] != value:
                return f"{name} differs"
            continue
        if value.keys() != found[name].keys():
            return f"{name}: other keys"
        for key, tensor in value.items():
            if not torch.equal(tensor, found[name][key]):
                return f"{name}: {key} differs"
    return ""


def finished_stages(folder: Path) -> dict[str, bytes]:
    """The stages that are done, with their records as they stand."""
    records = {stage: folder / stage / "stage.json" for stage in STAGES}
    return {stage: path.read_bytes() for stage, path in records.items() if path.exists()}


def present_stage(folder: Path) -> str:
    """The stage that a run is in."""
    if not (folder / "manifest.json").exists():
        return "start"
    done = finished_stages(folder)
    return next((stage for stage in STAGES if stage not in done), "report")


def stage_seconds(data: TinyData, folder: Path) -> dict[str, float]:
    """How long each stage of an undisturbed run takes here and now."""
    child = start(data.command(folder), folder.with_suffix(".txt"))
    seconds = dict.fromkeys(PLACES, 0.0)
    place, since = "start", time.monotonic()
    while child.poll() is None:
        now = present_stage(folder)
        if now != place:
            seconds[place] += time.monotonic() - since
            place, since = now, time.monotonic()
        time.sleep(0.0005)
    seconds[place] += time.monotonic() - since
    return seconds


def wait_for(child: Child, folder: Path, stage: str | None, delay: float) -> bool:
    """Waits until a run is in a stage, and then a while; False where it ended before."""
    while stage and child.poll() is None and present_stage(folder) != stage:
        time.sleep(0.0005)
    end = time.monotonic() + delay
    while child.poll() is None and time.monotonic() < end:
        time.sleep(0.0005)
    return child.poll() is None


def kill_at(children: Sequence[Child], path: Path) -> None:
    """Kills all processes of a run, and what they started, when a file of it appears."""
    while not path.exists() and all(child.poll() is None for child in children):
        time.sleep(0.0005)
    for child in children:
        child.send(signal.SIGSTOP)
    for child in children:
        child.kill_all()


def members(session: int) -> list[int]:
    """Processes of a session that are still there."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _session(pid) == session]


def _session(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])
