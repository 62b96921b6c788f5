"""Herding (iCaRL) for detection: exemplars whose mean object feature stays near each class's mean.

iCaRL ranks the images of a class by how near they keep the running mean of the exemplars' features
to the mean of the class. An image of a detection set shows objects of several classes, so here

- the features are those of objects, L2-normalised (for example the decoder states of the queries
  matched to the ground truth);
- the classes take turns, which shares the budget evenly between them; in its turn a class adds the
  image that brings the mean over *its* objects in the exemplars nearest to its mean over the phase;
- all objects of an added image count for their classes, whichever class asked for it.

A class whose images are all taken is skipped.

Shape shorthand: N objects, D feature size, P (class, image) pairs that hold an object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ObjectFeatures:
    """One feature vector for each object of a phase."""

    features: np.ndarray  # (N, D)
    labels: np.ndarray  # (N,) index of the class in the phase's class list
    images: np.ndarray  # (N,) index of the image in the phase's image order


def choose_by_herding(
    objects: ObjectFeatures,
    num_classes: int,
    number: int,
    progress: Callable[[int], object] | None = None,
) -> np.ndarray:
    """Chooses up to `number` images among those that hold an object with a feature.

    Distances within 1e-12 are ties, which go to the first image in the phase's order.
    Memory: 8 D bytes for each (class, image) pair.

    Returns:
        Indices of the chosen images in order of choice, (R,).
    """
    pairs = _Pairs(objects, num_classes)
    chosen: list[int] = []
    while len(chosen) < number:
        before = len(chosen)
        for label in range(num_classes):
            if len(chosen) < number and (image := pairs.nearest(label)) is not None:
                pairs.take(image)
                chosen.append(image)
                if progress:
                    progress(1)
        if len(chosen) == before:
            break
    return np.array(chosen, np.int64)


class _Pairs:
    """Feature sums of every (class, image) pair, sorted by class and image, and what is taken."""

    def __init__(self, objects: ObjectFeatures, num_classes: int) -> None:
        features = np.asarray(objects.features, np.float64)
        lengths = np.linalg.norm(features, axis=1, keepdims=True)
        features = features / np.where(lengths > 0, lengths, 1)
        order = np.lexsort([objects.images, objects.labels])
        labels, images = objects.labels[order], objects.images[order]
        new = np.append(True, (np.diff(labels) != 0) | (np.diff(images) != 0))[: len(order)]
        first = np.flatnonzero(new)
        self.labels, self.images = labels[first], images[first]  # (P,)
        self.sums = np.add.reduceat(features[order], first) if len(first) else features  # (P, D)
        self.counts = np.diff(np.append(first, len(order)))  # (P,)
        self.squares = (self.sums**2).sum(1)
        self.ends = np.searchsorted(self.labels, np.arange(num_classes + 1))
        self.free = np.ones(len(first), bool)
        self.by_image = np.argsort(self.images, kind="stable")
        self.sorted_images = self.images[self.by_image]

        self.means = np.zeros((num_classes, features.shape[1]))  # over the phase
        self.towards = np.zeros(len(first))  # sums · the mean of their class
        for label in range(num_classes):
            own = self._own(label)
            if self.counts[own].size:
                self.means[label] = self.sums[own].sum(0) / self.counts[own].sum()
                self.towards[own] = self.sums[own] @ self.means[label]
        self.taken_sums = np.zeros_like(self.means)
        self.taken_counts = np.zeros(num_classes, np.int64)

    def _own(self, label: int) -> slice:
        return slice(self.ends[label], self.ends[label + 1])

    def nearest(self, label: int) -> int | None:
        """The free image that brings the mean of `label` nearest to its mean over the phase."""
        own = self._own(label)
        if not self.free[own].any():
            return None
        taken, mean = self.taken_sums[label], self.means[label]
        counts = self.taken_counts[label] + self.counts[own]
        # ‖mean − (taken + sum) / count‖², without its constant ‖mean‖²
        along = (taken @ mean + self.towards[own]) / counts
        square = (taken @ taken + 2 * self.sums[own] @ taken + self.squares[own]) / counts**2
        distance = np.where(self.free[own], square - 2 * along, np.inf)
        return int(self.images[own][np.argmax(distance <= distance.min() + 1e-12)])

    def take(self, image: int) -> None:
        """Counts all objects of `image` as taken."""
        ends = np.searchsorted(self.sorted_images, [image, image + 1])
        pairs = self.by_image[slice(*ends)]
        self.free[pairs] = False
        self.taken_sums[self.labels[pairs]] += self.sums[pairs]
        self.taken_counts[self.labels[pairs]] += self.counts[pairs]
