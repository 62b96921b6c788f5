"""Pseudo-labels: which of the old model's predictions to trust, and how they join the labels.

This is Sec. 3.3 of the paper: the foreground set F, its K most confident members P, the subset Q
of those that do not overlap the ground truth (Eq. 3), and the merged labels y^distill (Eq. 4).

Shape shorthand: B images, Q queries, K classes (labels), T labels of one image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from cldetr.errors import InputError
from cldetr.layers.boxes import box_cxcywh_to_xyxy, box_iou
from cldetr.layers.ragged import pad_rows, row_indices
from cldetr.modeling.structures import Target


@dataclass(frozen=True)
class PseudoRule:
    """How pseudo-labels are chosen and written.

    Attributes:
        select: a word of `SELECTIONS`.
        k: K, the number of most confident foreground predictions kept (`topk`, `pairs`).
        score: p, the least score kept (`threshold`), where `curriculum` ends, and the threshold of
            classes that have too few scores for one of their own (`per_class`).
        score_start: where `curriculum` starts (the supplement goes from 0.5 to 0.1).
        score_floor: scores below this do not count when `per_class` finds its thresholds, which
            are therefore at least as high.
        foreground: for sigmoid heads, which have no background class: a query is foreground when
            its best class scores above this. Softmax heads compare with p(φ), as the paper does.
        nms_iou: of two chosen boxes of one class that overlap by more than this, the less confident
            is dropped; 1 keeps both, as the paper does.
        iou: λ, a pseudo-box that overlaps a ground-truth box by more than this is dropped.
        drop_at_iou: drop at IoU exactly λ too, as the released code does.
        skip_annotated: no label of a class whose objects are all annotated on the image anyway,
            as those of an exemplar's own phase are; the paper's DKD does not ask. Always so where
            the phases are domains.
        any_class: label with any class of the head, also with one that the old model has not
            learnt, as the released code does; else with old classes only.
        soft: label with the teacher's class distribution; else with its best class.
        weighted: a pseudo-label counts by its score, in the losses of its class and its box and in
            their normaliser, so that doubtful ones do not drown the labels of new classes. Else it
            counts as much as a true label, as in the paper.
        balance: where a stage has more than two pseudo-labels for each true label, a pseudo-label
            counts (2 · true / pseudo) to this power, in the losses and in their normaliser, so that
            they do not drown the labels of new classes. 0: as much as a true label, as in the
            paper; 1: all together at most twice as much as the true labels.
        calibrated: the best class counts as much as its score s is worth, σ(10·(s − 0.5)), as in
            PseDet: a doubtful label pulls less. Not together with SOFT.
        cache: run the teacher once per image, before the stage and at test size, and transform its
            predictions as the image is augmented; else run it in every step on the augmented image.
    """

    select: str = "topk"
    k: int = 10
    score: float = 0.1
    score_start: float = 0.5
    score_floor: float = 0.2
    foreground: float = 0.3
    nms_iou: float = 1.0
    iou: float = 0.7
    drop_at_iou: bool = False
    skip_annotated: bool = False
    any_class: bool = False
    soft: bool = True
    weighted: bool = False
    balance: float = 0.0
    calibrated: bool = False
    cache: bool = False

    def __post_init__(self) -> None:
        if self.select not in SELECTIONS:
            raise InputError(
                f"unknown pseudo-label selection {self.select!r}: choose {', '.join(SELECTIONS)}"
            )
        if self.k < 1:
            raise InputError(f"K, the number of pseudo-labels, must be at least 1, not {self.k}")
        shares = ("score", "score_start", "score_floor", "foreground", "nms_iou", "iou", "balance")
        for name in shares:
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise InputError(f"pseudo-label setting {name} must lie in [0, 1], not {value}")
        if self.soft and self.calibrated:
            raise InputError(
                "a pseudo-label has either the teacher's distribution or a calibrated score: set "
                "SOFT or CALIBRATED to False"
            )
        if self.needs_thresholds and self.score < self.score_floor:
            raise InputError(
                f"SELECT per_class keeps no score below SCORE_FLOOR {self.score_floor}: set SCORE, "
                f"the threshold of classes without scores, to as much at least, not {self.score}"
            )

    @property
    def needs_thresholds(self) -> bool:
        """Whether the selection needs a threshold of each class, from a pass over the images."""
        return self.select == "per_class"


@dataclass(frozen=True)
class Predictions:
    """A model's predictions on a batch, as the selections read them."""

    scores: Tensor  # (B, Q, K) class probabilities, zero for classes that may not be used
    boxes: Tensor  # (B, Q, 4) cxcywh in [0, 1]
    background: Tensor | None  # (B, Q) p(φ) of a softmax head, None for a sigmoid head
    thresholds: Tensor | None = None  # (K,) of each class; None before they are known


@dataclass(frozen=True)
class Ranking:
    """Predictions of every image, most confident first, and which of them a selection chooses."""

    queries: Tensor  # (B, R)
    classes: Tensor  # (B, R)
    scores: Tensor  # (B, R), descending; equal ones keep the order of the queries
    chosen: Tensor  # (B, R) bool, never where the score is zero


# A selection takes the predictions, the rule and the progress of the stage in [0, 1]. What it
# chooses at any progress it chooses at the beginning or at the end too; `candidates` relies on
# that. An image's choice must not depend on the others of its batch.
Selection = Callable[[Predictions, PseudoRule, float], Ranking]


def select_topk(pred: Predictions, rule: PseudoRule, progress: float) -> Ranking:
    """The K most confident foreground queries: the set P."""
    ranking = _by_confidence(pred)
    # The paper writes "∀c: p(c) > p(φ)", which nothing can satisfy: the best class is meant.
    foreground = ranking.chosen & (
        ranking.scores > foreground_floor(pred, ranking, rule.foreground)
    )
    chosen = foreground & (foreground.cumsum(dim=1) <= rule.k)
    return dataclasses.replace(ranking, chosen=chosen)


def select_threshold(pred: Predictions, rule: PseudoRule, progress: float) -> Ranking:
    """All non-background queries whose score reaches p (Table 3, rows 4-6)."""
    return _reaching(pred, rule.score)


def select_per_class(pred: Predictions, rule: PseudoRule, progress: float) -> Ranking:
    """As `threshold`, with a threshold for each class (`cldetr.methods.thresholds`).

    Before these are known it chooses what may count for them: all that reaches their floor.
    """
    ranking = _reaching(pred, rule.score_floor)
    if pred.thresholds is None:
        return ranking
    reached = ranking.scores >= pred.thresholds[ranking.classes]
    return dataclasses.replace(ranking, chosen=ranking.chosen & reached)


def select_curriculum(pred: Predictions, rule: PseudoRule, progress: float) -> Ranking:
    """As `threshold`, with p falling linearly from `score_start` to `score` over the stage."""
    progress = min(max(progress, 0.0), 1.0)
    return _reaching(pred, rule.score_start + (rule.score - rule.score_start) * progress)


def select_all(pred: Predictions, rule: PseudoRule, progress: float) -> Ranking:
    """Every query with its best class: joint matching without selection (Table 2, row 3)."""
    return _by_confidence(pred)


def select_pairs(pred: Predictions, rule: PseudoRule, progress: float) -> Ranking:
    """The K best (query, class) pairs: what the released code does."""
    scores, order = pred.scores.flatten(1).sort(dim=1, descending=True, stable=True)
    scores, order = scores[:, : rule.k], order[:, : rule.k]
    num_classes = pred.scores.shape[2]
    return Ranking(order // num_classes, order % num_classes, scores, scores > 0)


SELECTIONS: dict[str, Selection] = {
    "topk": select_topk,
    "threshold": select_threshold,
    "curriculum": select_curriculum,
    "all": select_all,
    "pairs": select_pairs,
    "per_class": select_per_class,
}


def make_pseudo_labels(
    scores: Tensor,
    boxes: Tensor,
    background: Tensor | None,
    usable: Tensor,
    rule: PseudoRule,
    progress: float = 0.0,
    thresholds: Tensor | None = None,
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
        thresholds: (K,) of each class, for a rule that needs them.
    """
    scores = scores * usable[:, None, :].to(scores.dtype)
    pred = Predictions(scores, boxes, background, thresholds)
    ranking = SELECTIONS[rule.select](pred, rule, progress)
    images, ranks = ranking.chosen.nonzero(as_tuple=True)  # image by image
    counts = ranking.chosen.sum(dim=1)
    if rule.nms_iou < 1.0:
        kept = _drop_duplicates(pred, ranking, images, ranks, rule.nms_iou)
        images, ranks = images[kept], ranks[kept]
        counts = torch.zeros_like(counts).index_add_(0, images, torch.ones_like(images))
    queries, classes = ranking.queries[images, ranks], ranking.classes[images, ranks]
    probs = None
    if rule.soft:
        probs = scores[images, queries]
        if background is not None:
            probs = torch.cat([probs, background[images, queries, None]], dim=1)
            probs = probs / probs.sum(dim=1, keepdim=True)
    elif rule.calibrated:
        width = scores.shape[2] + (background is not None)
        probs = _calibrated(ranking.scores[images, ranks], classes, width, background is not None)
    weights = ranking.scores[images, ranks].float() if rule.weighted else None
    found = Target(classes, boxes[images, queries], probs, weights=weights)
    return found.split(counts.tolist())


def _drop_duplicates(
    pred: Predictions, ranking: Ranking, images: Tensor, ranks: Tensor, iou: float
) -> Tensor:
    """Which of the chosen predictions are left by class-wise suppression in each image, in order.

    Two queries on one object would both be positives of a one-to-one matcher.
    """
    classes = ranking.classes[images, ranks]
    groups = images * pred.scores.shape[2] + classes
    # In float64: torchvision tells groups apart by shifting boxes, which costs small ones digits.
    corners = box_cxcywh_to_xyxy(pred.boxes[images, ranking.queries[images, ranks]]).double()
    kept = batched_nms(corners, ranking.scores[images, ranks].double(), groups, iou)
    return kept.sort().values


def _calibrated(scores: Tensor, classes: Tensor, width: int, softmax: bool) -> Tensor:
    """Label rows (T, width) with σ(10·(s − 0.5)) at the class; a softmax head's rest is no-object.

    0.3 becomes 0.12, 0.4 0.27 and 0.7 0.88 (PseDet).
    """
    worth = torch.sigmoid(10.0 * (scores - 0.5))
    rows = worth.new_zeros(len(worth), width)
    if softmax:
        rows[:, -1] = 1.0 - worth
    return rows.scatter_(1, classes[:, None], worth[:, None])


def candidates(pred: Predictions, rule: PseudoRule) -> Tensor:
    """The queries that the rule may choose in the course of a stage, (B, Q) bool.

    A crop may lose the most confident ones, so ten times K are kept.
    """
    wide = dataclasses.replace(rule, k=10 * rule.k)
    found = torch.zeros(pred.scores.shape[:2], dtype=torch.bool, device=pred.scores.device)
    for progress in (0.0, 1.0):
        ranking = SELECTIONS[rule.select](pred, wide, progress)
        images, ranks = ranking.chosen.nonzero(as_tuple=True)
        found[images, ranking.queries[images, ranks]] = True
    return found


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
    together = Target.cat(pseudos)
    images, _ = row_indices(counts, together.boxes.device)
    corners = box_cxcywh_to_xyxy(torch.cat([truth.boxes for truth in truths]))
    wanted = pad_rows(corners, *row_indices(others, corners.device), others)[images]  # (P, T, 4)
    exists = torch.arange(max(others)) < torch.tensor(others)[:, None]
    iou = box_iou(box_cxcywh_to_xyxy(together.boxes)[:, None], wanted)[0][:, 0]
    exists = exists.to(iou.device, non_blocking=True)
    worst = iou.masked_fill(~exists[images], -1.0).amax(dim=1)
    clear = worst < rule.iou if rule.drop_at_iou else worst <= rule.iou
    none = torch.zeros(len(counts), dtype=torch.int64, device=clear.device)
    sizes = none.index_add_(0, images, clear.long()).tolist()
    rows = clear.nonzero()[:, 0]  # once: each index by a mask would make the host wait for a GPU
    return together[rows].split(sizes)


def merge(truth: Target, pseudo: Target, limit: int) -> tuple[Target, int]:
    """y^distill of Eq. 4, ground truth first, cut to `limit` labels (the number of queries).

    Background labels need not be written: the criterion treats unmatched queries as background.

    Returns:
        the merged labels and how many pseudo-labels did not fit.
    """
    merged, dropped = _merge_in_batch([truth], [pseudo], limit)
    return merged[0], dropped[0]


def _merge_in_batch(
    truths: Sequence[Target], pseudos: Sequence[Target], limit: int
) -> tuple[list[Target], list[int]]:
    """`merge` of every image."""
    certain = Target.cat(truths)
    probs = pseudos[0].probs
    if probs is not None:
        rows = probs.new_zeros(len(certain), probs.shape[1])
        probs = rows.scatter_(1, certain.labels[:, None], 1.0)
    weights = pseudos[0].weights
    if weights is not None:
        weights = weights.new_ones(len(certain))
    flags = torch.zeros_like(certain.labels, dtype=torch.bool)
    certain = dataclasses.replace(certain, probs=probs, pseudo=flags, weights=weights)
    merged, dropped = [], []
    parts = certain.split([len(truth) for truth in truths])
    for truth, pseudo in zip(parts, pseudos, strict=True):
        dropped.append(max(len(truth) + len(pseudo) - max(limit, len(truth)), 0))
        if dropped[-1]:
            pseudo = pseudo[: len(pseudo) - dropped[-1]]
        flags = torch.ones_like(pseudo.labels, dtype=torch.bool)
        merged.append(Target.cat([truth, dataclasses.replace(pseudo, pseudo=flags)]))
    return merged, dropped


@dataclass(frozen=True)
class MergeCounts:
    """What happened to the labels of one batch, for the log."""

    images: int
    empty: int  # images for which no pseudo-label was left
    pseudo: int  # pseudo-labels that joined the labels
    overlapping: int  # pseudo-labels dropped for lying on ground truth
    overflow: int  # pseudo-labels dropped for want of queries


def merge_batch(
    truths: Sequence[Target], pseudos: Sequence[Target], rule: PseudoRule, limit: int
) -> tuple[list[Target], MergeCounts]:
    """Filters and merges the pseudo-labels of every image of a batch (Eq. 3 and 4)."""
    clear = _drop_in_batch(pseudos, truths, rule)
    merged, dropped = _merge_in_batch(truths, clear, limit)
    joined = [len(x) - lost for x, lost in zip(clear, dropped, strict=True)]
    return merged, MergeCounts(
        images=len(merged),
        empty=joined.count(0),
        pseudo=sum(joined),
        overlapping=sum(map(len, pseudos)) - sum(map(len, clear)),
        overflow=sum(dropped),
    )


def _reaching(pred: Predictions, threshold: float) -> Ranking:
    ranking = _by_confidence(pred)
    chosen = ranking.chosen & (ranking.scores >= threshold)
    if pred.background is not None:
        chosen &= ranking.scores > foreground_floor(pred, ranking, 0.0)
    return dataclasses.replace(ranking, chosen=chosen)


def _by_confidence(pred: Predictions) -> Ranking:
    """All queries with their best classes."""
    best, classes = pred.scores.max(dim=2)
    scores, queries = best.sort(dim=1, descending=True, stable=True)
    return Ranking(queries, classes.gather(1, queries), scores, scores > 0)


def foreground_floor(pred: Predictions, ranking: Ranking, foreground: float) -> Tensor | float:
    """What the score of a foreground query exceeds: p(φ), or a constant for a sigmoid head."""
    if pred.background is None:
        return foreground
    return pred.background.gather(1, ranking.queries)
