"""Processes that agree: rank 0 decides and all follow; a signal to one stops all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from detectron2.utils import comm

from cldetr.errors import InputError

T = TypeVar("T")

_SAME_REQUEST = 1.0  # seconds in which several signals are one: Ctrl-C reaches a process twice
_BEAT = 1.0  # seconds between the signs of life that rank 0 gives while others wait for it
_VISIBLE = 150.0  # seconds until a file of rank 0 must be seen; NFS trusts old listings for 60
_group: tuple[Any, Any] = (None, None)  # the default group, and the control group beside it


def control_group(timeout: timedelta | None = None) -> Any:
    """The gloo group of all ranks for control messages; the first call makes it, on all ranks.

    It is apart from the group that Detectron2's `comm` uses, so that rank 0 can give signs of life
    while an evaluator gathers its results.
    """
    global _group
    if _group[0] is not dist.group.WORLD:
        _group = (dist.group.WORLD, dist.new_group(backend="gloo", timeout=timeout))
    return _group[1]


def from_rank0(decide: Callable[[], T]) -> T:
    """Calls `decide` on rank 0 and returns its result, or raises its error, on every rank.

    All ranks must call it at the same point; none goes on before rank 0 is done. Rank 0 may take
    longer than the timeout: the others wait as long as it gives signs of life.
    """
    if comm.get_world_size() == 1:
        return decide()
    outcome: tuple[Any, Exception | None] | None = None
    if comm.is_main_process():
        with _heartbeat():
            try:
                outcome = (decide(), None)
            except (InputError, OSError) as error:
                outcome = (None, error)
        _send(outcome)
    else:
        while outcome is None:
            outcome = _send(None)
    value: Any
    value, failure = outcome
    if failure is not None:
        raise failure
    return value


def beside_rank0(work: Callable[[], T]) -> T:
    """Calls `work` on every rank; the others wait for rank 0's end, however long it takes.

    For work of which rank 0 does more than the rest, such as an evaluator's `evaluate`.
    """
    if comm.get_world_size() == 1:
        return work()
    if not comm.is_main_process():
        result = work()
        while _send(None) is None:
            pass
        return result
    with _heartbeat():
        result = work()
    _send(True)
    return result


def same_on_all(what: str, value: Mapping[str, Any]) -> None:
    """Stops where ranks hold different values of something that must be the same on all."""
    own = comm.get_rank()
    for rank, other in enumerate(comm.all_gather(dict(value))):
        problems = [
            f"{key}: {value.get(key)!r} on rank {own}, {other.get(key)!r} on rank {rank}"
            for key in sorted({*value, *other})
            if value.get(key) != other.get(key)
        ]
        if problems:
            raise InputError.listing(
                f"the processes have different {what} (give all machines the same command, code "
                "and files):",
                problems,
            )


def await_file(path: Path) -> Path:
    """Waits until this machine sees a file that rank 0 has written; returns its path.

    A network file system may show an old listing for a minute, above all of a name that was asked
    for before it was there.
    """
    end = time.monotonic() + _VISIBLE
    while not path.exists():
        if comm.is_main_process() or time.monotonic() > end:
            raise InputError(
                f"{path} is not there for rank {comm.get_rank()}: all machines must see the same "
                "OUTPUT_DIR, on a file system that they share"
            )
        time.sleep(0.2)
        if path.parent.is_dir():
            os.listdir(path.parent)  # makes NFS ask the server again
    return path


def _send(message: Any) -> Any:
    """Returns rank 0's message on every rank."""
    box = [message]
    dist.broadcast_object_list(box, src=0, group=control_group(), device=torch.device("cpu"))
    return box[0]


@contextmanager
def _heartbeat() -> Iterator[None]:
    """Sends None to the ranks that wait, every second, while rank 0 is busy in the main thread."""
    done = threading.Event()
    failures: list[RuntimeError] = []
    control_group()  # not for the first time in the thread

    def beat() -> None:
        try:
            while not done.wait(_BEAT):
                _send(None)
        except RuntimeError as error:  # another rank is gone
            failures.append(error)

    thread = threading.Thread(target=beat, daemon=True)  # no rank waits for it after a failure
    thread.start()
    try:
        yield
    finally:
        done.set()
    thread.join()
    if failures:
        raise failures[0]


class Interrupted(SystemExit):
    """The run was asked to stop and has saved its state; exits as the shell expects."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)


class StopRequest:
    """Stops a run on SIGTERM and SIGINT: at once, or while a stage trains after the step."""

    def __init__(self) -> None:
        self.signum = 0
        self._asked_at = 0.0
        self._waits = False
        self._before: dict[int, Any] = {}
        self._asked: tuple[Any, torch.Tensor] | None = None

    def __enter__(self) -> StopRequest:
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._before[signum] = signal.signal(signum, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this lasts a signal is only remembered: there are steps that a stop would lose."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def after_step(self) -> int:
        """The signal that all processes stop for after this step; 0 for none.

        Several processes answer what was asked after the step before: the answer is there by now,
        so that none waits for another, nor for its GPU.
        """
        if comm.get_world_size() == 1:
            return self.signum
        answer = self._answer()
        if not answer:
            flag = torch.tensor(self.signum)
            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=control_group(), async_op=True)
            self._asked = (work, flag)
        return answer

    def check(self) -> None:
        """Stops between stages where a signal came, on all processes together."""
        known = self._answer()
        signum = max(known, *comm.all_gather(self.signum))
        if signum:
            raise Interrupted(signum)

    def _answer(self) -> int:
        """The signal that any process knew of when it last asked; 0 for none."""
        if self._asked is None:
            return 0
        (work, flag), self._asked = self._asked, None
        work.wait()
        return int(flag)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        asked_before = self.signum and time.monotonic() - self._asked_at > _SAME_REQUEST
        if not self.signum:
            self.signum, self._asked_at = signum, time.monotonic()
        if asked_before or not self._waits:
            raise Interrupted(signum)
