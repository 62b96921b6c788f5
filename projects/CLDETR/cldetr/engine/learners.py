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
