"""A phase as a COCO file of its own, for tools that know nothing of scenarios."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

import numpy as np

from cldetr.data.coco import CocoData
from cldetr.files import atomic_path
from cldetr.scenario import Category, Part


def write_part(
    path: str | os.PathLike[str], part: Part, data: CocoData, categories: Sequence[Category]
) -> None:
    """Writes a part's images, with the objects of its classes, as a COCO instances file.

    All categories of the scenario are listed, under the scenario's ids, so that labels stay the
    same in the files of all phases. Boxes are as loaded; polygons are not kept.
    """
    label = {category.name: place for place, category in enumerate(categories)}
    wanted = {categories[place].name for place in part.classes}
    category_ids = np.array(
        [categories[label[own.name]].id if own.name in wanted else -1 for own in data.categories],
        dtype=np.int64,
    )
    shown = np.array([own.name in wanted for own in data.categories], dtype=bool)
    numbers = data.numbers_of(part.image_ids).tolist()
    with atomic_path(path) as partial, partial.open("w", encoding="utf-8") as out:
        out.write('{"images": ')
        _write_list(out, (_image(data, number) for number in numbers))
        out.write(', "annotations": ')
        _write_list(out, _annotations(data, numbers, category_ids, shown))
        out.write(', "categories": ')
        _write_list(out, ({"id": own.id, "name": own.name} for own in categories))
        out.write("}\n")


def _write_list(out: TextIO, entries: Iterable[dict[str, Any]]) -> None:
    """Writes entries one at a time: 860,000 dictionaries at once would take a gigabyte."""
    separator = "[\n"
    for entry in entries:
        out.write(separator + json.dumps(entry, ensure_ascii=False, allow_nan=False))
        separator = ",\n"
    out.write("[]" if separator == "[\n" else "\n]")


def _image(data: CocoData, number: int) -> dict[str, Any]:
    return {
        "id": int(data.image_ids[number]),
        "file_name": data.file_names[number],
        "width": int(data.widths[number]),
        "height": int(data.heights[number]),
    }


def _annotations(
    data: CocoData, numbers: Sequence[int], category_ids: np.ndarray, shown: np.ndarray
) -> Iterator[dict[str, Any]]:
    for number in numbers:
        for row in range(int(data.starts[number]), int(data.starts[number + 1])):
            own = data.labels[row]
            if shown[own]:
                yield {
                    "id": int(data.object_ids[row]),
                    "image_id": int(data.image_ids[number]),
                    "category_id": int(category_ids[own]),
                    "bbox": data.boxes[row].tolist(),
                    "area": float(data.areas[row]),
                    "iscrowd": int(data.crowd[row]),
                }
