"""Pseudo-labels: which of the old model's predictions to trust, and how they join the labels.

This is Sec. 3.3 of the paper: the foreground set F, its K most confident members P, the subset Q
of those that leave the ground truth alone (Eq. 3), and the merged labels y^distill (Eq. 4).

Shape shorthand: B images, Q queries, K classes (labels), T labels of one image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cldetr.errors import InputError
from cldetr.layers.boxes import box_cxcywh_to_xyxy, box_iou
from cldetr.modeling.structures import Target


@dataclass(frozen=True)
class PseudoRule:
    """How pseudo-labels are chosen and written.

    Attributes:
        select: a word of `SELECTIONS`.
        k: K, the number of most confident foreground predictions kept (`topk`, `pairs`).
        score: p, the least score kept (`threshold`), and where `curriculum` ends.
        score_start: where `curriculum` starts (the supplement goes from 0.5 to 0.1).
        foreground: for sigmoid heads, which have no background class: a query is foreground when
            its best class scores above this. Softmax heads compare with p(φ), as the paper does.
        iou: λ, a pseudo-box that overlaps a ground-truth box by more than this is dropped.
        drop_at_iou: drop at IoU exactly λ too, as the released code does.
        soft: label with the teacher's class distribution; else with its best class.
        cache: ask the teacher once per image, before the stage and at test size, and carry its
            predictions through the augmentation; else ask it in every step about the augmented
            image.
    """

    select: str = "topk"
    k: int = 10
    score: float = 0.1
    score_start: float = 0.5
    foreground: float = 0.3
    iou: float = 0.7
    drop_at_iou: bool = False
    soft: bool = True
    cache: bool = False

    def __post_init__(self) -> None:
        if self.select not in SELECTIONS:
            raise InputError(
                f"unknown pseudo-label selection {self.select!r}: choose {', '.join(SELECTIONS)}"
            )
        if self.k < 1:
            raise InputError(f"K, the number of pseudo-labels, must be at least 1, not {self.k}")
        for name in ("score", "score_start", "foreground", "iou"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise InputError(f"pseudo-label setting {name} must lie in [0, 1], not {value}")


@dataclass(frozen=True)
class Predictions:
    """A model's predictions on one image, as the selections read them."""

    scores: Tensor  # (Q, K) class probabilities, zero for classes that may not be used
    boxes: Tensor  # (Q, 4) cxcywh in [0, 1]
    background: Tensor | None  # (Q,) p(φ) of a softmax head, None for a sigmoid head


# A selection takes the predictions, the rule and the progress of the stage in [0, 1], and returns
# the chosen queries and their classes, most confident first. What it chooses at any progress it
# chooses at the beginning or at the end too; `candidates` relies on that.
Selection = Callable[[Predictions, PseudoRule, float], tuple[Tensor, Tensor]]


def select_topk(pred: Predictions, rule: PseudoRule, progress: float) -> tuple[Tensor, Tensor]:
    """The K most confident foreground queries: the set P."""
    queries, classes, scores = _by_confidence(pred)
    # The paper writes "∀c: p(c) > p(φ)", which nothing can satisfy: the best class is meant.
    floor = rule.foreground if pred.background is None else pred.background[queries]
    keep = scores > floor
    return queries[keep][: rule.k], classes[keep][: rule.k]


def select_threshold(pred: Predictions, rule: PseudoRule, progress: float) -> tuple[Tensor, Tensor]:
    """All non-background queries whose score reaches p (Table 3, rows 4-6)."""
    return _reaching(pred, rule.score)


def select_curriculum(
    pred: Predictions, rule: PseudoRule, progress: float
) -> tuple[Tensor, Tensor]:
    """As `threshold`, with p falling linearly from `score_start` to `score` over the stage."""
    progress = min(max(progress, 0.0), 1.0)
    return _reaching(pred, rule.score_start + (rule.score - rule.score_start) * progress)


def select_all(pred: Predictions, rule: PseudoRule, progress: float) -> tuple[Tensor, Tensor]:
    """Every query with its best class: joint matching without selection (Table 2, row 3)."""
    queries, classes, _ = _by_confidence(pred)
    return queries, classes


def select_pairs(pred: Predictions, rule: PseudoRule, progress: float) -> tuple[Tensor, Tensor]:
    """The K best (query, class) pairs: what the released code does."""
    scores, order = pred.scores.flatten().sort(descending=True, stable=True)
    order = order[: rule.k][scores[: rule.k] > 0]
    num_classes = pred.scores.shape[1]
    return order // num_classes, order % num_classes


SELECTIONS: dict[str, Selection] = {
    "topk": select_topk,
    "threshold": select_threshold,
    "curriculum": select_curriculum,
    "all": select_all,
    "pairs": select_pairs,
}


def make_pseudo_labels(
    scores: Tensor,
    boxes: Tensor,
    background: Tensor | None,
    usable: Tensor,
    rule: PseudoRule,
    progress: float = 0.0,
) -> list[Target]:
    """Selects pseudo-labels on a batch, before they meet the ground truth.

    Args:
        scores: (B, Q, K) class probabilities of the model that labels.
        boxes: (B, Q, 4) its boxes, cxcywh in [0, 1].
        background: (B, Q) its p(φ) for a softmax head, None for a sigmoid head.
        usable: (B, K) classes that may be pseudo-labelled on each image: the old classes, less
            those whose objects are all annotated on that image.
        rule: how to choose.
        progress: how much of the stage is done, in [0, 1].
    """
    scores = scores * usable[:, None, :].to(scores.dtype)
    select = SELECTIONS[rule.select]
    found = []
    for image in range(len(scores)):
        p_phi = None if background is None else background[image]
        pred = Predictions(scores[image], boxes[image], p_phi)
        queries, classes = select(pred, rule, progress)
        probs = None
        if rule.soft:
            probs = pred.scores[queries]
            if p_phi is not None:
                probs = torch.cat([probs, p_phi[queries, None]], dim=1)
                probs = probs / probs.sum(dim=1, keepdim=True)
        found.append(Target(classes, pred.boxes[queries], probs))
    return found


def candidates(pred: Predictions, rule: PseudoRule) -> Tensor:
    """The queries that the rule may choose in the course of a stage, ascending, (N,).

    A crop may lose the most confident ones, so ten times K are kept.
    """
    wide = dataclasses.replace(rule, k=10 * rule.k)
    select = SELECTIONS[rule.select]
    return torch.cat([select(pred, wide, progress)[0] for progress in (0.0, 1.0)]).unique()


def drop_overlapping(pseudo: Target, truth: Target, rule: PseudoRule) -> Target:
    """The subset Q: pseudo-labels whose IoU with every ground-truth box is at most λ (Eq. 3)."""
    return _drop_in_batch([pseudo], [truth], rule)[0]


def _drop_in_batch(
    pseudos: Sequence[Target], truths: Sequence[Target], rule: PseudoRule
) -> list[Target]:
    """`drop_overlapping` of every image at once, in a few operations on the boxes of all."""
    counts, others = [len(x) for x in pseudos], [len(x) for x in truths]
    if not any(counts) or not any(others):
        return list(pseudos)
    boxes = box_cxcywh_to_xyxy(torch.cat([pseudo.boxes for pseudo in pseudos]))
    wanted = box_cxcywh_to_xyxy(torch.cat([truth.boxes for truth in truths]))
    images = torch.arange(len(counts))
    apart = images.repeat_interleave(torch.tensor(counts))[:, None] != images.repeat_interleave(
        torch.tensor(others)
    )
    iou = box_iou(boxes, wanted)[0].masked_fill(apart.to(boxes.device), -1.0)
    worst = iou.amax(dim=1)
    keep = worst < rule.iou if rule.drop_at_iou else worst <= rule.iou
    found = []
    for pseudo, clear in zip(pseudos, keep.split(counts), strict=True):
        probs = None if pseudo.probs is None else pseudo.probs[clear]
        found.append(Target(pseudo.labels[clear], pseudo.boxes[clear], probs))
    return found


def merge(truth: Target, pseudo: Target, most: int) -> tuple[Target, int]:
    """y^distill of Eq. 4, ground truth first, cut to `most` labels (the number of queries).

    Background labels need not be written: the criterion treats unmatched queries as background.

    Returns:
        the merged labels and how many pseudo-labels did not fit.
    """
    room = max(most - len(truth), 0)
    dropped = max(len(pseudo) - room, 0)
    labels = torch.cat([truth.labels, pseudo.labels[:room]])
    boxes = torch.cat([truth.boxes, pseudo.boxes[:room]])
    probs = None
    if pseudo.probs is not None:
        one_hot = pseudo.probs.new_zeros(len(truth), pseudo.probs.shape[1])
        one_hot[torch.arange(len(truth), device=one_hot.device), truth.labels] = 1.0
        probs = torch.cat([one_hot, pseudo.probs[:room]])
    return Target(labels, boxes, probs), dropped


@dataclass(frozen=True)
class MergeCounts:
    """What happened to the labels of one batch, for the log."""

    images: int
    empty: int  # images for which no pseudo-label was left
    pseudo: int  # pseudo-labels that joined the labels
    overlapping: int  # pseudo-labels dropped for lying on ground truth
    overflow: int  # pseudo-labels dropped for want of queries


def merge_batch(
    truths: Sequence[Target], pseudos: Sequence[Target], rule: PseudoRule, most: int
) -> tuple[list[Target], MergeCounts]:
    """Filters and merges the pseudo-labels of every image of a batch (Eq. 3 and 4)."""
    merged, empty, kept, overlapping, overflow = [], 0, 0, 0, 0
    for truth, pseudo, clear in zip(
        truths, pseudos, _drop_in_batch(pseudos, truths, rule), strict=True
    ):
        target, dropped = merge(truth, clear, most)
        merged.append(target)
        joined = len(clear) - dropped
        empty += joined == 0
        kept += joined
        overlapping += len(pseudo) - len(clear)
        overflow += dropped
    return merged, MergeCounts(len(merged), empty, kept, overlapping, overflow)


def _reaching(pred: Predictions, least: float) -> tuple[Tensor, Tensor]:
    queries, classes, scores = _by_confidence(pred)
    keep = scores >= least
    if pred.background is not None:
        keep &= scores > pred.background[queries]
    return queries[keep], classes[keep]


def _by_confidence(pred: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, best classes and scores, most confident first; equal scores keep query order."""
    best, classes = pred.scores.max(dim=1)
    scores, queries = best.sort(descending=True, stable=True)
    queries, scores = queries[scores > 0], scores[scores > 0]
    return queries, classes[queries], scores
