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

Three things make it fast: images with the same counts are one candidate; the score relative to the
current state, Σ_c p_D(c) log1p(k_c / E_c) − log1p(n / T), changes in its first term only for
candidates that share a class with the last choice; and candidates are sorted by n, so that the
second term is subtracted once per n and not once per candidate.

Shape shorthand: I images, C classes, G candidates, S distinct sizes n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import lru_cache

import numpy as np

from cldetr.data.counts import ClassCounts

_DIGITS = Context(prec=60)
_EQUAL = Decimal("1e-30")  # relative to the scale: far below any difference met, far above rounding
_UNIT = 2.0**-53  # the relative rounding error of one float64 operation
_REFRESH = 1024  # updates of the gains between two fresh sums, so that rounding cannot pile up


@dataclass(frozen=True)
class Objective:
    """What the greedy choice maximises: Σ_c w_c log(E_c + k_c) − log(T + n).

    The weights are integers over a common scale, so that scores can be compared exactly.
    """

    counts: ClassCounts  # k, one column per term
    weights: np.ndarray  # (C,) int64; w_c = weights[c] / scale
    sizes: np.ndarray  # (I,) int64; n: 0 for images without a label, else a function of the counts
    scale: int

    @classmethod
    def classes(cls, counts: ClassCounts) -> Objective:
        """Eq. 6: match the classes of the phase's objects."""
        totals = counts.class_totals()
        return cls(counts, totals, counts.instances(), int(totals.sum()))

    @classmethod
    def classes_and_instances(cls, counts: ClassCounts) -> Objective:
        """Beyond the paper: match also how many objects an image holds.

        The objective is KL(p_D ‖ p_E) + KL(h_D ‖ h_E), with h the share of images in each bin of
        `instance_bins`: the divergence between the joint distributions of a random object's class
        and, independently, a random image's number of objects. An image adds one to its bin; the
        bins are further columns. Their own − log(R + 1) is the same for every candidate.
        """
        instances = counts.instances()
        labelled = np.flatnonzero(instances)
        bins = np.full(counts.num_images, -1)
        bins[labelled] = instance_bins(instances[labelled])
        totals = counts.class_totals()
        in_bins = np.bincount(bins[labelled], minlength=1)
        objects, images = int(totals.sum()), len(labelled)
        ends = counts.indptr[labelled + 1]
        indptr = counts.indptr + np.concatenate([[0], np.cumsum(bins >= 0)])
        columns = ClassCounts(
            indptr,
            np.insert(counts.labels, ends, counts.num_classes + bins[labelled]),
            np.insert(counts.counts, ends, 1),
            counts.num_classes + len(in_bins),
        )
        weights = np.concatenate([totals * images, in_bins * objects])
        return cls(columns, weights, instances, objects * images)


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
        self.left = np.array([len(queue) for queue in self.queues], np.int64)  # (G,) images
        self.distinct_sizes, starts = np.unique(self.sizes, return_index=True)  # (S,)
        self.size_starts = np.append(starts, len(self.left))
        self.held = np.zeros(objective.counts.num_classes, np.int64)  # E
        self.total = 0  # T
        self.gain = np.full(len(self.left), -np.inf)  # (G,) Σ_c w_c log1p(k_c / E_c)
        self.max_gain = np.inf  # when the gains were last summed
        self.updates = _REFRESH  # of the gains since then
        self.columns = _Columns(self.rows)

    def take_best(self) -> int:
        """Takes the best next image and returns its index."""
        uncovered = (self.held == 0) & (self.shares > 0)
        if uncovered.any():
            shortlist = self._shortlist_covering(uncovered)
        else:
            if self.updates >= _REFRESH:
                self._sum_gains()
            shortlist = self._shortlist()
        best = int(shortlist[0]) if len(shortlist) == 1 else self._settle(shortlist)
        self._hold(best)
        return self.queues[best].pop()

    def _shortlist_covering(self, uncovered: np.ndarray) -> np.ndarray:
        """Candidates that may be best while some class has no exemplar: at most C times."""
        starts, columns = self.rows.indptr[:-1], self.rows.labels
        newly = np.add.reduceat(np.where(uncovered, self.shares, 0)[columns], starts)
        newly[self.left == 0] = -1
        held = np.maximum(self.held, 1)  # log E_c is the same for all candidates, and so is log 1
        logs = np.log((self.held[columns] + self.rows.counts) / held[columns])
        sums = np.add.reduceat(self.weights[columns] * logs, starts)
        scores = np.where(newly == newly.max(), sums - np.log(self.total + self.sizes), -np.inf)
        top = scores.max()
        return np.flatnonzero(scores >= top - 1e-11 * (1 + abs(top)))

    def _sum_gains(self) -> None:
        columns = self.rows.labels
        terms = self.weights[columns] * np.log1p(self.rows.counts / self.held[columns])
        sums = np.add.reduceat(terms, self.rows.indptr[:-1])
        self.gain[:] = np.where(self.left > 0, sums, -np.inf)
        self.max_gain = self.gain.max()
        self.updates = 0

    def _shortlist(self) -> np.ndarray:
        """Candidates that may be best once every class is covered."""
        penalty = np.log1p(self.distinct_sizes / self.total)
        best = np.maximum.reduceat(self.gain, self.size_starts[:-1]) - penalty
        # Gains fall while E grows, so the highest at the last fresh sum bounds every rounding
        # since: one per term of that sum, and less than ten per update.
        roundings = len(self.held) + 8 + 10 * self.updates
        bound = best.max() - 2 * _UNIT * (roundings * self.max_gain + 4 * penalty[-1])
        return np.concatenate(
            [
                start + np.flatnonzero(self.gain[start:end] - penalty[size] >= bound)
                for size in np.flatnonzero(best >= bound)
                for start, end in [self.size_starts[size : size + 2]]
            ]
        )

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
        """Adds an image of `candidate` to what is held, and updates the gains."""
        self.left[candidate] -= 1
        if self.left[candidate] == 0:
            self.gain[candidate] = -np.inf
        self.total += int(self.sizes[candidate])
        for column, count in self._row(candidate):
            before = self.held[column]
            self.held[column] += count
            if self.updates < _REFRESH:  # else the gains are about to be summed anew
                self.columns.update(
                    self.gain, column, self.weights[column], before, self.held[column]
                )
            self.updates += 1

    def _row(self, candidate: int) -> list[tuple[int, int]]:
        """Columns and counts of one candidate."""
        row = slice(self.rows.indptr[candidate], self.rows.indptr[candidate + 1])
        columns, counts = self.rows.labels[row].tolist(), self.rows.counts[row].tolist()
        return list(zip(columns, counts, strict=True))


class _Columns:
    """The transpose of the candidates' counts: who holds each column, and how many."""

    def __init__(self, rows: ClassCounts) -> None:
        by_column = rows.transpose()
        self.starts, self.candidates = by_column.indptr, by_column.labels
        self.counts = by_column.counts
        self.numbers: list[np.ndarray] = []  # 0 … the highest count of each column
        # A column that many candidates hold (COCO's person) is faster as a count for each of them.
        self.dense: dict[int, np.ndarray] = {}
        self.buffer = np.empty(rows.num_images)
        for column in range(rows.num_classes):
            of_column = slice(*self.starts[column : column + 2])
            counts = self.counts[of_column]
            self.numbers.append(np.arange(counts.max(initial=0) + 1.0))
            if len(counts) > rows.num_images // 4:
                self.dense[column] = np.zeros(rows.num_images, np.int64)
                self.dense[column][self.candidates[of_column]] = counts

    def update(self, gain: np.ndarray, column: int, weight: float, before: int, after: int) -> None:
        """Changes the gains (G,) for E_column going from `before` to `after`, in place."""
        numbers = self.numbers[column]
        change = weight * (np.log1p(numbers / after) - np.log1p(numbers / before))
        if column in self.dense:
            gain += change.take(self.dense[column], out=self.buffer, mode="clip")
        else:
            of_column = slice(*self.starts[column : column + 2])
            gain[self.candidates[of_column]] += change[self.counts[of_column]]


@lru_cache(maxsize=1 << 16)
def _log(number: int) -> Decimal:
    return _DIGITS.ln(Decimal(number))


def _group(objective: Objective) -> tuple[ClassCounts, np.ndarray, list[list[int]]]:
    """Groups labelled images with the same counts into candidates, sorted by size.

    Returns:
        The candidates' counts (G rows), their sizes (G,), and the indices of each one's images,
        descending, so that the last is the next to take.
    """
    counts = objective.counts
    pairs = np.stack([counts.labels, counts.counts], 1).tobytes()
    ends = (counts.indptr * 16).tolist()  # a pair is two int64
    groups: dict[bytes, list[int]] = {}
    for image in np.flatnonzero(objective.sizes)[::-1].tolist():
        groups.setdefault(pairs[ends[image] : ends[image + 1]], []).append(image)
    queues = list(groups.values())
    first = np.array([queue[-1] for queue in queues], np.int64)
    order = np.lexsort([first, objective.sizes[first]])
    first = first[order]
    return counts.take(first), objective.sizes[first], [queues[group] for group in order]
