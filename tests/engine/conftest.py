"""A data set and a detector so small that a whole run takes seconds."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cldetr.config import load_config
from cldetr.data.shapes import ShapesOptions, ensure_shapes
from cldetr.engine import IncrementalTrainer

ROOT = Path(__file__).parents[2]
TINY = str(Path(__file__).parent / "tiny.yaml")


def start(folder, shapes, *more, launcher=()):
    """Starts the tiny run as a user would."""
    command = [sys.executable, *launcher, str(ROOT / "train_net.py"), "--config-file", TINY, *more]
    return subprocess.Popen(
        [*command, *shapes, "OUTPUT_DIR", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(path, process, seconds=120):
    end = time.monotonic() + seconds
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert path.exists(), process.communicate()[0]


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
