"""Exemplar selection: which images of a phase are kept for the phases that follow (Sec. 3.4).

A strategy is a function `(counts, budget, context) -> Selection` in `STRATEGIES`, under its name in
a config, with what it needs declared. To add one, write the function, enter it, and test it.

All strategies but `released` fill the budget while there are images: first with images that hold a
label of the phase, and only then, in the phase's order, with those that hold none.

The counts of a phase are a sparse int64 matrix, (I, C): row i is an image, in the phase's order,
column c a class, in the phase's class list. It has no stored zeros, and an image without objects
has an empty row. Shape shorthand: I images, C classes of the phase, R choices.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from cldetr.data.greedy_kl import Objective, choose_greedily
from cldetr.data.herding import ObjectFeatures, choose_by_herding
from cldetr.errors import InputError
from cldetr.scenario import Scenario


@dataclass(frozen=True)
class Selection:
    """The chosen images, by index in the phase's image order, in order of choice."""

    indices: np.ndarray  # (R,) int64
    kl: np.ndarray  # (R,) KL(p_D ‖ p_E) after each choice; inf while a class is missing
    budget: int  # how many images were asked for
    note: str  # for a reader of the memory

    @property
    def shortfall(self) -> int:
        """How many images fewer than asked for."""
        return self.budget - len(self.indices)


@dataclass(frozen=True)
class Context:
    """What some strategies need besides the counts."""

    seed: int = 0  # of the strategies that draw
    features: ObjectFeatures | None = None  # herding
    progress: Callable[[int], object] | None = None  # called with the number of new choices


DEFAULT = Context()


def resolve_budget(budget: float, num_images: int) -> int:
    """Turns a budget into R_i, the number of images to choose in a phase of `num_images`.

    Up to 1 it is a share of the phase's own images, R_i = round(budget · |D_i|), at least one;
    above 1 it is a number of images.
    """
    if isinstance(budget, numbers.Real) and not isinstance(budget, bool):
        if 0 < budget <= 1:
            return max(1, math.floor(float(budget) * num_images + 0.5))
        if budget > 1 and budget % 1 == 0:
            return int(budget)
    raise InputError(
        f"exemplar budget {budget!r}: give a share of the phase's images, above 0 and up to 1 (0.1 "
        "keeps 10%), or a whole number of images"
    )


def phase_budget(budget: float, scenario: Scenario) -> float:
    """The budget of each phase where `budget` is a share of the whole data set, as in the paper.

    With the same share in each phase, E_1:i is that share of the data seen after any phase i. In
    the traditional protocol phases share images, so that Σ|D_i| is more than |D|: there the share
    is scaled by |D| / Σ|D_i|. A share of 1 keeps all images; numbers of images stay as they are.
    """
    if not 0 < budget < 1:
        return budget
    images = [(phase.source, image) for phase in scenario.phases for image in phase.image_ids]
    return budget * (len(set(images)) / len(images))


def find_strategy(name: str) -> Strategy:
    """The strategy that a config calls `name`."""
    if name not in STRATEGIES:
        raise InputError(
            f"exemplar strategy {name!r} is unknown; choose one of: {', '.join(STRATEGIES)}"
        )
    return STRATEGIES[name]


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


def kl_curve(counts: csr_array, chosen: np.ndarray) -> np.ndarray:
    """Computes KL(p_D ‖ p_E) after each choice, (R,), for images chosen in that order."""
    data = counts.sum(axis=0)
    held = np.zeros_like(data)
    curve = np.empty(len(chosen))
    for start in range(0, len(chosen), 1024):  # (1024, C) at a time: C may be a thousand
        running = held + counts[chosen[start : start + 1024]].toarray().cumsum(0)
        curve[start : start + len(running)] = kl_divergence(data, running)
        held = running[-1]
    return curve


def select_kl(counts: csr_array, budget: float, context: Context = DEFAULT) -> Selection:
    """The paper's strategy (Algorithm 2, Eq. 6): see `greedy_kl` for the rules."""
    number = resolve_budget(budget, counts.shape[0])
    chosen = choose_greedily(Objective.classes(counts), number, context.progress)
    return _finish(counts, chosen, number, "Eq. 6, exact greedy")


def select_kl_and_instances(
    counts: csr_array, budget: float, context: Context = DEFAULT
) -> Selection:
    """Beyond the paper: matches the classes and the number of objects per image together.

    Eq. 6 alone prefers images with few objects, which steer the distribution most finely; the
    exemplars then look unlike the data. See `Objective.classes_and_instances`.
    """
    number = resolve_budget(budget, counts.shape[0])
    chosen = choose_greedily(Objective.classes_and_instances(counts), number, context.progress)
    note = "Eq. 6 plus the same divergence of objects per image"
    return _finish(counts, chosen, number, note)


def select_random(counts: csr_array, budget: float, context: Context = DEFAULT) -> Selection:
    """Draws images uniformly, among those with a label of the phase."""
    number = resolve_budget(budget, counts.shape[0])
    labelled = np.flatnonzero(np.diff(counts.indptr))
    drawn = np.random.default_rng(context.seed).permutation(labelled)
    return _finish(counts, drawn, number, "uniform")


def select_balanced(counts: csr_array, budget: float, context: Context = DEFAULT) -> Selection:
    """Conventional replay: the same number of images for every class.

    The classes take turns, in the order of the phase's class list; in its turn a class draws one
    image at random among those that show it and are not yet chosen. A class that has none left
    passes, so its share goes to the others. An image counts for the class that drew it, whatever
    else it shows: with several classes to an image, equal counts of objects cannot be had.
    """
    number = resolve_budget(budget, counts.shape[0])
    rng = np.random.default_rng(context.seed)
    by_class = counts.tocsc()
    urns = [
        rng.permutation(by_class.indices[start:end]).tolist()
        for start, end in zip(by_class.indptr[:-1], by_class.indptr[1:], strict=True)
    ]
    chosen: list[int] = []
    taken = np.zeros(counts.shape[0], bool)
    while len(chosen) < number and any(urns):
        for urn in urns:
            while urn and taken[urn[-1]]:
                urn.pop()
            if urn:
                chosen.append(urn.pop())
                taken[chosen[-1]] = True
    return _finish(counts, np.array(chosen, np.int64), number, "classes take turns, at random")


def select_herding(counts: csr_array, budget: float, context: Context = DEFAULT) -> Selection:
    """Herding as in iCaRL, on the detector's object features: see `herding` for the rules."""
    if context.features is None:
        raise InputError(
            "exemplar strategy 'herding' needs features of a trained detector, which a training "
            "run has and this command has not; choose another strategy here"
        )
    number = resolve_budget(budget, counts.shape[0])
    chosen = choose_by_herding(context.features, counts.shape[1], number, context.progress)
    return _finish(counts, chosen, number, "nearest running mean of object features, in turns")


def select_adaptive(counts: csr_array, budget: float, context: Context = DEFAULT) -> Selection:
    """Adaptive sampling (Liu et al. 2020): our reading, since the algorithm is not published.

    Their summary asks for diverse and informative samples of the whole data set, and the paper
    counts the method among those that balance categories. Read here as: the worth of a class
    adapts to what is held, 1 / (1 + exemplar images that show it), and each step adds the image
    whose classes are worth most together. Worths within 1e-9 are ties, which go to the first
    image. Deterministic; images with many rare classes come first.
    """
    number = resolve_budget(budget, counts.shape[0])
    by_class = counts.tocsc()
    shown = np.zeros(counts.shape[1], np.int64)  # exemplar images that show each class
    worth = np.diff(counts.indptr).astype(float)  # (I,) every class is worth 1 at first
    available = int(np.count_nonzero(worth))
    worth[worth == 0] = -np.inf
    chosen = np.empty(min(number, available), np.int64)
    for step in range(len(chosen)):
        image = chosen[step] = np.argmax(worth >= worth.max() - 1e-9)
        worth[image] = -np.inf
        for label in counts.indices[counts.indptr[image] : counts.indptr[image + 1]]:
            others = by_class.indices[by_class.indptr[label] : by_class.indptr[label + 1]]
            worth[others] -= 1 / (1 + shown[label]) - 1 / (2 + shown[label])
            shown[label] += 1
        if context.progress:
            context.progress(1)
    return _finish(counts, chosen, number, "our interpretation: classes rare so far first")


def select_released(counts: csr_array, budget: float, context: Context = DEFAULT) -> Selection:
    """What the authors' released code does instead of Eq. 6.

    It takes the first images of the phase's order (shuffled when the phases were made), then drops
    those without a label of the phase: fewer than the budget remain.
    """
    number = resolve_budget(budget, counts.shape[0])
    if budget <= 1:
        number = int(budget * counts.shape[0])  # that code rounds down
    first = np.arange(min(number, counts.shape[0]))
    kept = first[np.diff(counts.indptr)[first] > 0]
    note = f"first {len(first)} images, {len(first) - len(kept)} without a label dropped"
    return Selection(kept, kl_curve(counts, kept), number, note)


@dataclass(frozen=True)
class Strategy:
    """A way to choose exemplars and what it needs besides the counts."""

    choose: Callable[[csr_array, float, Context], Selection]
    needs_features: bool = False  # object features of the detector trained in the phase


STRATEGIES = {
    "kl": Strategy(select_kl),
    "kl+instances": Strategy(select_kl_and_instances),
    "random": Strategy(select_random),
    "balanced": Strategy(select_balanced),
    "herding": Strategy(select_herding, needs_features=True),
    "adaptive": Strategy(select_adaptive),
    "released": Strategy(select_released),
}


def _finish(counts: csr_array, chosen: np.ndarray, number: int, note: str) -> Selection:
    """Cuts `chosen` to `number`, or fills it up, labelled images first, in the phase's order."""
    chosen = chosen[:number]
    free = np.ones(counts.shape[0], bool)
    free[chosen] = False
    rest = np.flatnonzero(free)
    rest = rest[np.argsort(np.diff(counts.indptr)[rest] == 0, kind="stable")]
    indices = np.concatenate([chosen, rest[: number - len(chosen)]])
    empty = int((np.diff(counts.indptr)[indices] == 0).sum())
    if empty:
        note += f"; {empty} of the images have no label of the phase, because no others are left"
    return Selection(indices, kl_curve(counts, indices), number, note)
