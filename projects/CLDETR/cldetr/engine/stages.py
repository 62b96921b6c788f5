"""The training stages of a run, each an ordinary Detectron2 training with a config of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from detectron2.config import CfgNode

from cldetr.config import method_of, schedule_of
from cldetr.data.exemplars import phase_budget, resolve_budget
from cldetr.data.loader import SampleOrder
from cldetr.methods.learner import Learner, freeze
from cldetr.methods.method import Method
from cldetr.methods.pseudo import PseudoRule
from cldetr.modeling.detector import Detector
from cldetr.scenario import Scenario
from cldetr.settings import StageSchedule


@dataclass(frozen=True)
class Stage:
    """A training stage.

    Attributes:
        phase: from 1.
        name: "train" or "calibrate".
        datasets: names of its data sets in `DatasetCatalog`.
        images: how many images these have.
        batch: images in a step, over all processes.
        schedule: its length and learning rate.
    """

    phase: int
    name: str
    datasets: tuple[str, ...]
    images: int
    batch: int
    schedule: StageSchedule

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a pass over the images."""
        return SampleOrder(self.images, self.batch, seed=(0,)).steps_per_epoch

    @property
    def steps(self) -> int:
        """Optimizer steps of the stage."""
        return self.schedule.steps(self.steps_per_epoch)


def make_stage(cfg: CfgNode, phase: int, name: str, datasets: Sequence[str], images: int) -> Stage:
    """The stage that the config's SCHEDULE describes."""
    schedule = schedule_of(cfg)
    length = schedule.calibrate if name == "calibrate" else schedule.train
    if name == "train" and phase == 1:
        length = schedule.first
    return Stage(phase, name, tuple(datasets), images, cfg.SOLVER.IMS_PER_BATCH, length)


def stage_config(cfg: CfgNode, stage: Stage, test_dataset: str) -> CfgNode:
    """The config of one stage: what Detectron2's `build_*` functions read, filled in."""
    own = cfg.clone()
    own.defrost()
    own.STAGE.PHASE, own.STAGE.NAME = stage.phase, stage.name
    own.DATASETS.TRAIN, own.DATASETS.TEST = stage.datasets, (test_dataset,)
    own.SOLVER.MAX_ITER = stage.steps
    own.SOLVER.STEPS = stage.schedule.milestones(stage.steps_per_epoch)
    own.SOLVER.BASE_LR = cfg.SOLVER.BASE_LR * stage.schedule.lr_scale
    own.freeze()
    return own


def evaluation_config(cfg: CfgNode, phase: int, test_dataset: str) -> CfgNode:
    """The config with which the model after a phase is evaluated."""
    own = cfg.clone()
    own.defrost()
    own.STAGE.PHASE, own.STAGE.NAME = phase, "evaluate"
    own.DATASETS.TEST = (test_dataset,)
    own.freeze()
    return own


def planned_stages(cfg: CfgNode, scenario: Scenario) -> list[Stage]:
    """Every training stage of a run, as far as it is known beforehand.

    The number of exemplars is the budget's; a strategy may end up with fewer.
    """
    method = method_of(cfg)
    exemplars = sum(len(given.image_ids) for given in scenario.given if given.classes)
    unlabelled = sum(len(given.image_ids) for given in scenario.unlabelled())
    stages = []
    for phase in scenario.phases:
        images = len(phase.image_ids)
        if method.joint:
            images = sum(len(part.image_ids) for part in scenario.joint(phase.index))
        if method.memory is not None and method.memory.replay:
            images += exemplars
        if method.needs_teacher:
            images += unlabelled
        if phase.index > 1 or not cfg.MODEL.DETECTOR:
            stages.append(make_stage(cfg, phase.index, "train", (), images))
        if method.memory is not None and phase.image_ids:
            share = phase_budget(method.memory.budget, scenario)
            number = resolve_budget(share, len(phase.image_ids))
            exemplars += min(number, len(phase.image_ids))
        if method.calibrate is not None and phase.index > 1:
            stages.append(make_stage(cfg, phase.index, "calibrate", (), exemplars))
    return stages


def see_classes(detector: Detector, scenario: Scenario, phase: int) -> None:
    """Makes a detector predict the classes up to a phase."""
    seen = torch.zeros_like(detector.visible_classes)
    seen[list(scenario.seen(phase))] = True
    detector.visible_classes = seen


def training_learner(
    detector: Detector, method: Method, scenario: Scenario, phase: int, old_model: Detector
) -> Learner:
    """The learner of a phase's training step.

    Args:
        detector: Φ, which is trained.
        method: what is done against forgetting.
        scenario: has the old classes.
        phase: from 1.
        old_model: Φ^old, of which a frozen copy is taken where the method asks for one.
    """
    seen, old = scenario.seen(phase), scenario.old(phase)
    mask, ignore = method.unseen == "mask", method.unlabelled == "ignore"
    matcher = None if phase == 1 else method.matcher
    rule = _useful_rule(method.pseudo, scenario, phase)
    if phase == 1 or (rule is None and method.distill is None):
        return Learner(
            detector, seen=seen, matcher=matcher, mask_unseen=mask, ignore_unlabelled=ignore
        )
    if method.pseudo is not None and method.pseudo.any_class:
        old = tuple(range(len(scenario.categories)))
    return Learner(
        detector,
        seen=seen,
        teacher=freeze(old_model, old),
        teacher_classes=old,
        rule=rule,
        distill=method.distill,
        matcher=matcher,
        mask_unseen=mask,
        ignore_unlabelled=ignore,
    )


def calibration_learner(
    detector: Detector, method: Method, scenario: Scenario, phase: int
) -> Learner:
    """The learner of a phase's calibration step: plain, or one that completes exemplars' labels.

    Args:
        detector: Φ, which is trained; a frozen copy of it as it is now gives the missing labels.
        method: says whether labels are completed, and how.
        scenario: has the classes seen so far.
        phase: from 2.
    """
    seen: Sequence[int] = scenario.seen(phase)
    mask, ignore = method.unseen == "mask", method.unlabelled == "ignore"
    rule = None if method.calibrate is None else method.calibrate.complete
    rule = _useful_rule(rule, scenario, phase)
    if rule is None:
        return Learner(
            detector, seen=seen, matcher=method.matcher, mask_unseen=mask, ignore_unlabelled=ignore
        )
    return Learner(
        detector,
        seen=seen,
        teacher=freeze(detector, seen),
        teacher_classes=seen,
        rule=rule,
        matcher=method.matcher,
        mask_unseen=mask,
        ignore_unlabelled=ignore,
    )


def _useful_rule(rule: PseudoRule | None, scenario: Scenario, phase: int) -> PseudoRule | None:
    """The rule of pseudo-labels where classes arrive; in domains for unannotated classes alone.

    Where a class is annotated, the pseudo-labels of it that overlap no annotation (Eq. 3) are
    false. Where all are, there is nothing to ask the old model for.
    """
    if rule is None or scenario.protocol != "domains":
        return rule
    return replace(rule, skip_annotated=True) if scenario.hides_seen(phase) else None
