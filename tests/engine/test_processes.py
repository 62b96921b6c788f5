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


def weights(folder):
    return load_state(folder / "phase2/calibrate/model.pth")["model"]


def test_two_processes_stop_resume_and_end_near_one(tiny_shapes, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    still = [*tiny_shapes, "MODEL.DETR.DROPOUT", "0.0"]  # each process drops out its own units
    pair = start(two, still, "--num-gpus", "2")
    wait_for(two / "phase2/train/checkpoints/step_00000002", pair)
    pair.send_signal(signal.SIGTERM)
    finish(pair, 143)
    alone = start(one, still)
    finish(start(two, still, "--num-gpus", "2", "--resume"))
    finish(alone)
    # The samples, the losses' normaliser and the averaged gradients are those of one process; sums
    # in another order differ in the last bits, and grow over steps.
    for key, value in weights(one).items():
        torch.testing.assert_close(weights(two)[key], value, rtol=0.2, atol=0.02)
    first, again = (
        json.loads((folder / "metrics.json").read_text().splitlines()[0]) for folder in (one, two)
    )
    assert again["total_loss"] == pytest.approx(first["total_loss"], rel=1e-5)


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
    assert (tmp_path / "results.json").exists()


def test_torchrun_starts_the_processes_too(tiny_shapes, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start(tmp_path, tiny_shapes, launcher=launcher)
    assert "after phase 2" in finish(process)
