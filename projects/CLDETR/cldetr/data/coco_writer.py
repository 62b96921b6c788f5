"""Subsets of a data set as COCO files, for tools that know nothing of scenarios."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from cldetr.data.coco import CocoData, label_table
from cldetr.files import atomic_path
from cldetr.scenario import AnnotatedSubset, Category


def write_subset(
    path: str | os.PathLike[str],
    subset: AnnotatedSubset,
    data: CocoData,
    categories: Sequence[Category],
    listed: Sequence[int] | None = None,
) -> None:
    """Writes a subset's images, with the objects of its classes, as a COCO instances file.

    Images are in the subset's order. Boxes are as loaded; polygons are not kept. `info` says where
    the images are.

    Args:
        path: of the file.
        subset: what to write.
        data: its data set.
        categories: of the scenario, whose ids are used.
        listed: labels of the categories that the file lists, those of the subset by default. With
            the same ones in the files of all phases, their labels are the same.
    """
    shown = [categories[label] for label in sorted(listed or subset.classes)]
    indices = data.indices_of(subset.image_ids).tolist()
    label_of = label_table(data, categories, subset.classes).tolist()
    images = (
        {
            "id": int(data.image_ids[index]),
            "file_name": data.file_names[index],
            "width": int(data.widths[index]),
            "height": int(data.heights[index]),
        }
        for index in indices
    )
    annotations = (
        {
            "id": int(data.object_ids[row]),
            "image_id": int(data.image_ids[index]),
            "category_id": categories[label].id,
            "bbox": data.boxes[row].tolist(),
            "area": float(data.areas[row]),
            "iscrowd": int(data.crowd[row]),
        }
        for index in indices
        for row in range(int(data.starts[index]), int(data.starts[index + 1]))
        if (label := label_of[data.labels[row]]) >= 0
    )
    sections = {"images": images, "annotations": annotations, "categories": map(asdict, shown)}
    # Entry by entry: 860,000 dictionaries at once would take a gigabyte.
    lists = [f'"{key}": [\n{_lines(entries)}\n]' for key, entries in sections.items()]
    info = json.dumps({"image_root": os.path.abspath(data.image_root)}, ensure_ascii=False)
    lists.insert(0, f'"info": {info}')
    with atomic_path(path) as partial:
        partial.write_text(f"{{{', '.join(lists)}}}\n", encoding="utf-8")


def _lines(entries: Iterable[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(entry, ensure_ascii=False, allow_nan=False) for entry in entries)
