"""Runs whose teacher is asked once: the same labels as live, at any interruption the same bits."""

import json
import shutil

import pytest
import torch
from detectron2.data import DatasetCatalog
from faults import tiny

from cldetr.data.loader import MappedDataset
from cldetr.data.mapper import Augmentation, Mapper
from cldetr.data.predictions import PredictionStore
from cldetr.engine.checkpoint import load_state
from cldetr.engine.ranks import Interrupted, StopRequest
from cldetr.engine.restore import build_detector
from cldetr.engine.rundata import RunData
from cldetr.engine.step import StageTrainer
from cldetr.errors import InputError
from cldetr.methods.learner import Learner, freeze

from .conftest import TINY, train

CACHE = ["METHOD.PSEUDO.CACHE", "True", "METHOD.PSEUDO.FOREGROUND", "0.01"]
NO_AUGMENTATION = ["INPUT.RANDOM_FLIP", "none", "INPUT.MIN_SIZE_TRAIN", "[0]"]


def weights(folder, stage="phase2/calibrate"):
    return load_state(folder / stage / "model.pth")["model"]


def assert_same_weights(folder, other):
    for stage in ("phase2/train", "phase2/calibrate"):
        theirs = weights(other, stage)
        for key, value in weights(folder, stage).items():
            assert torch.equal(value, theirs[key]), f"{stage}: {key}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_config):
    """An uninterrupted run with stored predictions, in training and in calibration."""
    folder = tmp_path_factory.mktemp("cached")
    train(tiny_config(folder, *CACHE, *COMPLETE))
    return folder


COMPLETE = [
    *("METHOD.CALIBRATE.COMPLETE.ENABLED", "True"),
    *("METHOD.CALIBRATE.COMPLETE.CACHE", "True"),
    *("METHOD.CALIBRATE.COMPLETE.FOREGROUND", "0.01"),
]


def test_a_run_keeps_what_the_teacher_said_and_says_what_it_is_of(finished):
    first = json.loads((finished / "phase1/train/stage.json").read_text())
    manifest = json.loads((finished / "phase2/train/predictions/manifest.json").read_text())
    assert manifest["about"]["teacher"] == first["outputs"]["model.pth"]
    assert len(manifest["about"]["classes"]) == 3
    facts = json.loads((finished / "phase2/train/stage.json").read_text())
    assert facts["facts"]["images"] == manifest["about"]["images"]
    assert "predictions" in facts["inputs"]
    second = json.loads((finished / "phase2/train/stage.json").read_text())
    manifest = json.loads((finished / "phase2/calibrate/predictions/manifest.json").read_text())
    assert manifest["about"]["teacher"] == second["outputs"]["model.pth"]
    assert len(manifest["about"]["classes"]) == 4


def test_replayed_exemplars_have_predictions_too(finished):
    store = PredictionStore(finished / "phase2/train/predictions")
    memory = json.loads((finished / "phase1/select/memory.json").read_text())
    exemplars = len(memory["phases"][0]["image_ids"])
    manifest = json.loads((finished / "manifest.json").read_text())
    assert exemplars > 0
    assert len(store) == len(manifest["phases"][1]["image_ids"]) + exemplars
    assert all(len(store[len(store) - 1 - place].scores) for place in range(exemplars))


def test_without_augmentation_training_is_as_with_the_live_teacher(finished, tiny_config, tmp_path):
    given = ["MODEL.DETECTOR", str(finished / "phase1/train/model.pth")]
    shared = [
        *given,
        *NO_AUGMENTATION,
        "MODEL.DETR.DROPOUT",
        "0.0",
        "SCHEDULE.TRAIN.MAX_STEPS",
        "2",
    ]
    train(tiny_config(tmp_path / "cached", *CACHE, *shared))
    live = ["METHOD.PSEUDO.FOREGROUND", "0.01"]
    train(tiny_config(tmp_path / "live", *live, *shared))
    # The first step's: Adam turns a difference in the last bit of a gradient into a whole step.
    first, again = (
        json.loads((tmp_path / name / "metrics.json").read_text().splitlines()[0])
        for name in ("cached", "live")
    )
    compared = [key for key in first if "loss" in key or "pseudo" in key]
    assert {key: first[key] for key in compared} == pytest.approx(
        {key: again[key] for key in compared}, rel=1e-5
    )
    assert first["pseudo/per_image"] > 0


class CrashError(Exception):
    """Stands for a crash at a chosen moment."""


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_crashes_all_along_change_nothing(finished, tiny_config, tmp_path, monkeypatch, workers):
    step, ask = StageTrainer.run_step, Learner.teacher_candidates
    budget = [0]

    def spend():
        if budget[0] == 0:
            raise CrashError
        budget[0] -= 1

    monkeypatch.setattr(StageTrainer, "run_step", lambda self: (spend(), step(self)))
    monkeypatch.setattr(
        Learner, "teacher_candidates", lambda self, batch: (spend(), ask(self, batch))[1]
    )
    crashes, limit = 0, 3
    while not (tmp_path / "results.json").exists():
        budget[0] = limit
        limit += 4  # asking about all images has to fit in, in the end
        more = ["DATALOADER.NUM_WORKERS", str(workers)]
        try:
            train(tiny_config(tmp_path, *CACHE, *COMPLETE, *more), resume=crashes > 0)
        except CrashError:
            crashes += 1
    assert crashes >= 3
    assert_same_weights(tmp_path, finished)


def stop_in_training(tiny_config, finished, folder, monkeypatch):
    """A run that has stored predictions and a checkpoint of phase 2, and stopped there."""
    step = StageTrainer.run_step

    def limited(self):
        if self.step == 3:
            raise CrashError
        step(self)

    given = ["MODEL.DETECTOR", str(finished / "phase1/train/model.pth"), *CACHE]
    with monkeypatch.context() as patch:
        patch.setattr(StageTrainer, "run_step", limited)
        with pytest.raises(CrashError):
            train(tiny_config(folder, *given))
    return given


def test_damaged_predictions_are_made_again_the_same(
    finished, tiny_config, tmp_path, monkeypatch, caplog
):
    given = stop_in_training(tiny_config, finished, tmp_path / "a", monkeypatch)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    scores = tmp_path / "b/phase2/train/predictions/scores.npy"
    whole = scores.read_bytes()
    scores.write_bytes(whole[:-5])
    train(tiny_config(tmp_path / "b", *given), resume=True)
    assert "computing the predictions again" in caplog.text
    assert scores.read_bytes() == whole
    train(tiny_config(tmp_path / "a", *given), resume=True)
    assert_same_weights(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("key", ["teacher", "data"])
def test_predictions_of_another_teacher_or_other_data_are_refused(
    finished, tiny_config, tmp_path, monkeypatch, key
):
    given = stop_in_training(tiny_config, finished, tmp_path, monkeypatch)
    path = tmp_path / "phase2/train/predictions/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["about"][key] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=f"{key}: stored '000"):
        train(tiny_config(tmp_path, *given), resume=True)


def test_a_signal_while_the_teacher_is_asked_stops_the_run(
    finished, tiny_config, tmp_path, monkeypatch
):
    ask = Learner.teacher_candidates
    asked = []

    def count(self, batch):
        asked.append(batch)
        stop.signum = 15
        return ask(self, batch)

    stop = StopRequest()
    monkeypatch.setattr(Learner, "teacher_candidates", count)
    monkeypatch.setattr("cldetr.engine.trainer.StopRequest", lambda: stop)
    given = ["MODEL.DETECTOR", str(finished / "phase1/train/model.pth"), *CACHE]
    with pytest.raises(Interrupted):
        train(tiny_config(tmp_path, *given))
    assert len(asked) == 1
    assert not (tmp_path / "phase2/train/predictions").exists()


def test_two_processes_store_what_one_stores(finished, tiny_shapes, tmp_path):
    given = ["MODEL.DETECTOR", str(finished / "phase1/train/model.pth")]
    few = ["SCHEDULE.TRAIN.MAX_STEPS", "1", "SCHEDULE.CALIBRATE.MAX_STEPS", "1"]
    run = tmp_path / "run"
    words = ["--config-file", TINY, *tiny_shapes, *given, *CACHE, *few, "OUTPUT_DIR", str(run)]
    pair = tiny.start_ranks(words, tmp_path / "console", 2)
    assert tiny.finish(pair) == [0, 0], [each.said() for each in pair]
    for name in ("starts", "scores", "boxes"):
        path = f"phase2/train/predictions/{name}.npy"
        assert (run / path).read_bytes() == (finished / path).read_bytes()
    assert json.loads((run / "phase2/train/stage.json").read_text())["facts"]["steps"] == 1


def test_what_is_stored_is_what_the_teacher_says_about_the_image_as_it_is(finished, tiny_config):
    cfg = tiny_config(finished, *CACHE, *COMPLETE)
    data = RunData(cfg)
    weights = finished / "phase1/train/model.pth"
    detector = build_detector(cfg, load_state(weights), str(weights))
    teacher = freeze(detector, data.scenario.old(2))
    view = DatasetCatalog.get(data.name("phase", 2))  # before the exemplars, in this order
    entry = MappedDataset(view, Mapper(Augmentation.from_config(cfg), training=False))[3]
    (found,) = teacher([entry])  # the detector's own way to detections
    stored = PredictionStore(finished / "phase2/train/predictions")[3]
    best = found["instances"].scores[0]
    assert stored.scores.max() == pytest.approx(float(best), rel=1e-5)
    row = stored.scores.max(axis=1).argmax()
    corners = torch.from_numpy(stored.boxes[row])
    limit = torch.tensor([entry["width"], entry["height"]] * 2)
    clipped = corners.clamp(min=0).minimum(limit)
    torch.testing.assert_close(clipped, found["instances"].pred_boxes.tensor[0], atol=1e-3, rtol=0)
