"""Class counts per image: all that the paper's exemplar strategies need of a data set.

Shape shorthand: I images, C classes of the phase, J non-zero (image, class) pairs, R choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ClassCounts:
    """How many objects of each class every image of a phase holds, as sparse rows (CSR).

    Image i, an index in the phase's image order, holds `counts[j]` objects of class `labels[j]` for
    j in `indptr[i]:indptr[i + 1]`. In a row the labels ascend; counts are positive. A class is an
    index in the phase's class list, 0 … C − 1. An image without objects has an empty row.
    """

    indptr: np.ndarray  # (I + 1,) int64
    labels: np.ndarray  # (J,) int64
    counts: np.ndarray  # (J,) int64
    num_classes: int

    def __post_init__(self) -> None:
        for name in ("indptr", "labels", "counts"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), np.int64))
        rows = np.diff(self.indptr)
        if self.indptr[0] != 0 or (rows < 0).any() or self.indptr[-1] != len(self.labels):
            raise ValueError("indptr must ascend from 0 to the number of labels")
        if len(self.labels) != len(self.counts) or (self.counts < 1).any():
            raise ValueError("every label needs a count of one or more")
        if ((self.labels < 0) | (self.labels >= self.num_classes)).any():
            raise ValueError(f"labels must be in [0, {self.num_classes})")
        keys = self.rows * self.num_classes + self.labels
        if (np.diff(keys) <= 0).any():
            raise ValueError("labels must ascend within a row")

    @classmethod
    def from_objects(
        cls, images: np.ndarray, labels: np.ndarray, num_images: int, num_classes: int
    ) -> ClassCounts:
        """Counts objects given by the index of their image and by their class, both (N,)."""
        images, labels = np.asarray(images, np.int64), np.asarray(labels, np.int64)
        keys, counts = np.unique(images * num_classes + labels, return_counts=True)
        indptr = np.searchsorted(keys, np.arange(num_images + 1, dtype=np.int64) * num_classes)
        return cls(indptr, keys % num_classes, counts, num_classes)

    @property
    def num_images(self) -> int:
        """I, images without objects included."""
        return len(self.indptr) - 1

    @property
    def rows(self) -> np.ndarray:
        """The image of each non-zero pair, (J,)."""
        return np.repeat(np.arange(self.num_images), np.diff(self.indptr))

    def class_totals(self) -> np.ndarray:
        """Objects of each class in the whole phase, (C,)."""
        totals = np.zeros(self.num_classes, np.int64)
        np.add.at(totals, self.labels, self.counts)
        return totals

    def instances(self) -> np.ndarray:
        """Objects in each image, (I,)."""
        before = np.concatenate([[0], np.cumsum(self.counts)])
        return before[self.indptr[1:]] - before[self.indptr[:-1]]

    def transpose(self) -> ClassCounts:
        """One row per class, whose `labels` are the images that hold it."""
        order = np.argsort(self.labels, kind="stable")
        indptr = np.searchsorted(self.labels[order], np.arange(self.num_classes + 1))
        return ClassCounts(indptr, self.rows[order], self.counts[order], self.num_images)

    def take(self, images: np.ndarray) -> ClassCounts:
        """The rows of `images`, in that order."""
        lengths = np.diff(self.indptr)[images]
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        pairs = np.arange(indptr[-1]) + np.repeat(self.indptr[images] - indptr[:-1], lengths)
        return ClassCounts(indptr, self.labels[pairs], self.counts[pairs], self.num_classes)


def kl_divergence(data: np.ndarray, exemplars: np.ndarray) -> np.ndarray:
    """Computes KL(p_D ‖ p_E) in nats from class totals `data` (C,) and `exemplars` (..., C).

    Infinite where a class of the data has no exemplar. With x_c = p_E(c) / p_D(c) the sum is taken
    as Σ p_D(c) (x_c − 1 − log x_c): the added terms sum to zero, and no term is negative, so a
    divergence of 1e-9 keeps its digits. NaN where neither side holds an object.
    """
    present = data > 0
    wanted = data[present].astype(float)
    held = exemplars[..., present]
    total = held.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = (held * wanted.sum() - wanted * total) / (wanted * total)  # x_c − 1
        terms = wanted / wanted.sum() * (excess - np.log1p(excess))
    return np.where(total[..., 0] > 0, terms.sum(-1), np.inf if present.any() else np.nan)


def kl_curve(counts: ClassCounts, chosen: np.ndarray) -> np.ndarray:
    """Computes KL(p_D ‖ p_E) after each choice, (R,), for images chosen in that order."""
    data = counts.class_totals()
    held = np.zeros(counts.num_classes, np.int64)
    curve = np.empty(len(chosen))
    for start in range(0, len(chosen), 1024):  # (1024, C) at a time: C may be a thousand
        block = counts.take(chosen[start : start + 1024])
        gained = np.zeros((block.num_images, counts.num_classes), np.int64)
        gained[block.rows, block.labels] = block.counts
        running = held + gained.cumsum(0)
        curve[start : start + len(running)] = kl_divergence(data, running)
        held = running[-1]
    return curve
