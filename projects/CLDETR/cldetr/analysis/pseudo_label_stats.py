"""How good pseudo-labels are: precision and recall for every K, λ and score from one inference.

The teacher's candidates of all images are kept as arrays, most confident first in each image. A
setting keeps the first K foreground candidates, of a score above s, that overlap no ground truth of
the new classes by more than λ. A kept one is a true positive where it matches a hidden object of
its class at IoU ≥ 0.5 that no more confident one has matched.

Shape shorthand: N candidates of one image, M hidden objects of one image, S scores, J values of K,
V values of λ, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cldetr.layers.boxes import box_cxcywh_to_xyxy, box_iou
from cldetr.methods.pseudo import Predictions, PseudoRule, foreground_floor, select_all
from cldetr.modeling.structures import Target

MATCH_IOU = 0.5


@dataclass(frozen=True)
class Grid:
    """The settings to compare; each is one of K × λ × score."""

    k: tuple[int, ...] = (1, 2, 3, 5, 10, 15, 20, 30, 50)
    iou: tuple[float, ...] = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    score: tuple[float, ...] = (
        *(0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45),
        *(0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
    )

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
    """What each setting gives, by class: (J, V, S, C) each, and (C,) hidden objects."""

    grid: Grid
    images: int
    given: np.ndarray
    right: np.ndarray
    hidden: np.ndarray

    def precision(self) -> np.ndarray:
        """Of all classes together, (J, V, S); NaN where nothing is given."""
        given = self.given.sum(-1)
        return np.where(given > 0, self.right.sum(-1) / np.maximum(given, 1), np.nan)

    def recall(self) -> np.ndarray:
        """Of all classes together, (J, V, S)."""
        return self.right.sum(-1) / max(int(self.hidden.sum()), 1)

    def f1(self) -> np.ndarray:
        """The harmonic mean of both, (J, V, S)."""
        return 2 * self.right.sum(-1) / np.maximum(self.given.sum(-1) + self.hidden.sum(), 1)

    def best(self, allowed: np.ndarray | None = None) -> tuple[int, int, int]:
        """The indices of the best F1; of equals the one that restricts least.

        Args:
            allowed: (J, V, S), settings that can be had; None: all.
        """
        f1 = self.f1() if allowed is None else np.where(allowed, self.f1(), -1.0)
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
        if not len(queries):
            return
        boxes = box_cxcywh_to_xyxy(predictions.boxes[0, queries])
        worst = np.zeros(len(boxes), dtype=np.float32)
        if len(truth):
            worst = box_iou(boxes, box_cxcywh_to_xyxy(truth.boxes))[0].amax(dim=1).cpu().numpy()
        kept = worst[:, None] <= np.array(self.grid.iou, dtype=np.float32)  # (N, V)
        ious = _class_ious(boxes, labels, box_cxcywh_to_xyxy(hidden.boxes), hidden.labels)
        right = np.stack([_match_greedily(ious, column)[0] for column in kept.T], axis=1)
        rank = np.arange(len(boxes))
        self._rows.append((rank, scores.cpu().numpy(), labels.cpu().numpy(), kept, right))

    def count(self) -> Counts:
        """Counts for all settings at once."""
        grid = self.grid
        shape = (len(grid.k), len(grid.iou), len(grid.score), self.num_classes)
        given, right = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        if self._rows:
            rank, score, label, kept, found = (
                np.concatenate(column) for column in zip(*self._rows, strict=True)
            )
            # A candidate counts for K > rank and for scores below its own: a histogram, summed up.
            first_k = np.searchsorted(grid.k, rank, side="right")
            scores_below = np.searchsorted(np.array(grid.score, np.float32), score, side="left")
            for v in range(len(grid.iou)):
                for counts, chosen in ((given, kept[:, v]), (right, found[:, v])):
                    counts[:, v] = self._histogram(
                        first_k[chosen], scores_below[chosen], label[chosen]
                    )
        return Counts(grid, self.images, given, right, self._hidden)

    def _histogram(self, first_k: np.ndarray, below: np.ndarray, label: np.ndarray) -> np.ndarray:
        """(J, S, C): candidates by setting of K and score."""
        shape = (len(self.grid.k) + 1, len(self.grid.score) + 1, self.num_classes)
        flat = np.ravel_multi_index((first_k, below, label), shape)
        cells = np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape)
        cells = cells.cumsum(axis=0)  # a larger K keeps what a smaller one does
        cells = cells[:, ::-1].cumsum(axis=1)[:, ::-1]  # as does a lower score
        return cells[:-1, 1:]


def match_true_positives(
    boxes: Tensor, labels: Tensor, objects: Tensor, object_labels: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Which boxes match an object of their class at IoU ≥ 0.5, the first ones choosing first.

    Args:
        boxes: (N, 4) corners, most confident first.
        labels: (N,).
        objects: (M, 4) corners.
        object_labels: (M,).

    Returns:
        (N,) which boxes are true positives, (M,) which objects are found.
    """
    ious = _class_ious(boxes, labels, objects, object_labels)
    return _match_greedily(ious, np.ones(len(boxes), dtype=bool))


def _class_ious(
    boxes: Tensor, labels: Tensor, objects: Tensor, object_labels: Tensor
) -> np.ndarray:
    """IoUs of boxes with objects, zero where their classes differ, (N, M)."""
    ious = box_iou(boxes, objects)[0].cpu().numpy()
    ious[labels.cpu().numpy()[:, None] != object_labels.cpu().numpy()] = 0.0
    return ious


def _match_greedily(ious: np.ndarray, taking_part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of (N, M) that match a free column, in order; and the columns that are matched."""
    right, found = (np.zeros(size, dtype=bool) for size in ious.shape)
    if len(found):
        for row in np.flatnonzero(taking_part & (ious.max(axis=1) >= MATCH_IOU)):
            column = int(np.argmax(np.where(found, 0.0, ious[row])))
            if not found[column] and ious[row, column] >= MATCH_IOU:
                right[row] = found[column] = True
    return right, found
