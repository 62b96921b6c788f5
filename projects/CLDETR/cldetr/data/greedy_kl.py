"""Greedy exemplar selection by class distribution (Algorithm 2, Eq. 6): exact, seconds on COCO.

Each step adds the image e that maximises Eq. 6,

    Σ_c p_D(c) log p_{E∪e}(c) = Σ_c p_D(c) log(E_c + k_c) − log(T + n),

where E_c counts the objects of class c among the exemplars, T = Σ_c E_c, and e holds k_c objects of
class c and n in all. That is the image that minimises KL(p_D ‖ p_{E∪e}). Where the paper leaves a
choice:

*Classes not yet covered* make every sum −∞. The rule is the limit of additive smoothing, E_c + ε
with ε → 0: compare first the share p_D of the classes that stay uncovered (less is better), then
the finite part of the sum. No constant has to be chosen.

*Images without a label of the phase* do not change p_E. Taken literally, Eq. 6 prefers them as soon
as every labelled image makes the match slightly worse, and fills the memory with images that show
nothing. They are not candidates: `exemplars` adds them when no labelled image is left.

*Ties* go to the first image in the phase's order. Floating-point sums only shortlist the candidates
that rounding could confuse; 60 digits decide between those, so that the choice depends neither on
the order of summation nor on the machine.

*The divergence may rise*: Algorithm 2 adds R_i images whatever they do to it, and so do we.

Two things make it fast: images with the same counts are one candidate, and of the gain
Σ_c p_D(c) log((E_c + k_c) / E_c) only the terms of the last choice's classes are updated.

Shape shorthand: I images, C classes, G candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import lru_cache

import numpy as np
from scipy.sparse import csr_array, hstack

_DIGITS = Context(prec=60)
_EQUAL = Decimal("1e-30")  # relative to the scale: far below any difference met, far above rounding
_REFRESH = 256  # steps between two fresh sums of the gains, so that rounding cannot pile up
# Scores further apart than this, relative to 1 + |score|, are not confused by rounding: gains and
# log(T + n) stay below 50, and 256 steps are some ten thousand roundings.
_MARGIN = 1e-10


@dataclass(frozen=True)
class Objective:
    """What the greedy choice maximises: Σ_c w_c log(E_c + k_c) − log(T + n).

    The weights are integers over a common scale, so that scores can be compared exactly.
    """

    counts: csr_array  # k, one column per term
    weights: np.ndarray  # (C,) int64; w_c = weights[c] / scale
    sizes: np.ndarray  # (I,) int64; n: 0 for images without a label, else a function of the counts
    scale: int

    @classmethod
    def classes(cls, counts: csr_array) -> Objective:
        """Eq. 6: match the classes of the phase's objects."""
        totals = counts.sum(axis=0)
        return cls(counts, totals, counts.sum(axis=1), int(totals.sum()))

    @classmethod
    def classes_and_instances(cls, counts: csr_array) -> Objective:
        """Beyond the paper: match also how many objects an image holds.

        The objective is KL(p_D ‖ p_E) + KL(h_D ‖ h_E), with h the share of images in each bin of
        `instance_bins`: the divergence between the joint distributions of a random object's class
        and, independently, a random image's number of objects. An image adds one to its bin; the
        bins are further columns. Their own − log(R + 1) is the same for every candidate.
        """
        totals, instances = counts.sum(axis=0), counts.sum(axis=1)
        labelled = np.flatnonzero(instances)
        bins = instance_bins(instances[labelled])
        in_bins = np.bincount(bins, minlength=1)
        objects, images = int(totals.sum()), len(labelled)
        columns = csr_array(
            (np.ones(images, np.int64), (labelled, bins)), shape=(len(instances), len(in_bins))
        )
        weights = np.concatenate([totals * images, in_bins * objects])
        return cls(hstack([counts, columns], format="csr"), weights, instances, objects * images)


def instance_bins(instances: np.ndarray) -> np.ndarray:
    """Bins numbers of objects into 1, 2, 3, 4–5, 6–7, 8–11, 12–15, 16–23, …: two bins per doubling.

    Bins are wide where images are few, because every bin needs an exemplar.
    """
    power = np.log2(instances).astype(np.int64)
    upper_half = instances >= np.left_shift(3, np.maximum(power - 1, 0))
    return np.where(power == 0, 0, 2 * power - 1 + upper_half)


def choose_greedily(
    objective: Objective, number: int, progress: Callable[[int], object] | None = None
) -> np.ndarray:
    """Chooses labelled images one by one, each the best next one for `objective`.

    Args:
        objective: what to maximise.
        number: how many to choose; all labelled images when there are fewer.
        progress: called with 1 after each choice.

    Returns:
        Indices of the chosen images in order of choice, (R,).
    """
    chosen = np.empty(min(number, int(np.count_nonzero(objective.sizes))), np.int64)
    greedy = _Greedy(objective)
    for step in range(len(chosen)):
        chosen[step] = greedy.take_best()
        if progress:
            progress(1)
    return chosen


class _Greedy:
    """The state of a greedy choice: what is held, and what each candidate would add."""

    def __init__(self, objective: Objective) -> None:
        self.scale = objective.scale
        self.shares = objective.weights  # integers, over the scale
        self.weights = objective.weights / max(objective.scale, 1)  # w
        self.rows, self.sizes, self.queues = _group(objective)
        self.columns = self.rows.tocsc()
        self.distinct_sizes, self.which_size = np.unique(self.sizes, return_inverse=True)
        self.held = np.zeros(len(self.weights), np.int64)  # E
        self.total = 0  # T
        self.used_up = np.zeros(len(self.queues), bool)  # (G,)
        self.steps = 0

    def take_best(self) -> int:
        """Takes the best next image and returns its index."""
        if self.steps % _REFRESH == 0:
            self.gain = np.where(self.used_up, -np.inf, self._sum_gains())  # (G,)
        self.steps += 1
        scores = self.gain - np.log(self.total + self.distinct_sizes)[self.which_size]
        uncovered = np.where(self.held == 0, self.shares, 0)
        if uncovered.any():  # at most C times
            newly = np.add.reduceat(uncovered[self.rows.indices], self.rows.indptr[:-1])
            newly[self.used_up] = -1
            scores[newly < newly.max()] = -np.inf
        top = scores.max()
        shortlist = np.flatnonzero(scores >= top - _MARGIN * (1 + abs(top)))
        best = int(shortlist[0]) if len(shortlist) == 1 else self._settle(shortlist)
        self._hold(best)
        return self.queues[best].pop()

    def _sum_gains(self) -> np.ndarray:
        columns = self.rows.indices
        gains = self.weights[columns] * _log_gain(self.held[columns], self.rows.data)
        return np.add.reduceat(gains, self.rows.indptr[:-1])

    def _settle(self, shortlist: np.ndarray) -> int:
        """The best of a few candidates, exactly; of equal ones the first in the phase's order."""
        with localcontext(_DIGITS):
            scores = {candidate: self._score(candidate) for candidate in shortlist.tolist()}
            bound = max(scores.values()) - self.scale * _EQUAL
            return min(
                (candidate for candidate, score in scores.items() if score >= bound),
                key=lambda candidate: self.queues[candidate][-1],
            )

    def _score(self, candidate: int) -> Decimal:
        """The objective times its scale, relative to the current state, to 60 digits."""
        score = -self.scale * _log(self.total + int(self.sizes[candidate]))
        for column, count in self._row(candidate):
            held = int(self.held[column])
            score += int(self.shares[column]) * (_log(held + count) - _log(max(held, 1)))
        return score

    def _hold(self, candidate: int) -> None:
        """Adds the next image of `candidate` to what is held, and updates the gains."""
        if len(self.queues[candidate]) == 1:
            self.used_up[candidate] = True
            self.gain[candidate] = -np.inf
        self.total += int(self.sizes[candidate])
        for column, count in self._row(candidate):
            before, after = self.held[column], self.held[column] + count
            self.held[column] = after
            holders = slice(*self.columns.indptr[column : column + 2])
            counts = self.columns.data[holders]
            numbers = np.arange(1, counts.max() + 1)
            change = self.weights[column] * (_log_gain(after, numbers) - _log_gain(before, numbers))
            self.gain[self.columns.indices[holders]] += change[counts - 1]

    def _row(self, candidate: int) -> list[tuple[int, int]]:
        """Columns and counts of one candidate."""
        row = slice(*self.rows.indptr[candidate : candidate + 2])
        return list(zip(self.rows.indices[row].tolist(), self.rows.data[row].tolist(), strict=True))


def _log_gain(held: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """log(E + k) − log E; log k where E = 0: log 0 is the same for all that cover as much."""
    return np.log((held + counts) / np.maximum(held, 1))


@lru_cache(maxsize=1 << 16)
def _log(number: int) -> Decimal:
    return _DIGITS.ln(Decimal(number))


def _group(objective: Objective) -> tuple[csr_array, np.ndarray, list[list[int]]]:
    """Groups labelled images with the same counts into candidates, sorted by size.

    Returns:
        The candidates' counts (G rows), their sizes (G,), and the indices of each one's images,
        descending, so that the last is the next to take.
    """
    counts = objective.counts
    pairs = np.stack([counts.indices, counts.data], 1).astype(np.int64).tobytes()
    ends = (counts.indptr * 16).tolist()  # a pair is two int64
    groups: dict[bytes, list[int]] = {}
    for image in np.flatnonzero(objective.sizes)[::-1].tolist():
        groups.setdefault(pairs[ends[image] : ends[image + 1]], []).append(image)
    queues = list(groups.values())
    first = np.array([queue[-1] for queue in queues], np.int64)
    order = np.lexsort([first, objective.sizes[first]])
    first = first[order]
    return counts[first], objective.sizes[first], [queues[group] for group in order]
