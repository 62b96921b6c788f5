"""Processes that agree: rank 0 decides and all follow; a signal to one stops all."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
from detectron2.utils import comm

from cldetr.errors import InputError

T = TypeVar("T")

_SAME_REQUEST = 1.0  # seconds in which several signals are one: Ctrl-C reaches a process twice


def from_rank0(decide: Callable[[], T]) -> T:
    """Calls `decide` on rank 0 and returns its result, or raises its error, on every rank.

    All ranks must call it at the same point; none goes on before rank 0 is done.
    """
    if comm.get_world_size() == 1:
        return decide()
    outcome: tuple[Any, Exception | None] = (None, None)
    if comm.is_main_process():
        try:
            outcome = (decide(), None)
        except (InputError, OSError) as error:
            outcome = (None, error)
    value, failure = comm.all_gather(outcome)[0]
    if failure is not None:
        raise failure
    return value


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

    def agreed(self) -> int:
        """The signal to stop for, the same on every process; 0 for none."""
        if comm.get_world_size() == 1:
            return self.signum
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        flag = torch.tensor(self.signum, device=device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return int(flag)

    def check(self) -> None:
        """Stops between stages where a signal came, on all processes together."""
        signum = self.agreed()
        if signum:
            raise Interrupted(signum)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        asked_before = self.signum and time.monotonic() - self._asked_at > _SAME_REQUEST
        if not self.signum:
            self.signum, self._asked_at = signum, time.monotonic()
        if asked_before or not self._waits:
            raise Interrupted(signum)
