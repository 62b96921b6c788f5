"""What a detector confuses: which class each object was detected as, old and new classes apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cldetr.evaluation.average_precision import (
    Detections,
    GroundTruth,
    in_crowd,
    match_any_class,
)

MIN_SCORE = 0.3


def count_confusions(
    truth: GroundTruth, detections: Detections, labels: Sequence[int], min_score: float
) -> np.ndarray:
    """Counts which class each object was detected as.

    Detections of at least `min_score` are matched one to one with objects of any class at an IoU
    of 0.5, the best scored first. A detection without an object is not counted where it lies in a
    crowd region of its class.

    Args:
        truth: The objects; those of other classes than `labels` do not count.
        detections: Of the classes `labels` alone.
        labels: The K classes, in the order of rows and columns.
        min_score: Detections below it do not count.

    Returns:
        (K + 1, K + 1) int64. Row: the true class, last the background. Column: the detected class,
        last the missed objects.
    """
    index_of = np.full(max([*labels, *truth.labels, *detections.labels]) + 1, -1)
    index_of[list(labels)] = np.arange(len(labels))
    truth = truth.take(np.flatnonzero(index_of[truth.labels] >= 0))
    counted = detections.scores >= min_score
    counted &= truth.judges(detections.images, detections.labels)
    detections = detections.take(np.flatnonzero(counted))

    matched = match_any_class(truth, detections)
    hit = matched >= 0
    background = len(labels)
    rows = np.full(len(matched), background)
    rows[hit] = index_of[truth.labels[matched[hit]]]
    columns = index_of[detections.labels]
    counts = np.zeros((len(labels) + 1, len(labels) + 1), dtype=np.int64)
    judged = hit | ~in_crowd(truth, detections)
    np.add.at(counts, (rows[judged], columns[judged]), 1)
    missed = ~truth.crowd
    missed[matched[hit]] = False
    np.add.at(counts[:, background], index_of[truth.labels[missed]], 1)
    return counts


def summarise_confusions(counts: np.ndarray, old: np.ndarray) -> dict[str, dict[str, int]]:
    """Sums a matrix of confusions over old and new classes.

    Args:
        counts: (K + 1, K + 1), as `count_confusions` returns it.
        old: (K,) bool, the classes of earlier phases.

    Returns:
        for the objects of old and of new classes: their number, how many were detected as their
        own class (`correct`), as another old or new one, and missed; for the background how many
        detections of old and new classes it got.
    """
    inner, correct = counts[:-1, :-1], np.diag(counts)[:-1]
    summary = {}
    for name, rows in (("old", old), ("new", ~old)):
        summary[name] = {
            "objects": int(counts[:-1][rows].sum()),
            "correct": int(correct[rows].sum()),
            "as_old": int(inner[rows][:, old].sum() - correct[rows & old].sum()),
            "as_new": int(inner[rows][:, ~old].sum() - correct[rows & ~old].sum()),
            "missed": int(counts[:-1, -1][rows].sum()),
        }
    false = counts[-1, :-1]
    summary["background"] = {"as_old": int(false[old].sum()), "as_new": int(false[~old].sum())}
    return summary


def total_confusions(summary: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Adds up the objects of old and new classes, whatever class they are confused with."""
    old, new = summary["old"], summary["new"]
    total = {key: old[key] + new[key] for key in ("objects", "correct", "missed")}
    total["confused"] = total["objects"] - total["correct"] - total["missed"]
    return total


def describe_confusions(summary: Mapping[str, Mapping[str, Any]], one_group: bool = False) -> str:
    """One sentence about the objects of old and new classes, or of all classes as `one_group`."""
    if one_group:
        total = total_confusions(summary)
        return (
            f"of {total['objects']} objects {total['correct']} are detected as what they are, "
            f"{total['confused']} as another class, {total['missed']} are missed"
        )
    parts = []
    for name, other in (("old", "new"), ("new", "old")):
        group = summary[name]
        if group["objects"]:
            parts.append(
                f"of {group['objects']} {name} objects {group['correct']} are detected as what "
                f"they are, {group[f'as_{other}']} as {other}, {group[f'as_{name}']} as another "
                f"{name} class, {group['missed']} are missed"
            )
    return "; ".join(parts)
