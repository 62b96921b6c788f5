"""Processes, logs and exit statuses of a training script."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
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

from cldetr.engine.ranks import Interrupted
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
        help="minutes after which a process that waits in vain for another gives up",
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
    """Sets how a GPU multiplies float32 numbers, in matrix products and convolutions alike."""
    if precision and torch.device(device).type == "cuda":  # it would change a CPU's numbers, too
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
    CPU, passes signals on, and prints what the user can fix without a traceback, with status 2.
    """
    _stop_at_once()
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _join(main, args, timeout)
        elif num_machines * num_gpus_per_machine > 1:
            url = "auto" if num_machines == 1 else dist_url
            return _spawn(
                main, args, (num_gpus_per_machine, num_machines, machine_rank, url), timeout
            )
        else:
            main(*args)
    except (InputError, OSError) as error:
        return _print_error(error)
    return 0


def _join(main: Main, args: tuple[Any, ...], timeout: timedelta) -> None:
    """Joins the processes that torchrun started and numbered."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, timeout=timeout)
    comm.create_local_process_group(int(os.environ["LOCAL_WORLD_SIZE"]))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        main(*args)
    finally:
        torch.distributed.destroy_process_group()


def _spawn(
    main: Main,
    args: tuple[Any, ...],
    processes: tuple[int, int, int, str | None],
    timeout: timedelta,
) -> int:
    """Starts the processes of this machine and waits for them; returns the worst exit status."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _pass_on)
    try:
        detectron2.engine.launch(_worker, *processes, args=(main, args), timeout=timeout)
    except mp.ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0


def _worker(main: Main, args: tuple[Any, ...]) -> None:
    _stop_at_once()
    try:
        main(*args)
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
