"""What learns in each stage: the detector with the old model's help that the method asks for."""

from __future__ import annotations

from cldetr.methods.learner import Learner, freeze
from cldetr.methods.method import Method
from cldetr.modeling.detector import Detector
from cldetr.scenario import Scenario


def training_learner(
    detector: Detector, method: Method, scenario: Scenario, phase: int, old_model: Detector
) -> Learner:
    """The learner of a phase's training step.

    Args:
        detector: Φ, which learns.
        method: what is done against forgetting.
        scenario: says which classes are old.
        phase: from 1.
        old_model: Φ^old, of which a frozen copy is taken where the method asks for one.
    """
    seen, old = scenario.seen(phase), scenario.old(phase)
    mask = method.unseen == "mask"
    if phase == 1 or not method.needs_teacher:
        return Learner(detector, seen=seen, mask_unseen=mask)
    return Learner(
        detector,
        seen=seen,
        teacher=freeze(old_model, old),
        teacher_classes=old,
        rule=method.pseudo,
        distill=method.distill,
        mask_unseen=mask,
    )


def calibration_learner(
    detector: Detector, method: Method, scenario: Scenario, phase: int
) -> Learner:
    """The learner of a phase's calibration step: plain, or one that completes exemplars' labels.

    Args:
        detector: Φ, which learns; a frozen copy of it as it is now gives the missing labels.
        method: says whether labels are completed, and how.
        scenario: says which classes are annotated on an exemplar.
        phase: from 2.
    """
    seen = scenario.seen(phase)
    mask = method.unseen == "mask"
    rule = None if method.calibrate is None else method.calibrate.complete
    if rule is None:
        return Learner(detector, seen=seen, mask_unseen=mask)
    return Learner(
        detector,
        seen=seen,
        teacher=freeze(detector, seen),
        teacher_classes=seen,
        rule=rule,
        annotated=[each.classes for each in scenario.phases],
        mask_unseen=mask,
    )
