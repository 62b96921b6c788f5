"""How good pseudo-labels are: precision and recall for every K, λ and score from one inference.

The teacher's candidates of all images are kept as arrays, most confident first in each image. A
setting keeps the first K foreground candidates, of a score above s, that overlap no ground truth of
the new classes by more than λ. A kept one is a true positive where it matches a hidden object of
its class at IoU ≥ 0.5 that no more confident one has matched.

Shape shorthand: N candidates of one image, M hidden objects of one image, S scores, J values of K,
V values of λ, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cldetr.layers.boxes import box_cxcywh_to_xyxy, box_iou
from cldetr.methods.pseudo import (
    Predictions,
    PseudoRule,
    candidates,
    drop_overlapping,
    foreground_floor,
    make_pseudo_labels,
    select_all,
)
from cldetr.methods.thresholds import class_thresholds, threshold_scores
from cldetr.modeling.structures import Target

MATCH_IOU = 0.5


@dataclass(frozen=True)
class Grid:
    """The settings to compare; each is one of K × λ × score."""

    k: tuple[int, ...] = (1, 2, 3, 5, 10, 15, 20, 30, 50)
    iou: tuple[float, ...] = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    score: tuple[float, ...] = tuple(n / 20 for n in range(1, 19))  # 0.05 to 0.9

    def including(self, rule: PseudoRule, num_queries: int, softmax: bool) -> Grid:
        """The same with a rule's own values, and with K = all queries.

        A softmax head tells foreground by itself: it has a score of 0 besides.
        """
        least = 0.0 if softmax else rule.foreground
        few = (k for k in (*self.k, rule.k) if k < num_queries)
        return Grid(
            k=tuple(sorted({*few, num_queries})),
            iou=tuple(sorted({*self.iou, rule.iou})),
            score=tuple(sorted({*self.score, least})),
        )


@dataclass(frozen=True)
class Counts:
    """Pseudo-labels and those of them that are right, of one setting or of an array of settings.

    Attributes:
        images: on how many.
        given: (…, C) by setting and class.
        right: (…, C).
        hidden: (C,) hidden objects.
    """

    images: int
    given: np.ndarray
    right: np.ndarray
    hidden: np.ndarray

    def rates(self, labels: Sequence[int] | None = None) -> dict[str, np.ndarray]:
        """Labels per image, precision, recall and F1 of each setting, over all or some classes.

        They are NaN where there is nothing to divide by.
        """
        chosen = slice(None) if labels is None else list(labels)
        r, g, h = (x[..., chosen].sum(-1) for x in (self.right, self.given, self.hidden))
        with np.errstate(invalid="ignore"):
            return {
                "per_image": g / np.float64(max(self.images, 1)),
                "precision": r / g,
                "recall": r / h,
                "f1": 2 * r / (g + h),
            }

    def best(self, allowed: np.ndarray | bool = True) -> tuple[int, int, int]:
        """The indices of the best F1 over (J, V, S); of equals the one that restricts least.

        Args:
            allowed: (J, V, S), settings that can be had.
        """
        f1 = np.where(allowed, np.nan_to_num(self.rates()["f1"]), -1.0)
        # Large K, large λ, low score: the last of equals in this order.
        flipped = f1[::-1, ::-1, :]
        j, v, s = np.unravel_index(int(flipped.argmax()), flipped.shape)
        return len(f1) - 1 - int(j), f1.shape[1] - 1 - int(v), int(s)


class PseudoLabelStats:
    """Collects the teacher's candidates, image by image."""

    def __init__(self, num_classes: int, grid: Grid) -> None:
        self.num_classes = num_classes
        self.grid = grid
        self.images = 0
        self._rows: list[tuple[np.ndarray, ...]] = []  # rank, score, label, kept (V), right (V)
        self._hidden = np.zeros(num_classes, dtype=np.int64)

    def add(self, predictions: Predictions, truth: Target, hidden: Target) -> None:
        """Adds one image.

        Args:
            predictions: the teacher's, a batch of one, with scores of old classes alone.
            truth: ground truth of the new classes, which pseudo-labels must not overlap.
            hidden: the old objects, which training does not see.
        """
        self.images += 1
        self._hidden += np.bincount(hidden.labels.cpu().numpy(), minlength=self.num_classes)
        ranking = select_all(predictions, PseudoRule(select="all"), 0.0)
        floor = foreground_floor(predictions, ranking, min(self.grid.score))
        foreground = ranking.chosen & (ranking.scores > floor)
        queries, labels, scores = (
            x[foreground] for x in (ranking.queries, ranking.classes, ranking.scores)
        )
        boxes = box_cxcywh_to_xyxy(predictions.boxes[0, queries])
        worst = box_iou(boxes, box_cxcywh_to_xyxy(truth.boxes))[0].cpu().numpy().max(1, initial=0)
        kept = worst[:, None] <= np.array(self.grid.iou, dtype=np.float32)  # (N, V)
        objects = box_cxcywh_to_xyxy(hidden.boxes)
        right = np.zeros_like(kept)
        for column, found in zip(kept.T, right.T, strict=True):
            found[column] = match_true_positives(
                boxes[column], labels[column], objects, hidden.labels
            )
        rank = np.arange(len(boxes))
        self._rows.append((rank, scores.cpu().numpy(), labels.cpu().numpy(), kept, right))

    def count(self) -> Counts:
        """Counts of all settings, (J, V, S, C)."""
        grid = self.grid
        shape = (len(grid.k), len(grid.iou), len(grid.score))
        given, right = np.zeros((2, *shape, self.num_classes), np.int64)
        if self._rows:
            rank, score, label, kept, found = map(np.concatenate, zip(*self._rows, strict=True))
            for j, v, s in np.ndindex(shape):
                chosen = (rank < grid.k[j]) & (score > np.float32(grid.score[s])) & kept[:, v]
                for counts, rows in ((given, chosen), (right, chosen & found[:, v])):
                    counts[j, v, s] = np.bincount(label[rows], minlength=self.num_classes)
        return Counts(self.images, given, right, self._hidden)


class RuleStats:
    """Counts of whole rules on the same images, those among them that need thresholds."""

    def __init__(
        self,
        rules: Mapping[str, PseudoRule],
        classes: Sequence[int],
        num_classes: int,
        thresholds: Mapping[str, Mapping[int, float]] | None = None,
    ) -> None:
        """Sets up the comparison.

        Args:
            rules: by name.
            classes: labels that the teacher may give.
            num_classes: K.
            thresholds: of rules that need them, where they are known; others' are found from the
                images that are added.
        """
        self.rules = dict(rules)
        self.classes = list(classes)
        self.num_classes = num_classes
        self.thresholds = dict(thresholds or {})
        self._images: list[tuple[Predictions, Target, Target]] = []

    def add(self, predictions: Predictions, truth: Target, hidden: Target) -> None:
        """Adds one image, as `PseudoLabelStats.add` does; what no rule may choose is dropped."""
        wanted = torch.stack([candidates(predictions, rule)[0] for rule in self.rules.values()])
        rows = wanted.any(dim=0).nonzero()[:, 0]
        background = predictions.background
        kept = Predictions(
            predictions.scores[:, rows],
            predictions.boxes[:, rows],
            None if background is None else background[:, rows],
        )
        self._images.append((kept, truth, hidden))

    def count(self) -> dict[str, Counts]:
        """Counts of each rule by class, (C,)."""
        return {name: self._count(name, rule) for name, rule in self.rules.items()}

    def _count(self, name: str, rule: PseudoRule) -> Counts:
        given, right, hidden = np.zeros((3, self.num_classes), dtype=np.int64)
        limits = self._limits(name, rule) if rule.needs_thresholds else None
        for pred, truth, objects in self._images:
            usable = pred.scores.new_ones((1, self.num_classes), dtype=torch.bool)  # others: 0
            (labels,) = make_pseudo_labels(
                pred.scores, pred.boxes, pred.background, usable, rule, thresholds=limits
            )
            labels = drop_overlapping(labels, truth, rule)
            corners = [box_cxcywh_to_xyxy(each.boxes) for each in (labels, objects)]
            found = match_true_positives(corners[0], labels.labels, corners[1], objects.labels)
            own = labels.labels.cpu().numpy()
            given += np.bincount(own, minlength=self.num_classes)
            right += np.bincount(own[found], minlength=self.num_classes)
            hidden += np.bincount(objects.labels.cpu().numpy(), minlength=self.num_classes)
        return Counts(len(self._images), given, right, hidden)

    def _limits(self, name: str, rule: PseudoRule) -> Tensor:
        """The threshold of each class, (K,)."""
        values = self.thresholds.get(name)
        if values is None:
            parts = [threshold_scores(pred, rule) for pred, *_ in self._images]
            scores, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
            values = class_thresholds(scores, labels, self.classes, rule).values
        limits = self._images[0][0].scores.new_ones(self.num_classes)
        limits[list(values)] = limits.new_tensor(list(values.values()))
        return limits


def match_true_positives(
    boxes: Tensor, labels: Tensor, objects: Tensor, object_labels: Tensor
) -> np.ndarray:
    """Which boxes match an object of their class at IoU ≥ 0.5, the first ones choosing first.

    Args:
        boxes: (N, 4) corners, most confident first.
        labels: (N,).
        objects: (M, 4) corners.
        object_labels: (M,).

    Returns:
        (N,) which boxes are true positives.
    """
    ious = box_iou(boxes, objects)[0].cpu().numpy()
    ious[labels.cpu().numpy()[:, None] != object_labels.cpu().numpy()] = 0.0
    right = np.zeros(len(ious), dtype=bool)
    for row in np.flatnonzero(ious.max(axis=1, initial=0.0) >= MATCH_IOU):
        column = ious[row].argmax()
        if ious[row, column] >= MATCH_IOU:
            right[row] = True
            ious[:, column] = 0.0  # nothing else can match it
    return right
