"""Checkpoints: whole or not there, damage found, nothing executed."""

import logging
import os
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from cldetr.engine.checkpoint import (
    latest_checkpoint,
    load_into,
    load_state,
    save_checkpoint,
    save_state,
)
from cldetr.errors import InputError
from cldetr.files import sha256_file


def state(step):
    return {"model": {"weight": torch.full((3,), float(step))}, "step": step}


def test_the_newest_of_several_is_loaded_and_old_ones_go(tmp_path):
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step, state(step))
    found = latest_checkpoint(tmp_path)
    assert found.step == 30
    assert found.state["model"]["weight"].tolist() == [30, 30, 30]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000020", "step_00000030"]


def test_no_checkpoint_is_none(tmp_path):
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "missing"])
def test_a_damaged_newest_falls_back_and_says_what_is_lost(tmp_path, damage, caplog):
    save_checkpoint(tmp_path, 10, state(10))
    save_checkpoint(tmp_path, 25, state(25))
    path = tmp_path / "step_00000025/state.pth"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: 100 if damage == "truncate" else 0])
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path).step == 10
    assert "15 steps are lost" in caplog.text


def test_when_all_are_damaged_it_stops(tmp_path):
    save_checkpoint(tmp_path, 10, state(10))
    (tmp_path / "step_00000010/state.pth").write_bytes(b"x")
    with pytest.raises(InputError, match="no checkpoint in"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("other", [b"", b'{"step": 16, "sha256": "0"}\n'])
def test_a_changed_digest_is_damage_and_falls_back(tmp_path, other):
    for step in (10, 20):
        save_checkpoint(tmp_path, step, state(step))
    (tmp_path / "step_00000020/digest.json").write_bytes(other)
    assert latest_checkpoint(tmp_path).step == 10


def test_a_checkpoint_that_lost_its_digest_is_not_taken_for_a_fresh_start(tmp_path):
    save_checkpoint(tmp_path, 10, state(10))
    (tmp_path / "step_00000010/digest.json").unlink()
    with pytest.raises(InputError, match="no checkpoint in"):
        latest_checkpoint(tmp_path)


def test_a_step_that_was_passed_over_is_saved_anew(tmp_path):
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step, state(step))
    (tmp_path / "step_00000030/state.pth").write_bytes(b"x")
    save_checkpoint(tmp_path, 25, state(25))  # stopped on the way there
    assert latest_checkpoint(tmp_path).step == 25
    save_checkpoint(tmp_path, 30, state(30))
    assert latest_checkpoint(tmp_path).step == 30


def test_files_of_another_version_are_not_taken_for_a_fresh_start(tmp_path):
    (tmp_path / "step_00000010.pth").write_bytes(b"x")
    with pytest.raises(InputError, match="no checkpoint of this version"):
        latest_checkpoint(tmp_path)


def test_the_same_state_makes_the_same_bytes(tmp_path):
    digests = [save_state(tmp_path / name / "x.pth", state(3)) for name in "ab"]
    assert digests[0] == digests[1] == sha256_file(tmp_path / "a/x.pth")


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("suffix", [".pth", ".pkl"])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path, suffix):
    path, proof = tmp_path / f"evil{suffix}", tmp_path / "executed"
    content = {"model": Malice(proof)}
    if suffix == ".pth":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    with pytest.raises(InputError, match="cannot load"):
        load_state(path)
    assert not proof.exists()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_arrays_in_a_pkl_are_loaded(tmp_path, protocol):
    path = tmp_path / "arrays.pkl"
    weights = {"conv": np.arange(6, dtype=np.float32).reshape(2, 3)}
    path.write_bytes(pickle.dumps({"model": weights, "__author__": "zoo"}, protocol=protocol))
    assert (load_state(path)["model"]["conv"] == weights["conv"]).all()


def test_weights_that_do_not_fit_are_named():
    model = nn.Linear(3, 2)
    with pytest.raises(InputError, match=r"weight: expected \(2, 3\), found \(5, 3\)"):
        load_into(model, {"weight": torch.zeros(5, 3), "bias": torch.zeros(2)}, "here")
    with pytest.raises(InputError, match="missing: bias"):
        load_into(model, {"weight": torch.zeros(2, 3)}, "here")
