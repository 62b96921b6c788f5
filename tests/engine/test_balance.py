"""METHOD.PSEUDO.BALANCE in a run: counted once, kept with the stage, nothing where it need not."""

import json
import logging
import math

import pytest
import torch

from cldetr.data.predictions import PredictionStore
from cldetr.engine.checkpoint import load_state
from cldetr.engine.rundata import RunData
from cldetr.errors import InputError

from .conftest import finish, start, train

RULE = [
    *("METHOD.PSEUDO.FOREGROUND", "0.0", "METHOD.PSEUDO.K", "6", "METHOD.MEMORY.ENABLED", "False"),
    *("METHOD.PSEUDO.IOU", "1.0", "METHOD.CALIBRATE.ENABLED", "False"),
    *("SCHEDULE.FIRST.MAX_STEPS", "2", "SCHEDULE.TRAIN.MAX_STEPS", "2"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny_config):
    folder = tmp_path_factory.mktemp("plain")
    train(tiny_config(folder, *RULE))
    return folder


def counted(folder):
    return json.loads((folder / "phase2/train/balance.json").read_text())


def words(plain, balance):
    first = str(plain / "phase1/train/model.pth")
    return [*RULE, "MODEL.DETECTOR", first, "METHOD.PSEUDO.BALANCE", str(balance)]


def weights(folder):
    return load_state(folder / "phase2/train/model.pth")["model"]


def same(one, two):
    return all(torch.equal(value, two[key]) for key, value in one.items())


def test_pseudo_labels_count_as_much_as_the_balance_says(plain, tiny_config, tmp_path, caplog):
    cfg = tiny_config(tmp_path, *words(plain, 0.5))
    with caplog.at_level(logging.INFO):
        train(cfg)
    phase = RunData(cfg).scenario.phase(2)
    found = counted(tmp_path)
    assert found["pseudo"] == 6 * len(phase.image_ids)  # K of each image, and none overlaps by more
    data = next(iter(RunData(cfg).train.values()))
    rows = {image: i for i, image in enumerate(data.image_ids.tolist())}
    spans = [(data.starts[rows[i]], data.starts[rows[i] + 1]) for i in phase.image_ids]
    labels = [label for first, last in spans for label in data.labels[first:last].tolist()]
    assert found["true"] == sum(label in phase.classes for label in labels)
    assert math.isclose(found["weight"], math.sqrt(2 * found["true"] / found["pseudo"]))
    assert f"each counts {found['weight']:.2f}" in caplog.text
    assert not same(weights(plain), weights(tmp_path))
    record = json.loads((tmp_path / "phase2/train/stage.json").read_text())
    assert "balance" in record["inputs"]


def test_nothing_changes_where_pseudo_labels_are_few(plain, tiny_config, tmp_path):
    few = ["METHOD.PSEUDO.K", "1"]
    train(tiny_config(tmp_path / "paper", *words(plain, 0.0), *few))
    train(tiny_config(tmp_path / "balanced", *words(plain, 1.0), *few))
    found = counted(tmp_path / "balanced")
    assert 0 < found["pseudo"] <= found["true"]
    assert found["weight"] == 1.0
    assert same(weights(tmp_path / "paper"), weights(tmp_path / "balanced"))


def test_stored_predictions_count_the_same(plain, tiny_config, tmp_path):
    for name, cache in (("live", "False"), ("cached", "True")):
        more = ["METHOD.PSEUDO.CACHE", cache]
        train(tiny_config(tmp_path / name, *words(plain, 0.5), *more))
    live, cached = counted(tmp_path / "live"), counted(tmp_path / "cached")
    assert len(PredictionStore(tmp_path / "cached/phase2/train/predictions"))
    assert (live["true"], live["pseudo"]) == (cached["true"], cached["pseudo"])


def test_counts_of_another_stage_are_refused(plain, tiny_config, tmp_path):
    train(tiny_config(tmp_path, *words(plain, 0.5)))
    file = tmp_path / "phase2/train/balance.json"
    content = json.loads(file.read_text())
    content["about"]["teacher"] = "another"
    (tmp_path / "phase2/train/stage.json").unlink()
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match="delete the file to count its labels again"):
        train(tiny_config(tmp_path, *words(plain, 0.5)), resume=True)


@pytest.mark.slow
def test_two_processes_count_what_one_counts(plain, tiny_config, tiny_shapes, tmp_path):
    train(tiny_config(tmp_path / "one", *words(plain, 0.5)))
    finish(start(tmp_path / "two", [*tiny_shapes, *words(plain, 0.5)], "--num-gpus", "2"))
    assert counted(tmp_path / "one") == counted(tmp_path / "two")
