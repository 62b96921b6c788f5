"""The training loop: what is not finite is left out, on all processes, and never saved."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch

from cldetr.engine.checkpoint import latest_checkpoint, save_checkpoint, save_state
from cldetr.engine.run import IncrementalRun
from cldetr.engine.trainer import build_optimizer, training_state
from cldetr.errors import InputError
from cldetr.methods.learner import Learner


@pytest.fixture
def sick_steps(monkeypatch):
    """Makes the loss of chosen steps NaN."""
    steps = set()
    forward = Learner.forward
    calls = [0]

    def sometimes(self, batch):
        losses = forward(self, batch)
        calls[0] += 1
        if calls[0] - 1 in steps:
            losses["loss_cls"] = losses["loss_cls"] * float("nan")
        return losses

    monkeypatch.setattr(Learner, "forward", sometimes)
    return steps


def test_a_step_without_finite_gradient_is_left_out_and_named(
    tiny_recipe, tmp_path, sick_steps, caplog
):
    sick_steps |= {1, 3}
    with caplog.at_level(logging.WARNING):
        IncrementalRun(tiny_recipe(tmp_path)).run()
    said = [record.message for record in caplog.records if "left out" in record.message]
    assert len(said) == 2
    assert ".png" in said[0]
    for path in tmp_path.rglob("model.pth"):
        state = torch.load(path, weights_only=True)["model"]
        assert all(torch.isfinite(value).all() for value in state.values())


def test_three_in_a_row_stop_the_run_and_leave_a_sound_checkpoint(
    tiny_recipe, tmp_path, sick_steps
):
    sick_steps |= {3, 4, 5}
    run = IncrementalRun(tiny_recipe(tmp_path))
    with pytest.raises(InputError, match="3 steps in a row"):
        run.run()
    run.ledger.close()
    saved = latest_checkpoint(tmp_path / "phase1/train/checkpoints")
    assert saved.step == 4
    assert all(torch.isfinite(value).all() for value in saved.state["model"].values())


def test_weights_that_are_not_finite_are_never_saved():
    trainer = SimpleNamespace(learner=SimpleNamespace(detector=torch.nn.Linear(2, 2)))
    torch.nn.init.constant_(trainer.learner.detector.weight, float("inf"))
    with pytest.raises(InputError, match="not finite"):
        training_state(trainer, {})


def test_a_full_disk_keeps_what_was_saved(tmp_path):
    save_checkpoint(tmp_path, 2, {"model": {}})
    path = tmp_path / "step_00000004.pth"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.symlink_to("/dev/full")  # every write to it fails as on a full disk
    with pytest.raises(InputError, match=r"cannot write .*step_00000004\.pth"):
        save_state(path, {"model": {"weight": torch.zeros(100_000)}})
    assert not path.exists()
    assert not partial.is_symlink()
    assert latest_checkpoint(tmp_path).step == 2


def test_parameters_are_in_the_groups_of_deformable_detr(tiny_recipe, tmp_path):
    recipe = tiny_recipe(tmp_path, "SOLVER.BACKBONE_FACTOR", "0.1")
    detector = recipe.model.build(4)
    optimizer = build_optimizer(detector, recipe.optimizer)
    lr_of = {
        id(parameter): group["base_lr"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in detector.named_parameters():
        slow = "sampling_offsets" in name or "reference_points" in name
        factor = 0.1 if slow or name.startswith("backbone.") else 1.0
        assert lr_of[id(parameter)] == pytest.approx(1e-3 * factor), name
    assert len(lr_of) == len(list(detector.parameters()))
