"""Processes, logs and exit statuses of a training script."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import detectron2.engine
import torch
import torch.distributed
import torch.multiprocessing as mp
from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from cldetr.engine.ranks import Interrupted, control_group
from cldetr.errors import InputError
from cldetr.files import DISK_ERRORS, disk_error
from cldetr.layers.cpu import keep_freed_memory

Main = Callable[..., Any]


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """Detectron2's arguments, and how long processes wait for each other."""
    parser = detectron2.engine.default_argument_parser(
        epilog
        or """
overrides come last: `KEY VALUE …` for a YAML config, `key=value …` for a LazyConfig
on a CPU --num-gpus is the number of processes
"""
    )
    parser.description = "Trains a detector through all phases of an incremental scenario."
    parser.add_argument(
        "--plan",
        action="store_true",
        help="train nothing: say what the run will do and need, and what would make it fail",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        help="minutes to wait for a process that shows no sign of life (default: 30)",
    )
    return parser


def default_setup(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Sets up logging and the machine for one process; nothing is written.

    The log goes to OUTPUT_DIR/log.txt from the first line on that the run writes itself.
    """
    rank = comm.get_rank()
    setup_logger(name="cldetr", distributed_rank=rank)
    setup_logger(name="detectron2", distributed_rank=rank).setLevel(logging.WARNING)
    # It would print the traceback of what is told in a line, and of the rest a second time.
    logging.getLogger("detectron2.engine.train_loop").setLevel(logging.CRITICAL)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not args.eval_only
    set_float32_precision(cfg.FLOAT32_PRECISION, cfg.MODEL.DEVICE)
    if not torch.cuda.is_available():
        keep_freed_memory()


def set_float32_precision(precision: str, device: str) -> None:
    """Sets how a GPU multiplies float32 numbers, in matrix products and convolutions alike.

    MODEL.DEVICE is "cuda" on machines without one, too: there it would change how a CPU multiplies,
    which is then much slower for small matrices.
    """
    if precision and torch.device(device).type == "cuda" and torch.cuda.is_available():
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision != "highest"


def launch(
    main: Main,
    num_gpus_per_machine: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: tuple[Any, ...] = (),
    timeout: timedelta = timedelta(minutes=30),
) -> int:
    """Runs `main` in one or several processes, as Detectron2's `launch`; returns an exit status.

    Beyond Detectron2's it joins processes that torchrun has started, runs several processes on a
    CPU, binds each process to its GPU, passes signals on, and prints what the user can fix without
    a traceback, with status 2.
    """
    _stop_at_once()
    try:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _run_as(rank_from_environment(os.environ, gpus), "env://", timeout, main, args)
        elif num_machines * num_gpus_per_machine > 1:
            check_gpus(num_gpus_per_machine, gpus)
            machines = (num_gpus_per_machine, num_machines, machine_rank)
            return _spawn(main, args, machines, dist_url, timeout)
        else:
            main(*args)
    except (InputError, OSError) as error:
        return _print_error(error)
    return 0


@dataclass(frozen=True)
class Rank:
    """Which of all processes this one is, and which of those of its machine.

    The latter is the index of its GPU.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int


def rank_from_environment(environment: Mapping[str, str], gpus: int) -> Rank:
    """The rank of a process that torchrun, or a script of a batch system, has started.

    The ranks of a machine are consecutive. LOCAL_RANK is not needed, and refused where it
    contradicts the rest: it may come from another launcher. Without LOCAL_WORLD_SIZE a machine has
    a process for each GPU that this one sees.

    Args:
        environment: of the process.
        gpus: that it sees; 0 on a CPU.
    """
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_world = int(environment.get("LOCAL_WORLD_SIZE") or min(world, max(gpus, 1)))
        stated = int(environment.get("LOCAL_RANK") or rank % local_world)
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise InputError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but RANK, LOCAL_RANK and LOCAL_WORLD_SIZE "
            f"do not say which process this is ({error}): use torchrun, or unset WORLD_SIZE"
        ) from error
    found = Rank(rank, world, rank % local_world, local_world)
    contradicts = "LOCAL_WORLD_SIZE" in environment and stated != found.local_rank
    if not 0 <= rank < world or world % local_world or contradicts:
        raise InputError(
            f"RANK {rank} of WORLD_SIZE {world} and LOCAL_RANK {stated} of LOCAL_WORLD_SIZE "
            f"{local_world} contradict each other: start the same number of processes on each "
            "machine, with torchrun"
        )
    check_gpus(local_world, gpus)
    return found


def check_gpus(processes: int, gpus: int) -> None:
    """Refuses more processes on a machine than it has GPUs; on a CPU any number is fine."""
    if gpus and processes > gpus:
        raise InputError(
            f"{processes} processes on a machine with {gpus} visible GPUs: give --num-gpus {gpus}, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def join(rank: Rank, url: str, timeout: timedelta) -> None:
    """Binds this process to its GPU and joins the group of all processes.

    Without an explicit device NCCL takes one by LOCAL_RANK, which other launchers leave behind, or
    by the global rank, which is another one where a machine has more GPUs than processes.
    """
    backend, device = "gloo", None
    if torch.cuda.is_available():
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", rank.local_rank)
        torch.cuda.set_device(device)
    os.environ["LOCAL_RANK"] = str(rank.local_rank)  # for libraries that ask for it
    torch.distributed.init_process_group(
        backend,
        init_method=url,
        rank=rank.rank,
        world_size=rank.world,
        timeout=timeout,
        device_id=device,
    )
    comm.create_local_process_group(rank.local_world)
    control_group(timeout)
    comm.synchronize()


def _run_as(rank: Rank, url: str, timeout: timedelta, main: Main, args: tuple[Any, ...]) -> None:
    """Runs `main` as one of several processes.

    After an error the group is not destroyed: that would wait for collective calls in which other
    processes are missing. The process ends, and with it its connections, which ends the others.
    """
    join(rank, url, timeout)
    main(*args)
    torch.distributed.destroy_process_group()


def _spawn(
    main: Main,
    args: tuple[Any, ...],
    machines: tuple[int, int, int],
    url: str | None,
    timeout: timedelta,
) -> int:
    """Starts the processes of this machine and waits for them; returns the worst exit status."""
    per_machine, number, _ = machines
    if number == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    elif not url or url == "auto":
        raise InputError(
            "--num-machines needs --dist-url tcp://HOST:PORT, the same on all machines: an address "
            "of the one with --machine-rank 0"
        )
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _pass_on)
    try:
        mp.start_processes(_worker, (machines, url, timeout, main, args), per_machine)
    except mp.ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0


def _worker(
    index: int,
    machines: tuple[int, int, int],
    url: str,
    timeout: timedelta,
    main: Main,
    args: tuple[Any, ...],
) -> None:
    _stop_at_once()
    per_machine, number, machine = machines
    rank = Rank(machine * per_machine + index, number * per_machine, index, per_machine)
    try:
        _run_as(rank, url, timeout, main, args)
    except (InputError, OSError) as error:
        sys.exit(_print_error(error))


def _pass_on(signum: int, frame: FrameType | None) -> None:
    """Forwards a signal to the processes; they save, and this one waits for them."""
    for child in multiprocessing.active_children():
        if child.pid is not None:
            os.kill(child.pid, signum)


def _stop_at_once() -> None:
    """Makes SIGTERM and SIGINT end the process with the usual statuses while nothing is to save."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)


def _print_error(error: InputError | OSError) -> int:
    """Prints what the user can fix and returns the exit status; raises what is a fault of ours."""
    if isinstance(error, OSError):
        if error.errno not in DISK_ERRORS:
            raise error
        error = disk_error(error)
    print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    return 2
