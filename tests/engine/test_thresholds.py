"""Thresholds by class in a run: kept with the stage, the same live, cached, again and by two."""

import json

import numpy as np
import pytest

from cldetr.data.predictions import PredictionStore
from cldetr.errors import InputError
from cldetr.methods.thresholds import MIN_SCORES, split_scores

from .conftest import finish, start, train

FLOOR = 0.022  # reached by many scores of class 1 and a few of the others
RULE = [
    *("METHOD.PSEUDO.SELECT", "per_class", "METHOD.PSEUDO.SCORE", "0.4"),
    *("METHOD.PSEUDO.SCORE_FLOOR", str(FLOOR), "METHOD.PSEUDO.SOFT", "False"),
]
SHORT = [
    *("SCHEDULE.FIRST.MAX_STEPS", "2", "SCHEDULE.TRAIN.MAX_STEPS", "1"),
    *("METHOD.CALIBRATE.ENABLED", "False"),
]


@pytest.fixture(scope="module")
def cached(tmp_path_factory, tiny_config):
    """A run whose teacher's predictions are stored, too."""
    folder = tmp_path_factory.mktemp("cached")
    train(tiny_config(folder, *RULE, *SHORT, "METHOD.PSEUDO.CACHE", "True"))
    return folder


def stored(folder):
    return json.loads((folder / "phase2/train/thresholds.json").read_text())


def given(cached):
    return [*RULE, *SHORT, "MODEL.DETECTOR", str(cached / "phase1/train/model.pth")]


def test_thresholds_are_those_of_the_stored_predictions(cached):
    store = PredictionStore(cached / "phase2/train/predictions")
    scores = [store[index].scores for index in range(len(store))]
    found = stored(cached)["thresholds"]
    assert found.keys() == {"0", "1", "2"}
    without = 0
    for label in range(3):
        own = [row[label] for rows in scores for row in rows if row.argmax() == label]
        assert all(score >= FLOOR for score in own)
        if len(own) >= MIN_SCORES:
            assert found[str(label)] == split_scores(np.array(own))
            assert FLOOR < found[str(label)] < 0.4
        else:
            assert found[str(label)] == 0.4
            without += 1
    assert without == len(stored(cached)["fallback"]) < 3  # at least one has its own
    assert sum(map(len, scores)) < 12 * len(store)  # queries: the floor excludes some
    record = json.loads((cached / "phase2/train/stage.json").read_text())
    assert "thresholds" in record["inputs"]


def test_classes_without_scores_are_named_with_their_threshold(
    cached, tiny_config, tmp_path, caplog
):
    train(tiny_config(tmp_path, *given(cached), "METHOD.PSEUDO.SCORE_FLOOR", "0.4"))
    assert set(stored(tmp_path)["thresholds"].values()) == {0.4}
    assert len(stored(tmp_path)["fallback"]) == 3
    names = ", ".join(stored(tmp_path)["fallback"])
    assert f"fewer than 10 different scores of at least 0.4 for {names}" in caplog.text


@pytest.mark.slow
def test_two_processes_find_what_one_finds_live_and_cached(
    cached, tiny_config, tiny_shapes, tmp_path
):
    train(tiny_config(tmp_path / "live", *given(cached)))
    finish(start(tmp_path / "pair", [*tiny_shapes, *given(cached)], "--num-gpus", "2"))
    assert stored(tmp_path / "live")["thresholds"] == stored(cached)["thresholds"]
    one, two = (
        (tmp_path / name / "phase2/train/thresholds.json").read_bytes() for name in ("live", "pair")
    )
    assert one == two


def test_thresholds_of_another_teacher_are_refused(cached, tiny_config, tmp_path, monkeypatch):
    def crash(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cldetr.engine.step.StageTrainer.run_step", crash)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(tmp_path, *given(cached)))
    path = tmp_path / "phase2/train/thresholds.json"
    content = stored(tmp_path)
    again = path.read_bytes()
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("cldetr.engine.step.StageTrainer.run_step", crash)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(tmp_path, *given(cached)), resume=True)
    assert path.read_bytes() == again
    content["about"]["teacher"] = "0" * 64
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="not those of this stage"):
        train(tiny_config(tmp_path, *given(cached)), resume=True)
