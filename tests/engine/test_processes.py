"""Several processes: the same samples as one, agreed skips and stops, two machines."""

import json
import signal
import socket

import pytest
import torch

from cldetr.engine.checkpoint import load_state

from .conftest import start, wait_for


def finish(process, status=0):
    said = process.communicate(timeout=200)[0]
    assert process.returncode == status, said
    return said


LAST = "phase2/calibrate"


def weights(folder, stage):
    return load_state(folder / stage / "model.pth")["model"]


def test_two_processes_stop_resume_and_end_near_one(tiny_shapes, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    no_dropout = [*tiny_shapes, "MODEL.DETR.DROPOUT", "0.0"]  # each process drops its own units
    pair = start(two, no_dropout, "--num-gpus", "2")
    wait_for(two / "phase2/train/checkpoints/step_00000002", pair)
    pair.send_signal(signal.SIGTERM)
    finish(pair, 143)
    alone = start(one, no_dropout)
    finish(start(two, no_dropout, "--num-gpus", "2", "--resume"))
    finish(alone)
    # The samples, the losses' normaliser and the averaged gradients are those of one process; sums
    # in another order differ in the last bits, which Adam enlarges step by step. What a run moves
    # its weights by is the scale: the two ends must lie far closer together than that.
    start_of, end, other = (
        torch.cat([x.double().flatten() for x in weights(folder, stage).values()])
        for folder, stage in ((one, "phase1/train"), (one, LAST), (two, LAST))
    )
    assert (end - other).norm() < 0.05 * (end - start_of).norm()
    first, again = (
        json.loads((folder / "metrics.json").read_text().splitlines()[0]) for folder in (one, two)
    )
    assert again["total_loss"] == pytest.approx(first["total_loss"], rel=1e-5)
    assert again["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)


def test_two_machines_train_together(tiny_shapes, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    machines = [
        start(
            tmp_path,
            tiny_shapes,
            *("--num-gpus", "1", "--num-machines", "2", "--machine-rank", str(rank)),
            *("--dist-url", f"tcp://127.0.0.1:{port}"),
        )
        for rank in (0, 1)
    ]
    said = [finish(machine) for machine in machines]
    assert "after phase 2" in said[0]
    assert "after phase 2" not in said[1]  # rank 1 is on the other machine and stays silent
    [begun] = json.loads((tmp_path / "starts.json").read_text())["starts"]
    assert begun["processes"] == 2
    steps = json.loads((tmp_path / "phase1/train/stage.json").read_text())["facts"]["steps"]
    assert steps == 27 // 4  # batches of four over both machines


def test_torchrun_starts_the_processes_too(tiny_shapes, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start(tmp_path, tiny_shapes, launcher=launcher)
    assert "after phase 2" in finish(process)
