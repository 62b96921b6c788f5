"""The moving average of the weights: its numbers, which model a phase has, and exact resume."""

import json

import pytest
import torch

from cldetr.engine.checkpoint import load_state
from cldetr.engine.step import StageTrainer
from cldetr.errors import InputError
from cldetr.methods.method import AverageRule

from .conftest import train

AVERAGE = ["METHOD.AVERAGE.ENABLED", "True", "METHOD.AVERAGE.DECAY", "0.3"]
SHORT = [
    *("SCHEDULE.FIRST.MAX_STEPS", "2", "SCHEDULE.TRAIN.MAX_STEPS", "5"),
    *("SCHEDULE.TRAIN.EPOCHS", "9", "METHOD.CALIBRATE.ENABLED", "False"),
]


def weights(folder, name):
    return load_state(folder / "phase2/train" / name)["model"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_config):
    """A run, and the weights before the second phase and after each of its steps."""
    folder = tmp_path_factory.mktemp("average")
    step, history = StageTrainer.run_step, []

    def recorded(self):
        if self.offset:
            detector = self.learner.detector
            if not history:
                history.append({k: x.clone() for k, x in detector.state_dict().items()})
            step(self)
            history.append({k: x.clone() for k, x in detector.state_dict().items()})
        else:
            step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageTrainer, "run_step", recorded)
        train(tiny_config(folder, *AVERAGE, *SHORT))
    return folder, history


def test_the_average_is_the_phases_model_beside_the_raw_weights(finished):
    folder, history = finished
    assert len(history) == 6
    raw, found = weights(folder, "model_raw.pth"), weights(folder, "model.pth")
    for name, start in history[0].items():
        assert torch.equal(raw[name], history[-1][name])
        if not start.is_floating_point():
            assert torch.equal(found[name], start)
            continue
        average = start.double()
        for t, current in enumerate(history[1:], start=1):
            decay = min(0.3, (1 + t) / (10 + t))  # 2/11, 3/12, then 0.3
            average = decay * average + (1 - decay) * current[name].double()
        torch.testing.assert_close(found[name].double(), average, rtol=1e-5, atol=1e-7)
    assert not (folder / "phase1/train/model_raw.pth").exists()


def test_both_are_evaluated(finished):
    folder, _ = finished
    results = json.loads((folder / "phase2/evaluate/metrics.json").read_text())
    beside = json.loads((folder / "phase2/evaluate/metrics_raw.json").read_text())
    assert results.keys() == beside.keys()
    record = json.loads((folder / "phase2/evaluate/stage.json").read_text())
    details = {"confusion.json", "precision_recall.json"}
    assert set(record["outputs"]) == {"metrics.json", "metrics_raw.json", *details}


def test_a_resumed_stage_has_the_same_average(finished, tiny_config, tmp_path, monkeypatch):
    folder, _ = finished
    step = StageTrainer.run_step

    def limited(self):
        if self.offset == 0 and self.step == 3:  # the given first phase has no steps
            raise KeyboardInterrupt
        step(self)

    given = ["MODEL.DETECTOR", str(folder / "phase1/train/model.pth"), *AVERAGE, *SHORT]
    with monkeypatch.context() as patch:
        patch.setattr(StageTrainer, "run_step", limited)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(tmp_path, *given))
    assert (tmp_path / "phase2/train/checkpoints/step_00000002").exists()
    train(tiny_config(tmp_path, *given), resume=True)
    for name in ("model.pth", "model_raw.pth"):
        wanted = weights(folder, name)
        assert all(torch.equal(x, wanted[key]) for key, x in weights(tmp_path, name).items())


def test_the_raw_weights_may_stay_the_model(finished, tiny_config, tmp_path):
    folder, _ = finished
    given = ["MODEL.DETECTOR", str(folder / "phase1/train/model.pth"), *AVERAGE, *SHORT]
    train(tiny_config(tmp_path, *given, "METHOD.AVERAGE.FINAL", "False"))
    for name, other in (("model.pth", "model_raw.pth"), ("model_average.pth", "model.pth")):
        wanted = weights(folder, other)
        assert all(torch.equal(x, wanted[key]) for key, x in weights(tmp_path, name).items())
    assert (tmp_path / "phase2/evaluate/metrics_average.json").exists()


def test_a_decay_of_one_is_refused():
    with pytest.raises(InputError, match=r"METHOD\.AVERAGE\.DECAY must lie in \[0, 1\)"):
        AverageRule(decay=1.0)
