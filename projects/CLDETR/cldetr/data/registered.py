"""Data sets that a registered function returns, as the arrays that scenarios are made of."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from detectron2.structures import BoxMode

from cldetr.data.coco import CocoData, data_from_columns
from cldetr.data.parse import columns_from_sections
from cldetr.data.problems import Problems
from cldetr.errors import InputError

KINDS = {
    "no list": ("entries have annotations that are not a list", "return a list, or an empty one"),
    "bad mode": (
        "boxes have another bbox_mode than XYXY_ABS and XYWH_ABS",
        "convert them with BoxMode.convert",
    ),
    "no class": ("category_ids are no index of thing_classes", "give an index, from 0"),
}


def data_from_dicts(
    name: str,
    dicts: Sequence[Any],
    thing_classes: Sequence[str] | None,
    *,
    bad_boxes: str = "stop",
    trim: bool = True,
) -> CocoData:
    """Turns Detectron2's standard dictionaries into arrays; all problems make one error.

    Args:
        name: of the data set.
        dicts: what its function returns: `file_name`, `height`, `width`, `image_id`, and
            `annotations` with `bbox`, `bbox_mode` and `category_id`.
        thing_classes: names of its categories, from its metadata.
        bad_boxes: "stop" at boxes that make no sense, or "drop" and count them.
        trim: cut boxes to their image.
    """
    begun = time.perf_counter()
    if not thing_classes:
        raise InputError(
            f"the data set {name!r} does not name its categories: set "
            f"MetadataCatalog.get({name!r}).thing_classes"
        )
    if not dicts:
        raise InputError(f"the function registered as {name!r} returns no image: fix it")
    problems = Problems(KINDS)
    labels: list[str] = []  # of the annotations
    sections: dict[str, list[Any]] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": k, "name": str(name)} for k, name in enumerate(thing_classes, 1)],
    }
    has_id = [isinstance(entry, Mapping) and "image_id" in entry for entry in dicts]
    ids = image_ids([d["image_id"] if has else "" for d, has in zip(dicts, has_id, strict=True)])
    for index, entry in enumerate(dicts):
        if not isinstance(entry, Mapping):
            sections["images"].append(entry)
            continue
        image = {
            key: _plain(entry[key]) for key in ("width", "height", "file_name") if key in entry
        }
        image["id"] = ids[index]
        if not has_id[index]:
            problems.add("missing key", f"entry {index}: image_id")
        if isinstance(image.get("file_name"), str | os.PathLike):
            image["file_name"] = os.path.abspath(image["file_name"]).lstrip("/")
        sections["images"].append(image)
        rows = entry.get("annotations", ())
        if not isinstance(rows, Sequence):
            problems.add("no list", f"entry {index}: {rows!r}")
            continue
        for number, row in enumerate(rows):
            labels.append(f"entry {index}, annotation {number}")
            if isinstance(row, Mapping):
                row = _annotation(row, len(thing_classes), labels[-1], problems)
                row |= {"id": len(labels), "image_id": ids[index]}
            sections["annotations"].append(row)
    columns = columns_from_sections(
        sections,
        problems,
        lambda section, index: labels[index] if section == "annotations" else f"entry {index}",
    )
    return data_from_columns(
        columns,
        problems,
        name=name,
        origin=name,
        image_root="/",
        begun=begun,
        bad_boxes=bad_boxes,
        trim=trim,
    )


def image_ids(names: Sequence[Any]) -> list[int]:
    """Image ids as integers: what texts such as "000005" say, or else 1, 2, 3 and so on."""
    try:
        ids = np.array([int(name) for name in names], dtype=np.int64).tolist()
    except (TypeError, ValueError, OverflowError):
        ids = []
    texts = any(isinstance(name, str) for name in names)
    if not ids or (texts and len(set(ids)) < len(ids)):  # "5" and "05"
        return list(range(1, len(names) + 1))
    return ids


def _annotation(
    row: Mapping[str, Any], classes: int, label: str, problems: Problems
) -> dict[str, Any]:
    """An annotation as COCO has it."""
    values = {key: _plain(row[key]) for key in ("bbox", "area", "iscrowd") if key in row}
    mode, category = row.get("bbox_mode"), _plain(row.get("category_id"))
    if mode not in (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS):
        problems.add("bad mode", f"{label}: {mode!r}")
    elif mode == BoxMode.XYXY_ABS:
        try:
            x0, y0, x1, y1 = map(float, values["bbox"])
            values["bbox"] = [x0, y0, x1 - x0, y1 - y0]
        except (KeyError, TypeError, ValueError):
            pass  # told as a bad box
    if type(category) is not int or not 0 <= category < classes:
        problems.add("no class", f"{label}: {category!r}")
        category = 0
    return {**values, "category_id": category + 1}


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's."""
    value = list(value) if isinstance(value, tuple) else value
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value
