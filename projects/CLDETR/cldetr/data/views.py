"""Views: what each stage of training sees of the shared arrays, as Detectron2 data sets.

A view is a `torch` data set that builds Detectron2's dictionaries one at a time from the arrays of
its data sets. Nothing is copied per view, and because Detectron2 hands a `torch` data set through
as it is, images without annotations are never filtered out (the paper keeps them).

Every view has all categories of the scenario, so a label means the same in all of them.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from detectron2.structures import BoxMode
from torch.utils.data import Dataset

from cldetr.data.coco import CocoData, label_table
from cldetr.errors import InputError
from cldetr.files import sha256_json
from cldetr.scenario import AnnotatedSubset, Category, spelling

logger = logging.getLogger(__name__)


class View(Dataset):
    """Images with the annotations that a stage may see, as a sequence of Detectron2 dictionaries.

    Each has `file_name`, `image_id`, `height`, `width`, `annotations` (boxes XYWH_ABS, labels of
    the scenario as `category_id`, crowd regions with `iscrowd` 1), `source`, `classes`: the labels
    that are annotated in it, and `phase`: whose these are, 0 where they are of several phases.

    An image that several subsets have, as D_i and the exemplars may in the traditional protocol,
    appears once with the classes of all of them: in a copy for each, every one would teach the
    objects that another has annotated as background.
    """

    def __init__(
        self,
        categories: Sequence[Category],
        subsets: Sequence[AnnotatedSubset],
        data: Mapping[str, CocoData],
    ) -> None:
        """Binds subsets of a scenario to their data sets.

        Args:
            categories: of the scenario.
            subsets: which images, with which labels annotated; later subsets follow earlier ones,
                images that are in several come last.
            data: the data sets by source.
        """
        self.categories = tuple(categories)
        self._subsets = [
            _BoundSubset(subset, data[subset.source], self.categories)
            for subset in _merge_shared(subsets)
        ]
        self._ends = np.cumsum([len(subset.indices) for subset in self._subsets]).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[int(index)]  # negative ones and IndexError as in a list
        which = bisect_right(self._ends, index)
        subset = self._subsets[which]
        return subset.entry(index - (self._ends[which - 1] if which else 0))

    @property
    def image_ids(self) -> np.ndarray:
        """Image ids in the view's order, (I,)."""
        ids = [subset.data.image_ids[subset.indices] for subset in self._subsets]
        return np.concatenate(ids) if ids else np.empty(0, dtype=np.int64)

    def datasets(self) -> Iterator[tuple[CocoData, np.ndarray, str]]:
        """The view's data sets, the labels of their categories (−1: none) and their names."""
        for subset in self._subsets:
            yield subset.data, subset.label_of, subset.source

    def digest(self) -> str:
        """A digest of the view's images, annotation files and labels."""
        return sha256_json(
            [
                [
                    subset.source,
                    subset.data.fingerprint,
                    subset.phase,
                    subset.data.image_ids[subset.indices].tolist(),
                    subset.label_of.tolist(),
                ]
                for subset in self._subsets
            ]
        )


class _BoundSubset:
    """A subset whose image ids and labels have become indices of its data set's arrays."""

    def __init__(
        self, subset: AnnotatedSubset, data: CocoData, categories: tuple[Category, ...]
    ) -> None:
        self.data = data
        self.source, self.phase, self.classes = subset.source, subset.phase, subset.classes
        self.indices = data.indices_of(subset.image_ids).astype(np.int32)  # (I,)
        self.label_of = label_table(data, categories, subset.classes)  # (K,)

    def entry(self, index: int) -> dict[str, Any]:
        data, row = self.data, int(self.indices[index])
        rows = slice(int(data.starts[row]), int(data.starts[row + 1]))
        labels = self.label_of[data.labels[rows]]
        shown = labels >= 0
        return {
            "file_name": str(data.image_path(row)),
            "image_id": int(data.image_ids[row]),
            "height": int(data.heights[row]),
            "width": int(data.widths[row]),
            "source": self.source,
            "phase": self.phase,
            "classes": self.classes,
            "annotations": [
                {
                    "bbox": box,
                    "bbox_mode": BoxMode.XYWH_ABS,
                    "category_id": label,
                    "iscrowd": int(crowd),
                }
                for box, label, crowd in zip(
                    data.boxes[rows][shown].tolist(),
                    labels[shown].tolist(),
                    data.crowd[rows][shown].tolist(),
                    strict=True,
                )
            ],
        }


def _merge_shared(subsets: Sequence[AnnotatedSubset]) -> list[AnnotatedSubset]:
    """The subsets without the images that are in several, and then those, classes united."""
    if len(subsets) < 2:
        return list(subsets)
    members: dict[tuple[str, int], list[int]] = {}  # image → the subsets that have it
    for number, subset in enumerate(subsets):
        for image in subset.image_ids:
            members.setdefault((subset.source, image), []).append(number)
    shared: dict[tuple[int, ...], list[int]] = {}  # subsets → the images that are in all of them
    for (_, image), numbers in members.items():
        if len(numbers) > 1:
            shared.setdefault(tuple(numbers), []).append(image)
    if not shared:
        return list(subsets)
    merged = [
        replace(
            subset,
            image_ids=tuple(i for i in subset.image_ids if len(members[subset.source, i]) == 1),
        )
        for subset in subsets
    ]
    for together, images in shared.items():
        parts = [subsets[number] for number in together]
        classes = dict.fromkeys(label for part in parts for label in part.classes)
        phases = {part.phase for part in parts}
        phase = phases.pop() if len(phases) == 1 else 0
        merged.append(AnnotatedSubset(parts[0].source, tuple(images), tuple(classes), phase))
    return merged


def whole_subset(data: CocoData, source: str) -> AnnotatedSubset:
    """All images of a data set with all its categories, as its own labels."""
    classes = tuple(range(len(data.categories)))
    return AnnotatedSubset(source, tuple(data.image_ids.tolist()), classes, 0)


def evaluation_subset(
    data: CocoData, source: str, categories: Sequence[Category], ignore_unknown: bool = False
) -> AnnotatedSubset:
    """All images of a data set with all its categories, to evaluate on.

    The data set may lack categories of the scenario, whose AP is then not measured. It may not have
    others, which might be the scenario's in another spelling, unless they are to be ignored.
    """
    labels = {category.name: label for label, category in enumerate(categories)}
    names = [category.name for category in data.categories]
    unknown = [name for name in names if name not in labels]
    spellings = {spelling(name) for name in labels}
    if unknown and not (ignore_unknown and spellings.isdisjoint(map(spelling, unknown))):
        raise InputError.listing(
            f"{data.name} ({data.json_file}) has categories that the scenario has not; remove them "
            "from the evaluation file or spell them as in the training file:",
            unknown,
        )
    if unknown:
        logger.warning(
            "%s has categories that are not learnt, they are ignored: %s", data.name, unknown
        )
    if missing := labels.keys() - set(names):
        logger.warning(
            "%s lacks categories, their AP cannot be measured: %s", data.name, sorted(missing)
        )
    classes = tuple(labels[name] for name in names if name in labels)
    return AnnotatedSubset(source, tuple(data.image_ids.tolist()), classes, 0)
