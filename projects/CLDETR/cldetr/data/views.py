"""Views: what each stage of training sees of the shared arrays, as Detectron2 data sets.

A view is a `torch` data set that builds Detectron2's dictionaries one at a time from the arrays of
its data sets. Nothing is copied per view, and because Detectron2 hands a `torch` data set through
as it is, images without annotations are never filtered out (the paper keeps them).

Every view has all categories of the scenario, so a label means the same in all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from detectron2.structures import BoxMode
from torch.utils.data import Dataset

from cldetr.data.coco import CocoData
from cldetr.data.sharing import share
from cldetr.errors import InputError
from cldetr.files import sha256_json
from cldetr.scenario import Category, Part


class View(Dataset):
    """Images with the annotations that a stage may see, as a sequence of Detectron2 dictionaries.

    Each has `file_name`, `image_id`, `height`, `width`, `annotations` (boxes XYWH_ABS, labels of
    the scenario as `category_id`, crowd regions with `iscrowd` 1), `source`, and `phase`: whose
    classes are annotated in it, 0 where those of several phases are.
    """

    def __init__(
        self,
        categories: Sequence[Category],
        parts: Sequence[Part],
        data: Mapping[str, CocoData],
        name: str = "",
    ) -> None:
        """Binds parts of a scenario to the data sets that they are of.

        Args:
            categories: of the scenario.
            parts: which images, with which labels annotated; later parts follow earlier ones.
            data: the data sets by source.
            name: what messages call the view.
        """
        self.name = name
        self.categories = tuple(categories)
        self._parts = [_BoundPart(part, data[part.source], self.categories) for part in parts]
        self._ends = np.cumsum([len(part.numbers) for part in self._parts]).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = range(len(self))[int(index)]  # negative places and IndexError as in a list
        which = bisect_right(self._ends, place)
        part = self._parts[which]
        return part.entry(place - (self._ends[which - 1] if which else 0))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            yield from map(part.entry, range(len(part.numbers)))

    @property
    def image_ids(self) -> np.ndarray:
        """Image ids in the view's order, (I,)."""
        ids = [part.data.image_ids[part.numbers] for part in self._parts]
        return np.concatenate(ids) if ids else np.empty(0, dtype=np.int64)

    @property
    def sizes(self) -> np.ndarray:
        """Width and height of each image, (I, 2), for batching by shape without opening files."""
        sizes = [
            np.stack([part.data.widths[part.numbers], part.data.heights[part.numbers]], axis=1)
            for part in self._parts
        ]
        return np.concatenate(sizes) if sizes else np.empty((0, 2), dtype=np.int32)

    def datasets(self) -> Iterator[tuple[CocoData, np.ndarray, str]]:
        """The data sets that the view is of, the labels of their categories (−1: none), names."""
        for part in self._parts:
            yield part.data, part.label_of, part.source

    def digest(self) -> str:
        """A digest of which images the view has, of which files, with whose labels."""
        return sha256_json(
            [
                [
                    part.source,
                    part.data.fingerprint,
                    part.phase,
                    part.data.image_ids[part.numbers].tolist(),
                    part.label_of.tolist(),
                ]
                for part in self._parts
            ]
        )

    def class_counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Objects per image and class as sparse rows: (I + 1,) starts, (J,) labels, (J,) counts.

        Only the classes annotated in the view, without crowd regions; labels ascend in a row.
        """
        rows = [
            counts_by_class(part.data, part.numbers, part.label_of, len(self.categories))
            for part in self._parts
        ]
        lengths = [np.diff(indptr) for indptr, _, _ in rows]
        empty = np.empty(0, dtype=np.int64)
        return (
            np.concatenate([[0], np.cumsum(np.concatenate([empty, *lengths]))]).astype(np.int64),
            np.concatenate([empty, *(labels for _, labels, _ in rows)]),
            np.concatenate([empty, *(counts for _, _, counts in rows)]),
        )


class _BoundPart:
    """A part whose image ids and labels have become places in its data set's arrays."""

    def __init__(self, part: Part, data: CocoData, categories: tuple[Category, ...]) -> None:
        self.data = data
        self.source, self.phase = part.source, part.phase
        self.numbers = data.numbers_of(part.image_ids).astype(np.int32)  # (I,)
        self.label_of = label_table(data, categories, part.classes)  # (K,)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "data": share(self.data)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "data": state["data"].open()})

    def entry(self, place: int) -> dict[str, Any]:
        data, number = self.data, int(self.numbers[place])
        rows = slice(int(data.starts[number]), int(data.starts[number + 1]))
        labels = self.label_of[data.labels[rows]]
        shown = labels >= 0
        return {
            "file_name": str(data.image_path(number)),
            "image_id": int(data.image_ids[number]),
            "height": int(data.heights[number]),
            "width": int(data.widths[number]),
            "source": self.source,
            "phase": self.phase,
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


def evaluation_part(data: CocoData, source: str, categories: Sequence[Category]) -> Part:
    """All images of a data set with all its categories, to evaluate on.

    The data set may lack categories of the scenario (it then says nothing about them), but one that
    the scenario does not know would be counted as missed for ever.
    """
    label = {category.name: place for place, category in enumerate(categories)}
    strange = [category.name for category in data.categories if category.name not in label]
    if strange:
        raise InputError.listing(
            f"{data.name} ({data.json_file}) has categories that the scenario has not; remove them "
            "from the evaluation file or spell them as in the training file:",
            strange,
        )
    classes = tuple(label[category.name] for category in data.categories)
    return Part(source, tuple(data.image_ids.tolist()), classes, 0)


def label_table(
    data: CocoData, categories: Sequence[Category], classes: Sequence[int]
) -> np.ndarray:
    """From a data set's own labels to those of the scenario, −1 where not in `classes`, (K,)."""
    wanted = {categories[label].name: label for label in classes}
    return np.array([wanted.get(own.name, -1) for own in data.categories], dtype=np.int64)


def counts_by_class(
    data: CocoData, numbers: np.ndarray, label_of: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Objects per image and class, without crowd, as sparse rows.

    Args:
        data: the data set.
        numbers: which of its images, (I,).
        label_of: label of each of its categories, −1 for those not counted, (K,).
        num_classes: how many labels there are.

    Returns:
        Row starts (I + 1,), labels (J,) ascending in a row, counts (J,), all int64.
    """
    lengths = data.starts[numbers + 1] - data.starts[numbers]
    places = np.repeat(np.arange(len(numbers)), lengths)  # (N,) the row of each object
    first = np.cumsum(lengths) - lengths
    rows = np.arange(lengths.sum()) + np.repeat(data.starts[numbers] - first, lengths)
    labels = label_of[data.labels[rows]]
    counted = (labels >= 0) & ~data.crowd[rows]
    pairs, counts = np.unique(
        places[counted] * num_classes + labels[counted], return_counts=True
    )  # (J,)
    indptr = np.searchsorted(pairs, np.arange(len(numbers) + 1) * num_classes)
    return indptr.astype(np.int64), pairs % num_classes, counts.astype(np.int64)
