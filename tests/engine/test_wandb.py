"""Weights & Biases: refused early where it is missing, harmless where it fails, one run at W&B."""

import importlib.util
import json
import logging
import sys
import types

import pytest
import torch

from cldetr.engine import IncrementalTrainer
from cldetr.engine.writers import check_wandb
from cldetr.errors import InputError

from .conftest import train

SHORT = ("SCHEDULE.FIRST.MAX_STEPS", "2", "SCHEDULE.TRAIN.MAX_STEPS", "4")
SHORT = (*SHORT, "SCHEDULE.CALIBRATE.MAX_STEPS", "2")


def final_weights(folder):
    return torch.load(folder / "phase2/calibrate/model.pth", weights_only=True)["model"]


def logged_by_tensorboard_too(folder):
    """metrics.json as {iteration: {name: value}}."""
    lines = (folder / "metrics.json").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["iteration"]: row for row in rows}


@pytest.fixture(scope="module")
def plain(tiny_config, tmp_path_factory):
    """The same run without W&B."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train(tiny_config(folder, *SHORT))
    return folder


def test_a_run_is_refused_before_it_starts_where_wandb_is_not_installed(
    tiny_config, tmp_path, monkeypatch
):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *x: None if name == "wandb" else found(name, *x)
    )
    with pytest.raises(InputError, match=r"needs wandb.*pip install 'cldetr\[wandb\]'"):
        IncrementalTrainer(tiny_config(tmp_path / "run", "WANDB.ENABLED", "True"))
    assert not (tmp_path / "run").exists()


def test_the_folder_that_wandb_writes_is_not_taken_for_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(InputError, match="needs wandb"):
        check_wandb(enabled=True)


class Broken:
    """A run at W&B that fails after its first words."""

    def define_metric(self, *_, **__):
        pass

    def log(self, values):
        raise ConnectionError("the line is dead")

    def finish(self, exit_code):
        raise ConnectionError("still dead")


@pytest.mark.parametrize("fails", ["init", "log"])
def test_a_failure_of_wandb_is_told_once_and_changes_nothing(
    plain, tiny_config, tmp_path, monkeypatch, caplog, fails
):
    def init(**_):
        if fails == "init":
            raise ConnectionError("no line")
        return Broken()

    module = types.ModuleType("wandb")
    module.__spec__ = importlib.util.spec_from_loader("wandb", None, origin="stand-in")
    module.init, module.Image = init, lambda pixels: pixels
    monkeypatch.setitem(sys.modules, "wandb", module)
    with caplog.at_level(logging.WARNING, logger="cldetr"):
        train(tiny_config(tmp_path / "run", *SHORT, "WANDB.ENABLED", "True"))
    said = [record.message for record in caplog.records if "Biases" in record.message]
    assert len(said) == 1
    assert "the run goes on without it (ConnectionError" in said[0]
    ours, theirs = final_weights(tmp_path / "run"), final_weights(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def read_records(path):
    """The messages of a .wandb file: 7 bytes, then LevelDB's log in blocks of 32 KiB."""
    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole message, or its last piece
            yield message
            message = b""


def sent(folder):
    """What an offline run would upload, of each start in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))  # by their times
    return [[Record.FromString(message) for message in read_records(path)] for path in files]


def rows_of(records):
    return [
        {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
         for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]  # fmt: skip


class StopError(Exception):
    pass


class StoppingTrainer(IncrementalTrainer):
    """Fails in the second stage, after a checkpoint."""

    def after_step(self):
        super().after_step()
        if self.phase == 2 and self.stage == "train" and self.step == 2:
            raise StopError


def test_stages_and_starts_are_one_run_at_wandb_and_the_weights_are_the_same(
    plain, tiny_config, tmp_path
):
    pytest.importorskip("wandb", reason="wandb is not installed")
    folder = tmp_path / "run"
    options = [*SHORT, "WANDB.ENABLED", "True", "WANDB.PROJECT", "zoo", "WANDB.NAME", "cats"]
    options += ["LOG_IMAGES", "1", "VIS_PERIOD", "2"]
    trainer = StoppingTrainer(tiny_config(folder, *options))
    with pytest.raises(StopError):
        trainer.train()
    results = train(tiny_config(folder, *options), resume=True)

    ours, theirs = final_weights(folder), final_weights(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    first, second = sent(folder)
    runs = [
        record.run for records in (first, second) for record in records if record.HasField("run")
    ]
    assert {run.run_id for run in runs} == {json.loads((folder / "wandb.json").read_text())["id"]}
    assert {(run.project, run.display_name) for run in runs} == {("zoo", "cats")}
    rows = rows_of(first) + rows_of(second)
    expected = logged_by_tensorboard_too(folder)
    losses = {row["iteration"]: row["total_loss"] for row in rows if "total_loss" in row}
    assert losses == {step: row["total_loss"] for step, row in expected.items()}
    assert list(losses) == list(range(8))
    [last] = [row for row in rows_of(second) if "all/AP" in row]
    assert last["all/AP"] == results["phases"][-1]["all"]["AP"]
    assert last["iteration"] == 7
    pictures = [name for row in rows for name in row if name.startswith("phase2_train/image1")]
    assert pictures
    exits = [
        [record.exit.exit_code for record in records if record.HasField("exit")]
        for records in (first, second)
    ]
    assert exits == [[1], [0]]
