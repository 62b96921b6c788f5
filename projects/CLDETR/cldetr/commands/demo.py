"""`cldetr demo`: the main job on the embedded data set, with fine-tuning for contrast."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path

from cldetr.config import load_config
from cldetr.config_files import find_config
from cldetr.data.shapes import ensure_shapes
from cldetr.engine.sweep import Job, make_job
from cldetr.errors import InputError
from cldetr.evaluation.results import format_table, load_results
from cldetr.report.pages import write_comparison
from cldetr.report.rundir import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--out", type=Path, default=Path("output/demo"), metavar="DIR", help="default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Generates the data, trains both methods from the same first phase and shows the tables.

    Once CL-DETR's first phase is there, fine-tuning starts from it in a second process, each on one
    core; a demo that was stopped goes on where it was.
    """
    begin = time.monotonic()
    ensure_shapes("datasets/shapes")
    ours = _job("cldetr", "shapes_recommended", args.out)
    plain = _job("finetune", "shapes_finetune", args.out, "MODEL.DETECTOR", str(ours.first_model))
    if not ours.finished or not plain.finished:
        _train(ours, plain)
    for job in (plain, ours):
        print("\n" + format_table(load_results(job.folder / "results.json")))
    page = write_comparison([read_run(job.folder) for job in (plain, ours)], args.out / "report")
    print(
        "\nThe old classes after phase 2 are what fine-tuning forgets and our method keeps.\n"
        f"Both side by side: {page}. Each by itself: {ours.folder / 'report/index.html'} and "
        f"{plain.folder / 'report/index.html'}.\n"
        f"{(time.monotonic() - begin) / 60:.1f} minutes."
    )
    return 0


def _job(name: str, config: str, out: Path, *overrides: str) -> Job:
    return make_job(name, load_config(str(find_config(config)), overrides), out / name)


def _train(ours: Job, plain: Job) -> None:
    """Runs both jobs, our method on the console and fine-tuning into a file."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    plain.folder.mkdir(parents=True, exist_ok=True)
    print(f"Our method trains in {ours.folder}; fine-tuning follows beside it in {plain.folder}")
    with open(plain.folder / "console.txt", "ab") as console:
        running = {ours: subprocess.Popen(ours.command(), env=env)}
        try:
            while any(process.poll() is None for process in running.values()):
                if plain not in running and ours.first_model.with_name("stage.json").exists():
                    running[plain] = subprocess.Popen(
                        plain.command(), env=env, stdout=console, stderr=subprocess.STDOUT
                    )
                time.sleep(0.2)
        finally:
            for process in running.values():
                process.terminate()
                process.wait()
    for job, process in running.items():
        if process.returncode:
            raise InputError(f"{job.folder} failed ({process.returncode}): run the demo again")
