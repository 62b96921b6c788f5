"""A score threshold for each class, from the teacher's scores on all images of a stage.

A class's scores fall into two groups, of false and of true detections. The threshold is the least
score of the upper one (PseDet, ICLR 2025, and RS-IOD take it over a running buffer; over all images
of the stage at once it does not depend on their order or on the number of processes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cldetr.methods.pseudo import Predictions, PseudoRule, select_per_class

MIN_SCORES = 10  # of a class, to tell two groups in them


@dataclass(frozen=True)
class ClassThresholds:
    """Thresholds by label, and the labels whose scores are too few, which have the rule's score."""

    values: dict[int, float]
    fallback: tuple[int, ...]


def split_scores(scores: np.ndarray) -> float | None:
    """The least score of the upper cluster of the best division into two (1-D 2-means, exact).

    In one dimension clusters are runs of the sorted values: all divisions are tried, by prefix
    sums. Of equally good ones the lowest is taken; None where all scores are equal.
    """
    ordered = np.sort(scores.astype(np.float64))
    if len(ordered) < 2 or ordered[0] == ordered[-1]:
        return None
    centred = ordered - ordered.mean()
    below = centred.cumsum()[:-1]  # sums of the lower clusters; the upper ones' are their negatives
    count = np.arange(1, len(ordered))
    between = below**2 / count + below**2 / (len(ordered) - count)
    between[ordered[1:] == ordered[:-1]] = -1.0  # equal scores stay together
    return float(ordered[1 + between.argmax()])


def threshold_scores(pred: Predictions, rule: PseudoRule) -> tuple[np.ndarray, np.ndarray]:
    """Scores and classes of the predictions that take part: those that reach the rule's floor."""
    ranking = select_per_class(pred, rule, 0.0)
    return tuple(x[ranking.chosen].cpu().numpy() for x in (ranking.scores, ranking.classes))  # type: ignore[return-value]


def class_thresholds(
    scores: np.ndarray, labels: np.ndarray, classes: Sequence[int], rule: PseudoRule
) -> ClassThresholds:
    """The threshold of each class.

    Args:
        scores: of all predictions that reach the rule's floor, on all images.
        labels: their classes.
        classes: labels that the teacher may give.
        rule: has the score of classes with fewer than `MIN_SCORES` predictions.
    """
    values, fallback = {}, []
    for label in sorted(classes):
        own = scores[labels == label]
        found = split_scores(own) if len(own) >= MIN_SCORES else None
        if found is None:
            fallback.append(label)
        values[label] = rule.score if found is None else found
    return ClassThresholds(values, tuple(fallback))
