"""Whole runs of detectors of Hugging Face: two phases, stopped and resumed, and classes added."""

from pathlib import Path

import pytest

from cldetr.analysis.predict import Predictor
from cldetr.config import load_config
from cldetr.engine.checkpoint import load_state
from cldetr.engine.step import StageTrainer

from ..modeling.tiny_huggingface import CONFIGS, make_model, save
from .conftest import train
from .test_run import assert_same

CONFIG = Path(__file__).parents[2] / "configs" / "detector" / "huggingface.yaml"
SHORT = {
    "SCENARIO.NAME": "3+1",
    "SCENARIO.ORDER": "id",
    "METHOD.PSEUDO.FOREGROUND": "0.0",
    "METHOD.MEMORY.BUDGET": "0.25",
    "SOLVER.IMS_PER_BATCH": "2",
    "SOLVER.CHECKPOINT_PERIOD": "1",
    "SOLVER.BASE_LR": "1e-3",
    **{f"SCHEDULE.{stage}.MAX_STEPS": "2" for stage in ("FIRST", "TRAIN", "CALIBRATE")},
    "DATALOADER.NUM_WORKERS": "0",
    "MODEL.DEVICE": "cpu",
    "REPORT": "False",
    "VIS_PERIOD": "0",
}
NATIVE = {
    "MODEL.HUGGINGFACE.LOSS": "native",
    "METHOD.PSEUDO.SOFT": "False",
    "METHOD.UNSEEN": "negative",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saves tiny detectors, each once."""
    saved = {}

    def make(name, labels=("circle", "square", "triangle")):
        if (name, labels) not in saved:
            saved[name, labels] = tmp_path_factory.mktemp(name)
            save(name, saved[name, labels], labels)
        return str(saved[name, labels])

    return make


@pytest.fixture
def config(tiny_shapes, tmp_path):
    def make(run, name, **more):
        words = {**SHORT, "MODEL.HUGGINGFACE.NAME": name, "OUTPUT_DIR": str(tmp_path / run)}
        words |= {key.replace("__", "."): str(value) for key, value in more.items()}
        flat = [word for pair in words.items() for word in pair]
        return load_config(str(CONFIG), [*tiny_shapes, *flat])

    return make


class CrashError(Exception):
    pass


RUNS = [(name, "ours") for name in CONFIGS] + [
    (name, "native") for name in ("rt_detr", "d_fine", "deimv2", "rf_detr")
]
FAST = {("deformable_detr", "ours"), ("rt_detr", "native"), ("rf_detr", "ours")}


@pytest.mark.parametrize(
    ("name", "loss"),
    [pytest.param(*run, marks=() if run in FAST else pytest.mark.slow) for run in RUNS],
)
def test_two_phases_that_are_stopped_and_resumed_end_as_those_that_are_not(
    name, loss, folder, config, tmp_path, monkeypatch
):
    keys = NATIVE if loss == "native" else {}
    results = train(config("whole", folder(name), **keys))
    assert [phase["phase"] for phase in results["phases"]] == [1, 2]
    step, crashes = StageTrainer.run_step, []

    def crash(self):
        if self.step == 1 and self.offset not in crashes:  # once in the middle of each stage
            crashes.append(self.offset)
            raise CrashError
        step(self)

    monkeypatch.setattr(StageTrainer, "run_step", crash)
    for attempt in range(4):
        try:
            train(config("stopped", folder(name), **keys), resume=attempt > 0)
        except CrashError:
            continue
        break
    assert crashes == [0, 2, 4]
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    final = load_state(tmp_path / "whole" / "phase2" / "calibrate" / "model.pth")["model"]
    start = make_model(name).named_parameters()
    moved = [not value.equal(final[f"model.{key}"]) for key, value in start]
    assert sum(moved) > len(moved) / 2
    # The weights know their model: the folder is not needed any more.
    monkeypatch.setattr("cldetr.modeling.huggingface.describe_source", None)
    weights = tmp_path / "whole" / "phase2" / "calibrate" / "model.pth"
    predictor = Predictor.from_checkpoint(weights, device="cpu")
    assert len(predictor.categories) == 4
