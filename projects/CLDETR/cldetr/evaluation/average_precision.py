"""COCO's average precision over arrays: one matching, from which any group of classes is read.

The rules are COCO's (Lin et al. 2014) as pycocotools implements them, and the numbers are the same
to the last bit, for every class, size and IoU threshold. Only the computation differs: all images,
classes, sizes and thresholds are matched together in NumPy instead of in Python loops.

Shape shorthand: I images, N objects, D detections, C candidates (a detection and an object of its
class with enough overlap), K classes, A = 4 area ranges, T = 10 IoU thresholds, R = 101 recalls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cldetr.data.coco import CocoData
from cldetr.data.views import View

# The metrics of all tables, files and pages: what each averages of a precision table (T, R, K, A).
METRICS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "AP": lambda precision: precision[..., 0],
    "AP50": lambda precision: precision[0, ..., 0],
    "AP75": lambda precision: precision[5, ..., 0],
    "APs": lambda precision: precision[..., 1],
    "APm": lambda precision: precision[..., 2],
    "APl": lambda precision: precision[..., 3],
}
Labels = Sequence[int] | np.ndarray
Scores = dict[str, float | None]  # metric → percent; None where there is no object to find

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
# In pixels of area, both ends included: all, small, medium, large.
AREA_RANGES = np.array([[0, 1e10], [0, 32**2], [32**2, 96**2], [96**2, 1e10]], dtype=np.float64)
MAX_DETECTIONS = 100  # per image and class, the best scored

# Pairs whose overlap is computed at a time: bounds the memory on images crowded with objects.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Source:
    """A data set that is judged by, and the labels annotated in it."""

    name: str
    labels: frozenset[int]


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """The objects that detections are judged by.

    A crowd region takes any number of detections without counting for or against them, and the
    size of an object is the annotation's `area` (of the segmentation, in COCO's files).
    """

    sources: tuple[Source, ...]
    image_sources: np.ndarray  # (I,) int64, index of each image's data set in sources
    image_ids: np.ndarray  # (I,) int64, ascending in a source
    images: np.ndarray  # (N,) int64, index of each object's image in image_ids
    labels: np.ndarray  # (N,) int64
    boxes: np.ndarray  # (N, 4) float64, x y w h in pixels
    areas: np.ndarray  # (N,) float64
    crowd: np.ndarray  # (N,) bool

    @classmethod
    def from_coco(cls, data: CocoData, label_of: Labels, source: str | None = None) -> GroundTruth:
        """Takes the objects of an annotation file, under the labels of a scenario.

        Args:
            data: The annotation file.
            label_of: The scenario's label of each category of `data`, in the order of its
                categories; −1 drops that category.
            source: What the loader's entries call the data set; `data.name` by default.
        """
        label_of = np.asarray(label_of, dtype=np.int64)
        if label_of.shape != (len(data.categories),):
            raise ValueError(
                f"label_of has shape {label_of.shape}; {data.name} has {len(data.categories)} "
                "categories and each needs one label (or −1)"
            )
        by_id = np.argsort(data.image_ids, kind="stable")
        index = np.empty_like(by_id)
        index[by_id] = np.arange(len(by_id))
        labels = label_of[data.labels]
        kept = labels >= 0
        known = frozenset(label_of[label_of >= 0].tolist())
        return cls(
            sources=(Source(data.name if source is None else source, known),),
            image_sources=np.zeros(len(by_id), dtype=np.int64),
            image_ids=data.image_ids[by_id],
            images=np.repeat(index, np.diff(data.starts))[kept],
            labels=labels[kept],
            boxes=data.boxes[kept],
            areas=data.areas[kept],
            crowd=data.crowd[kept],
        )

    @classmethod
    def from_view(cls, view: View) -> GroundTruth:
        """Takes the objects of whole data sets that a view shows, of all of them together."""
        return cls.join([cls.from_coco(*each) for each in view.datasets()])

    @classmethod
    def join(cls, truths: Sequence[GroundTruth]) -> GroundTruth:
        """Joins data sets, to evaluate on all of them as one.

        Detections of labels that a data set does not annotate count neither for nor against on its
        images. Image ids of different data sets may be the same.
        """
        sources = tuple(source for truth in truths for source in truth.sources)
        if len({source.name for source in sources}) < len(sources):
            raise ValueError(f"data sets of the same name: {[source.name for source in sources]}")
        sources_before = np.cumsum([0, *(len(truth.sources) for truth in truths)])
        images_before = np.cumsum([0, *(len(truth.image_ids) for truth in truths)])
        together = list(zip(truths, sources_before, images_before, strict=False))
        return cls(
            sources=sources,
            image_sources=np.concatenate([t.image_sources + before for t, before, _ in together]),
            image_ids=np.concatenate([truth.image_ids for truth in truths]),
            images=np.concatenate([t.images + before for t, _, before in together]),
            labels=np.concatenate([truth.labels for truth in truths]),
            boxes=np.concatenate([truth.boxes for truth in truths]),
            areas=np.concatenate([truth.areas for truth in truths]),
            crowd=np.concatenate([truth.crowd for truth in truths]),
        )

    def take(self, rows: np.ndarray) -> GroundTruth:
        """Takes the objects given, of the same images."""
        fields = ("images", "labels", "boxes", "areas", "crowd")
        return replace(self, **{name: getattr(self, name)[rows] for name in fields})

    def judges(self, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Mask of detections whose label is annotated in their image's data set, (D,) bool."""
        marked = np.zeros(len(labels), dtype=bool)
        for index, source in enumerate(self.sources):
            here = self.image_sources[images] == index
            marked |= here & np.isin(labels, list(source.labels))
        return marked

    def images_with(self, labels: Labels) -> np.ndarray:
        """Mask of images with at least one object (a crowd too) of `labels`, (I,) bool."""
        marked = np.zeros(len(self.image_ids), dtype=bool)
        marked[self.images[np.isin(self.labels, labels)]] = True
        return marked


@dataclass(frozen=True)
class Detections:
    """What a detector found. Of equal scores in one image, the earlier row ranks higher."""

    images: np.ndarray  # (D,) int64, index of the image in GroundTruth.image_ids
    labels: np.ndarray  # (D,) int64
    boxes: np.ndarray  # (D, 4) float64, x y w h in pixels
    scores: np.ndarray  # (D,) float64

    def take(self, rows: np.ndarray) -> Detections:
        """Takes the rows given, in the order given."""
        return Detections(self.images[rows], self.labels[rows], self.boxes[rows], self.scores[rows])


@dataclass(frozen=True)
class Matching:
    """How every detection fared, for every area range and threshold at once.

    A detection that is neither hit nor miss is not counted: it took a crowd region or an object
    outside the area range, or it took nothing and lies outside the range itself.
    """

    truth: GroundTruth
    detections: Detections  # sorted by label, then image, then score
    hits: np.ndarray  # (D, A, T) bool
    misses: np.ndarray  # (D, A, T) bool
    ignored: np.ndarray  # (N, A) bool, objects not to be found in an area range

    def precision(self, labels: Labels, images: np.ndarray | None = None) -> np.ndarray:
        """Interpolates the precision at each recall: (T, R, K, A), −1 for lack of an object.

        Args:
            labels: The K classes.
            images: (I,) bool, the images that count; all by default.
        """
        table = np.full((len(IOU_THRESHOLDS), len(RECALLS), len(labels), len(AREA_RANGES)), -1.0)
        for k, label in enumerate(labels):
            objects = self.truth.labels == label
            first, last = np.searchsorted(self.detections.labels, [label, label + 1])
            rows = np.arange(first, last)
            if images is not None:
                objects &= images[self.truth.images]
                rows = rows[images[self.detections.images[rows]]]
            # Stable, so that equal scores stand in the order of images, as pycocotools has it.
            rows = rows[np.argsort(-self.detections.scores[rows], kind="stable")]
            to_find = np.count_nonzero(~self.ignored[objects], axis=0)  # (A,)
            table[:, :, k, :] = _precision_at_recalls(self.hits[rows], self.misses[rows], to_find)
        return table


def summarise_precision(precision: np.ndarray) -> Scores:
    """Averages a (T, R, K, A) table over its classes, in percent."""
    scores: Scores = {}
    for metric, select in METRICS.items():
        defined = select(precision)
        defined = defined[defined > -1]
        scores[metric] = float(np.mean(defined) * 100) if defined.size else None
    return scores


def mean_scores(several: Sequence[Scores]) -> Scores:
    """Averages each metric, COCO's or another, over the scores that have a value of it."""
    means: Scores = {}
    for metric in several[0]:
        known = [value for scores in several if (value := scores[metric]) is not None]
        means[metric] = sum(known) / len(known) if known else None
    return means


def match(truth: GroundTruth, detections: Detections) -> Matching:
    """Matches detections with objects of their image and class, greedily from the best scored.

    A detection takes the object of greatest overlap, at least the threshold, that no better scored
    one has taken; objects of the area range come before others, and of equal overlaps the last in
    the file wins. A crowd region is never used up.
    """
    detections = detections.take(np.flatnonzero(truth.judges(detections.images, detections.labels)))
    pairs = detections.labels * len(truth.image_ids) + detections.images
    order = np.lexsort((-detections.scores, pairs))
    order = order[_rank_in_run(pairs[order]) < MAX_DETECTIONS]
    detections, pairs = detections.take(order), pairs[order]

    low, high = AREA_RANGES.T
    ignored = truth.crowd[:, None] | (truth.areas[:, None] < low) | (truth.areas[:, None] > high)
    areas = detections.boxes[:, 2] * detections.boxes[:, 3]
    outside = (areas[:, None] < low) | (areas[:, None] > high)  # (D, A)
    shape = (len(AREA_RANGES), len(IOU_THRESHOLDS))
    hits = np.zeros((len(order), *shape), dtype=bool)
    misses = np.broadcast_to(~outside[:, :, None], hits.shape).copy()
    taken = np.zeros((len(truth.labels), *shape), dtype=bool)

    for found, objects, overlaps in _rounds(truth, detections, pairs):
        # A detection's candidates stand in ascending order of preference: the last one that can be
        # taken wins, those of the area range before all others.
        free = ~taken[objects] | truth.crowd[objects, None, None]
        possible = free & (overlaps[:, None, None] >= IOU_THRESHOLDS)  # (C, A, T)
        rank = np.arange(1, len(found) + 1)[:, None] + len(found) * ~ignored[objects]  # (C, A)
        starts = _run_starts(found)
        best = np.maximum.reduceat(possible * rank[:, :, None], starts, axis=0)
        row, area, threshold = np.nonzero(best)
        winner = (best[row, area, threshold] - 1) % len(found)
        taken[objects[winner], area, threshold] = True
        hits[found[winner], area, threshold] = ~ignored[objects[winner], area]
        misses[found[winner], area, threshold] = False
    return Matching(truth, detections, hits, misses, ignored)


def match_any_class(truth: GroundTruth, detections: Detections) -> np.ndarray:
    """Matches detections with objects of their image, whatever their classes.

    One to one, greedily from the best scored: a detection takes the object of greatest overlap, at
    least the lowest IoU threshold, that no better scored one has taken. Crowd regions are not
    matched.

    Returns:
        (D,) int64, the index of each detection's object in `truth`; −1 where it has none.
    """
    kept = np.flatnonzero(~truth.crowd)
    one_class = replace(truth.take(kept), labels=np.zeros_like(kept))
    order = np.lexsort((-detections.scores, detections.images))
    ordered = replace(detections.take(order), labels=np.zeros_like(order))
    taken = np.zeros(len(kept), dtype=bool)
    matched = np.full(len(order), -1)
    for found, objects, _ in _rounds(one_class, ordered, pairs=ordered.images):
        # The last of a detection's candidates that is free has the greatest overlap.
        rank = ~taken[objects] * np.arange(1, len(found) + 1)
        best = np.maximum.reduceat(rank, _run_starts(found))
        winner = best[best > 0] - 1
        taken[objects[winner]] = True
        matched[order[found[winner]]] = kept[objects[winner]]
    return matched


def in_crowd(truth: GroundTruth, detections: Detections) -> np.ndarray:
    """Mask of detections that lie in a crowd region of their class, (D,) bool."""
    inside = np.zeros(len(detections.scores), dtype=bool)
    inside[find_candidates(truth.take(np.flatnonzero(truth.crowd)), detections)[0]] = True
    return inside


def _rounds(
    truth: GroundTruth, detections: Detections, pairs: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the candidates (detection, object, overlap) of one round after the other, each (C,).

    The detections of one pair (image and class) choose in turn: the nth of each pair in round n,
    all pairs together. Those that overlap no object enough take no turn. The candidates of a
    detection stand together, by ascending overlap and then by their order in the file.
    """
    found, objects, overlaps = find_candidates(truth, detections)
    choosing, which = np.unique(found, return_inverse=True)
    turns = _rank_in_run(pairs[choosing])[which]
    order = np.lexsort((objects, overlaps, found, turns))
    starts = _run_starts(turns[order])
    for rows in np.split(order, starts[1:]) if len(starts) else []:
        yield found[rows], objects[rows], overlaps[rows]


def find_candidates(
    truth: GroundTruth, detections: Detections
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the objects that each detection overlaps enough for the lowest threshold.

    Returns:
        The detection, the object and the overlap of each candidate, (C,), by ascending detection.
    """
    pairs = detections.labels * len(truth.image_ids) + detections.images
    truth_pairs = truth.labels * len(truth.image_ids) + truth.images
    by_pair = np.argsort(truth_pairs, kind="stable")
    first = np.searchsorted(truth_pairs[by_pair], pairs, side="left")
    counts = np.searchsorted(truth_pairs[by_pair], pairs, side="right") - first

    with_objects = np.flatnonzero(counts)
    chunks = _run_starts(np.cumsum(counts[with_objects]) // _CHUNK)
    kept = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    for rows in np.split(with_objects, chunks[1:]):
        found = np.repeat(rows, counts[rows])
        ends = np.cumsum(counts[rows])
        offsets = np.arange(len(found)) - np.repeat(ends - counts[rows], counts[rows])
        objects = by_pair[np.repeat(first[rows], counts[rows]) + offsets]
        overlaps = _overlap(detections.boxes[found], truth.boxes[objects], truth.crowd[objects])
        enough = overlaps >= IOU_THRESHOLDS[0]
        kept.append((found[enough], objects[enough], overlaps[enough]))
    found, objects, overlaps = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    return found, objects, overlaps


def _overlap(boxes: np.ndarray, others: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """Computes the IoU of boxes (C, 4) row by row; over the box's own area where `crowd`."""
    x, y, w, h = boxes.T
    other_x, other_y, other_w, other_h = others.T
    inner_w = np.minimum(x + w, other_x + other_w) - np.maximum(x, other_x)
    inner_h = np.minimum(y + h, other_y + other_h) - np.maximum(y, other_y)
    touching = (inner_w > 0) & (inner_h > 0)
    inner = np.where(touching, inner_w * inner_h, 0.0)
    area = w * h
    whole = np.where(crowd, area, area + other_w * other_h - inner)
    return np.divide(inner, whole, out=np.zeros_like(inner), where=touching)


def _precision_at_recalls(hits: np.ndarray, misses: np.ndarray, to_find: np.ndarray) -> np.ndarray:
    """Computes the interpolated precision (T, R, A) of one class's ranked detections.

    Args:
        hits: (D, A, T) bool, by descending score.
        misses: (D, A, T) bool.
        to_find: (A,) the objects to find in each area range; −1 is the result where there are none.
    """
    table = np.full((len(IOU_THRESHOLDS), len(RECALLS), len(AREA_RANGES)), -1.0)
    # Detections last, so that sums and maxima run over contiguous memory.
    true = np.cumsum(np.ascontiguousarray(hits.transpose(1, 2, 0)), axis=2, dtype=np.float64)
    false = np.cumsum(np.ascontiguousarray(misses.transpose(1, 2, 0)), axis=2, dtype=np.float64)
    precision = true / (false + true + np.spacing(1))
    # The best precision at this recall or any higher one.
    envelope = np.maximum.accumulate(precision[..., ::-1], axis=2)[..., ::-1]
    for a in np.flatnonzero(to_find):
        for t in range(len(IOU_THRESHOLDS)):
            index = np.searchsorted(true[a, t] / to_find[a], RECALLS, side="left")
            reached = index < true.shape[2]
            table[t, :, a] = 0.0
            table[t, reached, a] = envelope[a, t, index[reached]]
    return table


def _run_starts(values: np.ndarray) -> np.ndarray:
    """Finds where each run of equal values begins, in sorted values."""
    return np.unique(values, return_index=True)[1]


def _rank_in_run(values: np.ndarray) -> np.ndarray:
    """Numbers the members of each run of equal values from 0, in sorted values."""
    starts = _run_starts(values)
    return np.arange(len(values)) - np.repeat(starts, np.diff(starts, append=len(values)))
