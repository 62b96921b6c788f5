"""The run directory: who may use it, and what counts as finished."""

import dataclasses
import os
import subprocess
import sys

import pytest
from torch import nn

from cldetr.engine.ledger import Ledger
from cldetr.engine.recipe import ModelSettings, OptimizerSettings, Recipe, Runtime
from cldetr.errors import InputError


def recipe(**changes):
    model = ModelSettings(description={"width": 8}, build=lambda classes: nn.Linear(8, classes))
    return dataclasses.replace(Recipe(model=model), **changes)


def test_resume_in_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(InputError, match="leave --resume out"):
        Ledger(tmp_path).open(recipe(), resume=True)


def test_a_second_start_in_a_used_directory_is_refused(tmp_path):
    first = Ledger(tmp_path)
    first.open(recipe(), resume=False)
    first.close()
    with pytest.raises(InputError, match="add --resume"):
        Ledger(tmp_path).open(recipe(), resume=False)


def test_another_identity_is_refused_with_a_diff_and_runtime_may_change(tmp_path):
    first = Ledger(tmp_path)
    first.open(recipe(), resume=False)
    first.close()
    with pytest.raises(InputError, match=r"optimizer\.batch: was 32, now 16"):
        Ledger(tmp_path).open(recipe(optimizer=OptimizerSettings(batch=16)), resume=True)
    again = Ledger(tmp_path)
    again.open(recipe(runtime=Runtime(workers=7, device="cuda")), resume=True)
    again.close()


def test_a_directory_in_use_names_its_owner(tmp_path):
    holder = Ledger(tmp_path)
    holder.open(recipe(), resume=False)
    code = (
        "import sys\nfrom cldetr.engine.ledger import Ledger\n"
        "from cldetr.errors import InputError\n"
        "try:\n    Ledger(sys.argv[1])._lock()\n"
        "except InputError as error:\n    print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert f"in use by process {os.getpid()} on" in said
    holder.close()


def test_a_stage_is_finished_only_with_its_record(tmp_path):
    ledger = Ledger(tmp_path)
    folder = ledger.folder(1, "train")
    folder.mkdir(parents=True)
    (folder / "model.pth").write_bytes(b"weights")
    assert ledger.finished(1, "train") is None
    ledger.finish(1, "train", ["model.pth"], inputs={}, facts={"steps": 3})
    assert ledger.finished(1, "train")["facts"]["steps"] == 3


@pytest.mark.parametrize("damage", ["change", "delete"])
def test_damage_to_a_finished_stage_is_found(tmp_path, damage):
    ledger = Ledger(tmp_path)
    folder = ledger.folder(2, "calibrate")
    folder.mkdir(parents=True)
    path = folder / "model.pth"
    path.write_bytes(b"weights")
    ledger.finish(2, "calibrate", ["model.pth"], inputs={}, facts={})
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(b"weightt")
    with pytest.raises(InputError, match="missing" if damage == "delete" else "damaged"):
        ledger.finished(2, "calibrate")


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot write to"):
        Ledger(tmp_path / "file" / "run").open(recipe(), resume=False)
