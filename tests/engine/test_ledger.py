"""The run directory: who may use it, and what counts as finished."""

import multiprocessing
import os

import pytest

from cldetr.config import default_config
from cldetr.engine.ledger import Ledger
from cldetr.errors import InputError


def config(**changes):
    cfg = default_config()
    cfg.SOLVER.IMS_PER_BATCH = changes.pop("batch", 32)
    cfg.DATALOADER.NUM_WORKERS = changes.pop("workers", 2)
    assert not changes
    return cfg


def begin(folder, cfg=None):
    """Starts a run that has saved something, and leaves it."""
    ledger = Ledger(folder)
    ledger.open(cfg or config(), resume=False)
    ledger.begin(cfg or config())
    (ledger.folder(1, "train")).mkdir(parents=True)
    (ledger.folder(1, "train") / "saved").write_bytes(b"")
    ledger.close()


def test_resume_in_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(InputError, match="start one without --resume"):
        Ledger(tmp_path).open(config(), resume=True)


def test_a_second_start_in_a_used_directory_is_refused(tmp_path):
    begin(tmp_path)
    with pytest.raises(InputError, match="add --resume"):
        Ledger(tmp_path).open(config(), resume=False)


def test_another_identity_is_refused_with_a_diff_and_run_time_keys_may_change(tmp_path):
    begin(tmp_path)
    with pytest.raises(InputError, match=r"SOLVER\.IMS_PER_BATCH: was 32, now 16"):
        Ledger(tmp_path).open(config(batch=16), resume=True)
    again = Ledger(tmp_path)
    again.open(config(workers=7), resume=True)
    again.close()


def test_a_directory_in_use_names_its_owner(tmp_path):
    holder = Ledger(tmp_path)
    holder.open(config(), resume=False)

    def lock():
        with pytest.raises(InputError, match=f"in use by process {owner} on"):
            Ledger(tmp_path)._lock()

    owner = os.getpid()
    other = multiprocessing.get_context("fork").Process(target=lock)
    other.start()
    other.join()
    assert other.exitcode == 0
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


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot write to"):
        Ledger(tmp_path / "file" / "run").open(config(), resume=False)
