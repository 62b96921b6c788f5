"""A data set and a detector so small that a whole run takes seconds."""

import gc
import itertools
import os
import runpy
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from faults.tiny import Child

from cldetr.config import load_config
from cldetr.data.shapes import ShapesOptions, ensure_shapes
from cldetr.engine import IncrementalTrainer

ROOT = Path(__file__).parents[2]
TINY = str(Path(__file__).parent / "tiny.yaml")
_numbers = itertools.count(1)  # of the files that scripts print to


def start_script(script, arguments, folder, launcher=(), env=None):
    """Runs a script in a process of its own, as `python SCRIPT ARGUMENTS` in a folder.

    It is a fork of this process: importing torch takes longer than what the tests run. A launcher,
    such as `-m torch.distributed.run`, gets a new interpreter.
    """
    words = [*launcher, str(script), *arguments]

    def work():
        os.chdir(folder)
        if launcher:
            os.execv(sys.executable, [sys.executable, *words])
        sys.argv = words
        runpy.run_path(str(script), run_name="__main__")

    gc.collect()  # nothing of this process is to be finalised in the fork
    return Child(work, Path(folder) / f"console{next(_numbers)}.txt", env)


def start(folder, shapes, *more, launcher=()):
    """Starts the tiny run as a user would."""
    arguments = ["--config-file", TINY, *more, *shapes, "OUTPUT_DIR", str(folder)]
    return start_script(ROOT / "train_net.py", arguments, Path(folder).parent, launcher)


def finish(process, status=0):
    """Waits for the end of a script; returns what it has printed."""
    assert process.wait() == status, process.said()
    return process.said()


def wait_for(path, process, seconds=120):
    end = time.monotonic() + seconds
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert path.exists(), process.said()


@pytest.fixture(scope="session")
def tiny_shapes(tmp_path_factory):
    """The overrides that point a config to the tiny data set."""
    options = ShapesOptions(train_images=36, val_images=8, size=64, categories=4, seed=3)
    paths = ensure_shapes(tmp_path_factory.mktemp("shapes") / "tiny", options)
    references = [f"{paths.annotations(x)}:{paths.images(x)}" for x in ("train", "val")]
    return ["DATASETS.TRAIN", f"['{references[0]}']", "DATASETS.TEST", f"['{references[1]}']"]


@pytest.fixture(scope="session")
def tiny_config(tiny_shapes):
    """Makes a config of the tiny run with overrides."""

    def make(folder, *overrides):
        return load_config(TINY, [*tiny_shapes, "OUTPUT_DIR", str(folder), *overrides])

    return make


def train(cfg, resume=False):
    """Runs all that is left of a run; returns its results."""
    trainer = IncrementalTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    return trainer.train()
