"""A run of a LazyConfig is predicted with, drawn and reported on as any other."""

import json

import pytest

from cldetr.analysis import Predictor
from cldetr.config import load_config
from cldetr.config_files import find_config
from cldetr.engine import IncrementalTrainer
from cldetr.engine.restore import config_of_run
from cldetr.train import show_run


@pytest.fixture(scope="module")
def lazy_run(tiny_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lazy") / "run"
    data = config_of_run(tiny_run).DATASETS
    overrides = [
        f"dataloader.train.dataset.names=['{data.TRAIN[0]}']",
        f"dataloader.test.dataset.names=['{data.TEST[0]}']",
        f"train.output_dir={folder}",
        "train.device=cpu",
        "scenario.name=3+1",
        "model.num_queries=12",
        "dataloader.train.total_batch_size=4",
        "dataloader.train.num_workers=0",
        *(f"schedule.{stage}.max_steps=1" for stage in ("first", "train", "calibrate")),
    ]
    IncrementalTrainer(load_config(str(find_config("lazy/shapes.py")), overrides)).train()
    return folder


def test_weights_of_the_run_predict_alone(lazy_run, tiny_run):
    predictor = Predictor.from_checkpoint(lazy_run / "phase2/calibrate/model.pth")
    image = sorted((tiny_run.parent / "shapes/images/val").iterdir())[0]
    assert predictor.detector.num_queries == 12
    assert len(predictor(image, score=0.0)) > 0


def test_the_run_ends_with_pictures_diagnostics_and_a_page(lazy_run, caplog):
    show_run(lazy_run)
    assert "did not work" not in caplog.text
    for kind in ("pictures", "diagnostics"):
        captions = json.loads((lazy_run / kind / "captions.json").read_text())
        assert captions
        assert all((lazy_run / kind / name).is_file() for name in captions)
    page = (lazy_run / "report/index.html").read_text()
    assert "LAZY.model._target_" in page
    assert page.count("<figure") >= 10
