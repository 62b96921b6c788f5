"""The training loop: what is not finite is skipped, on all processes, and never saved."""

import json
import logging
import os
from types import SimpleNamespace

import pytest
import torch
from detectron2.modeling import build_model

from cldetr.engine.checkpoint import latest_checkpoint, save_checkpoint, save_state
from cldetr.engine.hooks import training_state
from cldetr.engine.step import build_optimizer
from cldetr.errors import InputError
from cldetr.methods.learner import Learner

from .conftest import train


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


def test_a_stage_shorter_than_the_log_period_ends_with_its_loss(tiny_config, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        train(tiny_config(tmp_path, "LOG_PERIOD", "50"))
    lines = [record.message for record in caplog.records if "s/step" in record.message]
    assert [line.split("  ")[0] for line in lines] == [
        *("phase 1/2 train", "phase 2/2 train", "phase 2/2 calibrate")
    ]
    assert all(float(line.partition("loss ")[2].split()[0]) > 0.1 for line in lines)


def test_a_step_without_finite_gradient_is_skipped_and_named(
    tiny_config, tmp_path, sick_steps, caplog
):
    sick_steps |= {1, 3}
    with caplog.at_level(logging.WARNING):
        train(tiny_config(tmp_path))
    said = [record.message for record in caplog.records if "skipped" in record.message]
    assert len(said) == 2
    assert ".png" in said[0]
    for path in tmp_path.rglob("model.pth"):
        state = torch.load(path, weights_only=True)["model"]
        assert all(torch.isfinite(value).all() for value in state.values())


def test_three_in_a_row_stop_the_run_and_leave_a_sound_checkpoint(
    tiny_config, tmp_path, sick_steps
):
    sick_steps |= {3, 4, 5}
    with pytest.raises(InputError, match="3 steps in a row"):
        train(tiny_config(tmp_path))
    saved = latest_checkpoint(tmp_path / "phase1/train/checkpoints")
    assert saved.step == 4
    assert all(torch.isfinite(value).all() for value in saved.state["model"].values())


def test_weights_that_are_not_finite_are_never_saved():
    trainer = SimpleNamespace(detector=torch.nn.Linear(2, 2))
    torch.nn.init.constant_(trainer.detector.weight, float("inf"))
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


def test_parameters_are_in_the_groups_of_deformable_detr(tiny_config, tmp_path):
    cfg = tiny_config(
        tmp_path,
        *("SOLVER.BACKBONE_MULTIPLIER", "0.25", "SOLVER.WEIGHT_DECAY_NORM", "0.5"),
        *("SOLVER.LR_MULTIPLIERS", "[['sampling_offsets', 0.1], ['reference_points', 0.2]]"),
    )
    cfg.MODEL.DETR.NUM_CLASSES = 4
    detector = build_model(cfg)
    optimizer = build_optimizer(cfg, detector)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    norms = {
        id(parameter)
        for module in detector.modules()
        if isinstance(module, (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.BatchNorm2d))
        for parameter in module.parameters()
    }
    for name, parameter in detector.named_parameters():
        factor = 1.0
        if name.startswith("backbone."):
            factor = 0.25
        elif "sampling_offsets" in name:
            factor = 0.1
        elif "reference_points" in name:
            factor = 0.2
        group = groups[id(parameter)]
        assert group["lr"] == pytest.approx(1e-3 * factor), name
        assert group["weight_decay"] == (0.5 if id(parameter) in norms else 1e-4), name
    assert len(groups) == len(list(detector.parameters()))
    assert norms


def test_progress_goes_from_0_to_1_over_a_stage(tiny_config, tmp_path, monkeypatch):
    seen = []
    forward = Learner.forward

    def noted(self, batch):
        seen.append(self.progress)
        return forward(self, batch)

    monkeypatch.setattr(Learner, "forward", noted)
    train(tiny_config(tmp_path, "SCHEDULE.FIRST.MAX_STEPS", "5"))
    assert seen[:5] == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


def test_a_step_in_parts_is_the_step(tiny_config, tmp_path):
    short = [
        *("SCHEDULE.FIRST.MAX_STEPS", "2", "SCHEDULE.TRAIN.MAX_STEPS", "1"),
        *("SCHEDULE.CALIBRATE.MAX_STEPS", "1", "MODEL.DETR.DROPOUT", "0.0", "LOG_IMAGES", "0"),
    ]
    train(tiny_config(tmp_path / "first", *short))
    given = ["MODEL.DETECTOR", str(tmp_path / "first/phase1/train/model.pth")]
    steps = {}
    for parts in (1, 2):
        folder = tmp_path / str(parts)
        train(tiny_config(folder, *short, *given, "SOLVER.ACCUMULATE", str(parts)))
        steps[parts] = json.loads((folder / "metrics.json").read_text().splitlines()[0])
    boxes = steps[1]["pseudo/per_image"], steps[1]["pseudo/truth_per_image"]
    assert min(boxes) > 0, boxes
    names = [key for key in steps[1] if "loss" in key]
    assert len(names) > 3
    for key in (*names, "grad_norm"):
        assert steps[2][key] == pytest.approx(steps[1][key], rel=1e-4), key
