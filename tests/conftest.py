"""What every test shares: one thread, no network, no state between tests."""

import logging
import multiprocessing
import os
import traceback
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["WANDB_MODE"] = "offline"

import pytest
import torch
from detectron2.utils.logger import setup_logger

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--write-golden", action="store_true", help="write golden_losses.json instead of comparing"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test with the marker `own_process` in a fork of this process."""
    if pyfuncitem.get_closest_marker("own_process") is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def work():
        try:
            pyfuncitem.obj(**arguments)
            sender.send("")
        except BaseException:
            sender.send(traceback.format_exc())

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    sender.close()
    try:
        problem = receiver.recv()
    except EOFError:
        problem = "its process has died"
    process.join()
    if problem:
        pytest.fail(problem, pytrace=False)
    return True


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A finished run of a few steps, for what looks at runs and weights."""
    from cldetr.config import load_config
    from cldetr.data.shapes import ShapesOptions, ensure_shapes
    from cldetr.engine import IncrementalTrainer

    folder = tmp_path_factory.mktemp("run")
    options = ShapesOptions(train_images=36, val_images=8, size=64, categories=4, seed=3)
    paths = ensure_shapes(folder / "shapes", options)
    train, test = (f"{paths.annotations(x)}:{paths.images(x)}" for x in ("train", "val"))
    overrides = ["DATASETS.TRAIN", f"['{train}']", "DATASETS.TEST", f"['{test}']"]
    overrides += ["OUTPUT_DIR", str(folder / "run")]
    config = Path(__file__).parent / "engine" / "tiny.yaml"
    IncrementalTrainer(load_config(str(config), overrides)).train()
    return folder / "run"


@pytest.fixture(autouse=True)
def _restore_float32_precision():
    """A run on a (fake) GPU sets PyTorch's precision for the whole process."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.fixture(autouse=True)
def _restore_loggers():
    """A command logs to the console of the test that runs it, which is closed after the test."""
    loggers = [logging.getLogger(name) for name in ("cldetr", "detectron2")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
    setup_logger.cache_clear()
