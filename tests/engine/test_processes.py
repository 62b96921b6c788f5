"""Several processes: the same samples as one, agreed skips and stops."""

import json
import signal

import pytest
import torch
from faults import tiny

from cldetr.engine.checkpoint import load_state

from .conftest import TINY, finish, start, wait_for

LAST = "phase2/calibrate"


def weights(folder, stage):
    return load_state(folder / stage / "model.pth")["model"]


@pytest.mark.slow
def test_two_processes_stop_resume_and_end_near_one(tiny_shapes, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    no_dropout = [*tiny_shapes, "MODEL.DETR.DROPOUT", "0.0"]  # each process drops its own units
    pair = start(two, no_dropout, "--num-gpus", "2")
    wait_for(two / "phase2/train/checkpoints/step_00000002", pair)
    pair.send(signal.SIGTERM)
    finish(pair, 143)
    alone = start(one, no_dropout)
    words = ["--config-file", TINY, "--resume", *no_dropout, "OUTPUT_DIR", str(two)]
    again = tiny.start_ranks(words, tmp_path / "console", 2)  # as torchrun does
    assert tiny.finish(again) == [0, 0], [each.said() for each in again]
    finish(alone)
    # The samples, the losses' normaliser and the averaged gradients are those of one process; sums
    # in another order differ in the last bits, which Adam enlarges step by step. What a run moves
    # its weights by is the scale: the two ends must lie far closer together than that.
    start_of, end, other = (
        torch.cat([x.double().flatten() for x in weights(folder, stage).values()])
        for folder, stage in ((one, "phase1/train"), (one, LAST), (two, LAST))
    )
    assert (end - other).norm() < 0.05 * (end - start_of).norm()
    first, second = (
        json.loads((folder / "metrics.json").read_text().splitlines()[0]) for folder in (one, two)
    )
    assert second["total_loss"] == pytest.approx(first["total_loss"], rel=1e-5)
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)


@pytest.mark.slow  # four interpreters; test_ranks.py has forks with torchrun's variables
def test_torchrun_starts_the_processes_too(tiny_shapes, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start(tmp_path, tiny_shapes, launcher=launcher)
    assert "after phase 2" in finish(process)
