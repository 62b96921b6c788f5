"""Pascal VOC's average precision at an IoU of 0.5, with its own rules of matching.

The rules are those of VOC's development kit as Detectron2's `PascalVOCDetectionEvaluator` has them.
A detection goes to the object of its class and image that it overlaps most. With an IoU above 0.5
it is a hit if that object was not found before, and a miss if it was; it is not passed on to
another object. Objects marked difficult (crowd regions, in a COCO file) are not to be found, and
detections that go to one count neither for nor against. COCO's rules differ in each of these.

Shape shorthand: I images, N objects, D detections.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cldetr.evaluation.average_precision import (
    Detections,
    GroundTruth,
    Labels,
    Scores,
    find_candidates,
)

VOC_METRICS = ("VOC07", "VOC12")  # the mean of 11 precisions, and the area under the curve
_MIN_IOU = 0.5  # an overlap must be greater
# As VOC's code counts them: 0.30000000000000004, which a recall of 3/10 does not reach.
_RECALLS = np.arange(0.0, 1.1, 0.1)


@dataclass(frozen=True)
class VocMatching:
    """How every detection fared; one that is neither hit nor miss is not counted."""

    truth: GroundTruth
    detections: Detections  # sorted by label, then by descending score
    hits: np.ndarray  # (D,) bool
    misses: np.ndarray  # (D,) bool

    def average(self, labels: Labels, images: np.ndarray | None = None) -> Scores:
        """The means over classes, in percent; None where no class has an object to find.

        Args:
            labels: The classes.
            images: (I,) bool, the images that count; all by default.
        """
        found = [self._average_precisions(int(label), images) for label in labels]
        defined = [pair for pair in found if pair is not None]
        means = np.mean(defined, axis=0) * 100 if defined else [None, None]
        return {
            metric: None if value is None else float(value)
            for metric, value in zip(VOC_METRICS, means, strict=True)
        }

    def _average_precisions(
        self, label: int, images: np.ndarray | None
    ) -> tuple[float, float] | None:
        """The 11-point and the all-point average of one class; None without an object to find."""
        objects = (self.truth.labels == label) & ~self.truth.crowd
        rows = np.arange(*np.searchsorted(self.detections.labels, [label, label + 1]))
        if images is not None:
            objects &= images[self.truth.images]
            rows = rows[images[self.detections.images[rows]]]
        to_find = np.count_nonzero(objects)
        if not to_find:
            return None
        true, false = np.cumsum(self.hits[rows]), np.cumsum(self.misses[rows])
        recall = true / to_find
        precision = true / np.maximum(true + false, 1)
        # The best precision at this recall or any higher one; 0 beyond the last.
        envelope = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
        eleven = envelope[np.searchsorted(recall, _RECALLS, side="left")].mean()
        area = np.sum(np.diff(recall, prepend=0.0) * envelope[:-1])
        return float(eleven), float(area)


def match_voc(truth: GroundTruth, detections: Detections) -> VocMatching:
    """Matches detections with objects by VOC's rules.

    Of equal scores the earlier row ranks higher, of equal overlaps the first object of the file is
    taken.
    """
    detections = detections.take(np.flatnonzero(truth.judges(detections.images, detections.labels)))
    detections = detections.take(np.lexsort((-detections.scores, detections.labels)))
    # Difficult objects overlap as others do; only COCO's crowd regions have a rule of their own.
    plain = replace(truth, crowd=np.zeros_like(truth.crowd))
    found, objects, overlaps = find_candidates(plain, detections)
    enough = overlaps > _MIN_IOU
    found, objects, overlaps = found[enough], objects[enough], overlaps[enough]
    order = np.lexsort((objects, -overlaps, found))
    claiming, first = np.unique(found[order], return_index=True)  # by descending score in a class
    claimed = objects[order][first]
    hits = np.zeros(len(detections.scores), dtype=bool)
    hits[claiming[np.unique(claimed, return_index=True)[1]]] = True
    misses = ~hits
    difficult = claiming[truth.crowd[claimed]]
    hits[difficult] = misses[difficult] = False
    return VocMatching(truth, detections, hits, misses)
