"""Distillation losses: what a method compares between the new model and the old one, no matching.

Query j of the new model is compared with query j of the old one, in the last decoder layer where
nothing else is said; `rank` and `topology` compare prototypes of classes instead.

Shape shorthand: L decoder layers, B images, Q queries, D features, C outputs of the class head, K
classes, m old classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import batched_nms

from cldetr.errors import InputError
from cldetr.layers.boxes import box_cxcywh_to_xyxy, paired_giou
from cldetr.modeling.structures import DetrOutput


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
        normalise: of `rank`: prototypes have length 1, as published. Decoder states are longer, so
            that scores of such a prototype differ little; False leaves them as they are.
        temperature: of `rank`: what differences of scores are divided by before they are ranked;
            the published loss has 1. Of `response`: T of both distributions, 100 as published.
        by_present: of `rank`: divide by the number of classes in the batch instead of all old ones.
        min_score: of `topology`: a class takes part where the teacher has a query of this score.
    """

    loss: str = "lwf"
    weight: float = 1.0
    box_l1: float = 5.0
    box_giou: float = 2.0
    normaliser: str = "queries"
    deviations: float = 2.0
    nms_iou: float = 0.005
    normalise: bool = True
    temperature: float = 1.0
    by_present: bool = False
    min_score: float = 0.4

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise InputError(f"unknown distillation {self.loss!r}: choose {', '.join(LOSSES)}")
        if self.normaliser not in NORMALISERS:
            raise InputError(
                f"unknown normaliser {self.normaliser!r}: choose {', '.join(NORMALISERS)}"
            )
        if not 0.0 <= self.weight < math.inf:
            raise InputError(f"METHOD.DISTILL.WEIGHT is at least 0, not {self.weight}")
        if self.temperature <= 0.0:
            raise InputError(f"METHOD.DISTILL.TEMPERATURE is above 0, not {self.temperature}")
        if not 0.0 <= self.min_score <= 1.0:
            raise InputError(f"METHOD.DISTILL.MIN_SCORE must lie in [0, 1], not {self.min_score}")

    @property
    def compares_queries(self) -> bool:
        """Whether query j of both models must be about the same; prototypes of classes need not."""
        return self.loss != "rank"

    @property
    def needs_head(self) -> bool:
        """Whether the loss asks both class heads about features of its own."""
        return self.loss == "rank"


@dataclass(frozen=True)
class StudentTeacherOutputs:
    """The last layer of both models on one batch, and what the classes mean.

    `student` and `teacher` are all layers and the decoder's states, for losses that need more.
    """

    student_logits: Tensor  # (B, Q, C)
    student_boxes: Tensor  # (B, Q, 4) cxcywh
    teacher_logits: Tensor  # (B, Q, C)
    teacher_boxes: Tensor  # (B, Q, 4)
    old: Tensor  # (K,) bool, the classes that the teacher knows
    softmax: bool  # C = K + 1, the last output being no-object; else C = K independent sigmoids
    num_boxes: Tensor | None = None  # labelled boxes, as L_DETR counts them; for "boxes" alone
    student: DetrOutput | None = None
    teacher: DetrOutput | None = None
    student_head: Callable[[Tensor], Tensor] | None = None  # (…, D) → (…, C), of the last layer
    teacher_head: Callable[[Tensor], Tensor] | None = None


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


def rank_loss(outputs: StudentTeacherOutputs, rule: DistillRule) -> dict[str, Tensor]:
    """Semantic distillation of SIKD (ICML 2026): each old class keeps its order of similar classes.

    A class's prototype is the mean state of the queries that it is the best class of, weighted by
    their scores. The head's scores of a prototype, relative to the best, are ranked softly; the
    ranks of both models are compared: (1/m²)·Σ_c ‖rank(new) − rank(old)‖₁, over the classes that
    both find in the batch.
    """
    columns = outputs.old.nonzero()[:, 0]
    heads = (outputs.student_head, outputs.teacher_head)
    logits = (outputs.student_logits, outputs.teacher_logits)
    ranks, shown = [], []
    for model, own, head in zip((outputs.student, outputs.teacher), logits, heads, strict=True):
        assert head is not None
        weights = _class_weights(_old_scores(own, columns, outputs.softmax))
        prototypes = _prototypes(_states(model), weights)
        if rule.normalise:
            prototypes = F.normalize(prototypes, dim=1)
        scores = _old_scores(head(prototypes).float(), columns, outputs.softmax)  # (m, m)
        relative = scores / scores.amax(dim=1, keepdim=True).clamp(min=1e-12)
        differences = relative[:, :, None] - relative[:, None, :]
        ranks.append(torch.sigmoid(-differences / rule.temperature).sum(dim=2))
        shown.append(weights.sum(dim=0) > 0)
    present = shown[0] & shown[1]
    distance = (ranks[0] - ranks[1].detach()).abs().sum(dim=1)
    rows = present.sum().clamp(min=1) if rule.by_present else len(columns)
    return {"loss_kd_rank": rule.weight * (distance * present).sum() / (rows * len(columns))}


def topology_loss(outputs: StudentTeacherOutputs, rule: DistillRule) -> dict[str, Tensor]:
    """Object topology of GCD: distances between class prototypes, relative to their mean.

    Published for Grounding DINO; for a DETR both models' prototypes are of the queries that the
    teacher is sure of, with its weights, index by index (our reading). It takes three classes.
    """
    columns = outputs.old.nonzero()[:, 0]
    scores = _old_scores(outputs.teacher_logits, columns, outputs.softmax)
    weights = _class_weights(scores * (scores >= rule.min_score))
    present = weights.sum(dim=0) > 0
    pairs = present[:, None] & present & ~torch.eye(len(columns), dtype=torch.bool).to(present)
    number = pairs.sum().clamp(min=1)
    relative = []
    for model in (outputs.student, outputs.teacher):
        prototypes = _prototypes(_states(model), weights)
        squared = (prototypes[:, None] - prototypes).square().sum(dim=2) * pairs
        relative.append(squared / (squared.sum() / number).clamp(min=1e-12))
    difference = (relative[0] - relative[1]).square().sum() / number
    return {"loss_kd_topology": rule.weight * difference * (present.sum() > 2)}


def response_loss(outputs: StudentTeacherOutputs, rule: DistillRule) -> dict[str, Tensor]:
    """Response distillation of GCD: divergence of the old logits in all layers, by confidence.

    T²·KL(old ‖ new), mean over classes, of distributions at temperature T; queries weigh as much as
    the teacher's best score in its last layer. A softmax head's no-object takes part.
    """
    assert outputs.student is not None
    assert outputs.teacher is not None
    columns = outputs.old.nonzero()[:, 0]
    confidence = _old_scores(outputs.teacher_logits, columns, outputs.softmax).amax(dim=-1)
    if outputs.softmax:
        columns = torch.cat([columns, torch.full_like(columns[:1], len(outputs.old))])
    new, old = (
        model.logits.float()[..., columns] / rule.temperature
        for model in (outputs.student, outputs.teacher)
    )  # (L, B, Q, m)
    target = old.log_softmax(dim=-1)
    divergence = F.kl_div(new.log_softmax(dim=-1), target, reduction="none", log_target=True)
    weighted = (divergence.mean(dim=-1) * confidence).flatten(1).sum(dim=1)  # (L,)
    total = rule.temperature**2 * weighted.sum() / confidence.sum().clamp(min=1e-6)
    return {"loss_kd_response": rule.weight * total}


LOSSES: dict[str, Callable[[StudentTeacherOutputs, DistillRule], dict[str, Tensor]]] = {
    "lwf": lwf_loss,
    "erd": erd_loss,
    "rank": rank_loss,
    "topology": topology_loss,
    "response": response_loss,
}


NORMALISERS: dict[str, Callable[[StudentTeacherOutputs], Tensor | int]] = {
    "queries": lambda outputs: outputs.student_logits[..., 0].numel(),
    "images": lambda outputs: len(outputs.student_logits),
    "boxes": lambda outputs: _given(outputs.num_boxes),
}


def _old_scores(logits: Tensor, columns: Tensor, softmax: bool) -> Tensor:
    """Probabilities of the old classes, (…, m); of a softmax head among them and no-object."""
    if not softmax:
        return logits[..., columns].sigmoid()
    return torch.cat([logits[..., columns], logits[..., -1:]], dim=-1).softmax(dim=-1)[..., :-1]


def _states(output: DetrOutput | None) -> Tensor:
    """The states of the last decoder layer, (B, Q, D) in float32."""
    if output is None or output.features is None:
        raise InputError(
            "this METHOD.DISTILL.LOSS compares decoder states, which the detector does not give: "
            "set `features` in the output of `predict`"
        )
    return output.features.float()


def _class_weights(scores: Tensor) -> Tensor:
    """Of scores (B, Q, m) the best of each query, at its class, else zero: (B·Q, m)."""
    best, label = scores.flatten(0, 1).max(dim=1)
    return torch.zeros_like(scores.flatten(0, 1)).scatter(1, label[:, None], best[:, None])


def _prototypes(features: Tensor, weights: Tensor) -> Tensor:
    """Weighted means of the states (B, Q, D) of each class's queries, (m, D)."""
    return weights.T @ features.flatten(0, 1) / (weights.sum(dim=0)[:, None] + 1e-6)


def _given(num_boxes: Tensor | None) -> Tensor:
    assert num_boxes is not None
    return num_boxes


def _box_distance(student: Tensor, teacher: Tensor, rule: DistillRule) -> Tensor:
    """L_box of boxes one to one, (…)."""
    giou = paired_giou(box_cxcywh_to_xyxy(student), box_cxcywh_to_xyxy(teacher))
    return rule.box_l1 * (student - teacher).abs().sum(-1) + rule.box_giou * (1 - giou)
