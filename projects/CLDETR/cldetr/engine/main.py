"""The command line of `train_net.py`: processes, logs, exit statuses."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed
import torch.multiprocessing as mp
from detectron2.engine import default_argument_parser, launch
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from cldetr.engine.from_lazy import recipe_from_lazy
from cldetr.engine.from_yaml import recipe_from_yaml
from cldetr.engine.heap import keep_freed_memory
from cldetr.engine.recipe import Recipe
from cldetr.engine.results import format_entry
from cldetr.engine.run import IncrementalRun
from cldetr.engine.scoring import score_weights
from cldetr.engine.trainer import Interrupted
from cldetr.errors import InputError
from cldetr.files import DISK_ERRORS, disk_error

logger = logging.getLogger("cldetr")


AfterRun = Callable[[Path], None]  # what is done with the directory of a run that has ended


def main(argv: Sequence[str] | None = None, after_run: AfterRun | None = None) -> int:
    """Runs `train_net.py`; returns its exit status (2 for what the user can mend)."""
    args = _parser().parse_args(argv)
    _stop_at_once()
    try:
        read_recipe(args)  # a misspelt key is told before processes start
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return _join(args, after_run)
        if args.num_machines * args.num_gpus > 1:
            return _launch(args, after_run)
        return _work(args, after_run)
    except (InputError, OSError) as error:
        return _tell(error)


def read_recipe(args: argparse.Namespace) -> Recipe:
    """Reads the config, YAML or LazyConfig, with its overrides."""
    overrides = [word for word in args.opts if word != "--"]
    if args.config_file.endswith(".py"):
        return recipe_from_lazy(args.config_file, overrides)
    return recipe_from_yaml(args.config_file, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = default_argument_parser(epilog=None)
    parser.description = "Trains a detector through all phases of an incremental scenario."
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        help="minutes after which a process that waits in vain for another gives up",
    )
    for action in parser._actions:
        if action.dest == "num_gpus":
            action.help = "number of processes on this machine: one per GPU, or on the CPU"
        elif action.dest == "config_file":
            action.required = True
        elif action.dest == "opts":
            action.help = "overrides: `KEY VALUE …` for YAML, `key=value …` for a LazyConfig"
    return parser


def _work(args: argparse.Namespace, after_run: AfterRun | None) -> int:
    """What each process does."""
    rank = comm.get_rank()
    setup_logger(name="cldetr", distributed_rank=rank)
    setup_logger(name="detectron2", distributed_rank=rank).setLevel(logging.WARNING)
    # It would print the traceback of what is told in a line, and of the rest a second time.
    logging.getLogger("detectron2.engine.train_loop").setLevel(logging.CRITICAL)
    recipe = _on_device(read_recipe(args))
    if recipe.runtime.device == "cpu":
        keep_freed_memory()
    if args.eval_only:
        entry = score_weights(recipe)
        if comm.is_main_process():
            logger.info("\n%s", format_entry(entry))
        return 0
    run = IncrementalRun(recipe, resume=args.resume)
    if comm.is_main_process():
        _log_to(Path(recipe.runtime.output_dir) / "log.txt")
    run.run()
    if after_run is not None and recipe.runtime.report and comm.is_main_process():
        after_run(Path(recipe.runtime.output_dir))
    return 0


def _on_device(recipe: Recipe) -> Recipe:
    """Puts each process on its own GPU, or all on the CPU where there is none."""
    device = recipe.runtime.device
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            logger.info("no GPU here: computing on the CPU")
            device = "cpu"
        elif comm.get_world_size() > 1:
            device = f"cuda:{comm.get_local_rank()}"
    runtime = dataclasses.replace(recipe.runtime, device=device)
    return dataclasses.replace(recipe, runtime=runtime)


def _log_to(path: Path) -> None:
    """Writes the log to the run directory too; Detectron2's helper would double the console."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(name)s %(levelname)s: %(message)s"))
    logging.getLogger("cldetr").addHandler(handler)


def _join(args: argparse.Namespace, after_run: AfterRun | None) -> int:
    """Joins the processes that torchrun started and numbered."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, timeout=timedelta(minutes=args.timeout))
    comm.create_local_process_group(int(os.environ["LOCAL_WORLD_SIZE"]))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        return _work(args, after_run)
    finally:
        torch.distributed.destroy_process_group()


def _launch(args: argparse.Namespace, after_run: AfterRun | None) -> int:
    """Starts the processes of this machine and waits for them; returns the worst exit status."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _pass_on)
    try:
        launch(
            _worker,
            args.num_gpus,
            num_machines=args.num_machines,
            machine_rank=args.machine_rank,
            dist_url="auto" if args.num_machines == 1 else args.dist_url,
            args=(args, after_run),
            timeout=timedelta(minutes=args.timeout),
        )
    except mp.ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0


def _pass_on(signum: int, frame: FrameType | None) -> None:
    """Tells the processes to stop; they save, and this one waits for them."""
    for child in multiprocessing.active_children():
        if child.pid is not None:
            os.kill(child.pid, signum)


def _stop_at_once() -> None:
    """Makes SIGTERM and SIGINT end the process with the usual statuses while nothing is to save."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _exit)


def _exit(signum: int, frame: FrameType | None) -> None:
    raise Interrupted(signum)


def _worker(args: argparse.Namespace, after_run: AfterRun | None) -> None:
    _stop_at_once()
    try:
        _work(args, after_run)
    except (InputError, OSError) as error:
        sys.exit(_tell(error))


def _tell(error: InputError | OSError) -> int:
    """Prints what the user can mend and returns the exit status; raises what is a fault of ours."""
    if isinstance(error, OSError):
        if error.errno not in DISK_ERRORS:
            raise error
        error = disk_error(error)
    print(f"train_net.py: {error}", file=sys.stderr)
    return 2
