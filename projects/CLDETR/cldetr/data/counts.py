"""Class counts per image: all that the paper's exemplar strategies need of a data set.

The counts of a phase are a sparse int64 matrix, (I, C): row i is an image, in the phase's order,
column c a class, in the phase's class list. It has no stored zeros, and an image without objects
has an empty row.

Shape shorthand: I images, C classes of the phase, R choices.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array


def count_classes(
    images: np.ndarray, labels: np.ndarray, num_images: int, num_classes: int
) -> csr_array:
    """Counts objects given by the index of their image and by their class, both (N,)."""
    ones = np.ones(len(labels), np.int64)
    return csr_array((ones, (images, labels)), shape=(num_images, num_classes))


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
