"""Distillation losses of the methods that CL-DETR is compared with: query by query, no matching.

Query j of the new model is compared with query j of the old one, in the last decoder layer.

Shape shorthand: B images, Q queries, C outputs of the class head, K classes, S selected queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import batched_nms

from cldetr.errors import InputError
from cldetr.layers.boxes import box_cxcywh_to_xyxy, paired_giou


@dataclass(frozen=True)
class DistillRule:
    """Which loss, and its constants.

    Attributes:
        loss: a word of `LOSSES`.
        weight: factor on the whole loss.
        box_l1: γ_2, weight of the L1 distance of boxes.
        box_giou: γ_1, weight of 1 − GIoU of boxes.
        normaliser: of LwF, which the paper leaves open: what the sum over all queries is divided
            by, a word of `NORMALISERS`. "queries" makes it a mean, "images" a sum per image, and
            "boxes" divides by the number of labelled boxes, as L_DETR does.
        deviations: of ERD: queries count whose response exceeds mean + this many deviations.
        nms_iou: of ERD: class-wise suppression on the teacher's boxes before boxes are compared.
    """

    loss: str = "lwf"
    weight: float = 1.0
    box_l1: float = 5.0
    box_giou: float = 2.0
    normaliser: str = "queries"
    deviations: float = 2.0
    nms_iou: float = 0.005

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise InputError(f"unknown distillation {self.loss!r}: choose {', '.join(LOSSES)}")
        if self.normaliser not in NORMALISERS:
            raise InputError(
                f"unknown normaliser {self.normaliser!r}: choose {', '.join(NORMALISERS)}"
            )


@dataclass(frozen=True)
class StudentTeacherOutputs:
    """The last layer of both models on one batch, and what the classes mean."""

    student_logits: Tensor  # (B, Q, C)
    student_boxes: Tensor  # (B, Q, 4) cxcywh
    teacher_logits: Tensor  # (B, Q, C)
    teacher_boxes: Tensor  # (B, Q, 4)
    old: Tensor  # (K,) bool, the classes that the teacher knows
    softmax: bool  # C = K + 1, the last output being no-object; else C = K independent sigmoids
    num_boxes: Tensor | None = None  # labelled boxes, as L_DETR counts them; for "boxes" alone


def lwf_loss(outputs: StudentTeacherOutputs, rule: DistillRule) -> dict[str, Tensor]:
    """Classical distillation on all queries: L_KD of Sec. 3.3.

    The paper's formula takes the logarithm of the teacher's probabilities; as in LwF it is the
    student's that is meant. Sigmoid heads: binary cross-entropy of the old classes. Softmax heads:
    cross-entropy over the old classes and no-object.
    """
    student, teacher = outputs.student_logits, outputs.teacher_logits
    if outputs.softmax:
        shown = torch.cat([outputs.old, outputs.old.new_ones(1)])
        target = teacher[..., shown].softmax(dim=-1)
        classes = -(target * student[..., shown].log_softmax(dim=-1)).sum(dim=-1)  # (B, Q)
    else:
        target = teacher[..., outputs.old].sigmoid()
        classes = F.binary_cross_entropy_with_logits(
            student[..., outputs.old], target, reduction="none"
        ).sum(dim=-1)
    boxes = _box_distance(outputs.student_boxes, outputs.teacher_boxes, rule)
    count = NORMALISERS[rule.normaliser](outputs)
    return {
        "loss_kd_cls": rule.weight * classes.sum() / count,
        "loss_kd_box": rule.weight * boxes.sum() / count,
    }


def erd_loss(outputs: StudentTeacherOutputs, rule: DistillRule) -> dict[str, Tensor]:
    """Elastic response distillation (Feng et al. 2022), read for DETR heads.

    Of each image the queries count whose response, the teacher's best old-class score, stands out.
    Class logits: squared differences over the old classes, mean. Boxes: after suppression on the
    teacher's boxes, their distance weighted by the response; the original compares distributions
    over box edges, which a DETR does not have.
    """
    scores = outputs.teacher_logits.softmax(-1)[..., :-1] if outputs.softmax else None
    scores = outputs.teacher_logits.sigmoid() if scores is None else scores
    response, label = scores[..., outputs.old].max(dim=-1)  # (B, Q)
    floor = response.mean(1, keepdim=True) + rule.deviations * response.std(1, keepdim=True)
    chosen = response > floor
    columns = torch.cat([outputs.old, outputs.old.new_zeros(1)]) if outputs.softmax else outputs.old
    difference = (
        outputs.student_logits[chosen][:, columns] - outputs.teacher_logits[chosen][:, columns]
    )
    classes = difference.square().mean() if difference.numel() else outputs.student_logits.sum() * 0
    boxes, weights = [], []
    for image, mask in enumerate(chosen):
        queries = mask.nonzero().flatten()
        corners = box_cxcywh_to_xyxy(outputs.teacher_boxes[image, queries])
        kept = batched_nms(corners, response[image, queries], label[image, queries], rule.nms_iou)
        queries = queries[kept]
        student, teacher = (
            outputs.student_boxes[image, queries],
            outputs.teacher_boxes[image, queries],
        )
        weights.append(response[image, queries])
        boxes.append(_box_distance(student, teacher, rule))
    weight, distance = torch.cat(weights), torch.cat(boxes)
    box = (weight * distance).sum() / weight.sum().clamp(min=1e-6)
    return {"loss_kd_cls": rule.weight * classes, "loss_kd_box": rule.weight * box}


LOSSES: dict[str, Callable[[StudentTeacherOutputs, DistillRule], dict[str, Tensor]]] = {
    "lwf": lwf_loss,
    "erd": erd_loss,
}


NORMALISERS: dict[str, Callable[[StudentTeacherOutputs], Tensor | int]] = {
    "queries": lambda outputs: outputs.student_logits[..., 0].numel(),
    "images": lambda outputs: len(outputs.student_logits),
    "boxes": lambda outputs: _given(outputs.num_boxes),
}


def _given(num_boxes: Tensor | None) -> Tensor:
    assert num_boxes is not None
    return num_boxes


def _box_distance(student: Tensor, teacher: Tensor, rule: DistillRule) -> Tensor:
    """L_box of boxes one to one, (…)."""
    giou = paired_giou(box_cxcywh_to_xyxy(student), box_cxcywh_to_xyxy(teacher))
    return rule.box_l1 * (student - teacher).abs().sum(-1) + rule.box_giou * (1 - giou)
