"""Data sets that a registered function returns, as the arrays that scenarios are made of."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.structures import BoxMode

from cldetr.data.coco import CocoData, fields_of
from cldetr.data.parse import Columns
from cldetr.data.problems import Problems
from cldetr.errors import InputError

_REQUIRED = ("file_name", "height", "width", "image_id")


def data_from_dicts(
    name: str,
    dicts: Iterable[Mapping[str, Any]],
    thing_classes: Sequence[str] | None,
    *,
    bad_boxes: str = "stop",
    trim: bool = True,
) -> CocoData:
    """Turns Detectron2's standard dictionaries into arrays; all that is wrong makes one error.

    Args:
        name: of the data set.
        dicts: what its function returns: `file_name`, `height`, `width`, `image_id`, and
            `annotations` with `bbox`, `bbox_mode` and `category_id`.
        thing_classes: names of its categories, from its metadata.
        bad_boxes: "stop" at boxes that make no sense, or "drop" and count them.
        trim: cut boxes to their image.
    """
    if not thing_classes:
        raise InputError(
            f"the data set {name!r} does not name its categories: set "
            f"MetadataCatalog.get({name!r}).thing_classes"
        )
    entries = list(dicts)
    wrong = [text for index, entry in enumerate(entries) for text in _problems(index, entry)]
    if not entries:
        wrong = ["it returns no image"]
    if wrong:
        raise InputError.listing(
            f"the function registered as {name!r} does not return Detectron2's standard "
            "dictionaries:",
            wrong,
        )
    columns = _columns(entries, thing_classes)
    fields = fields_of(columns, Problems(), name, drop_bad_boxes=bad_boxes == "drop", trim=trim)
    return CocoData(
        name=name,
        json_file=Path(name),  # what messages call it: there is no file
        image_root=Path("/"),
        fingerprint=_digest(columns),
        **fields,
    )


def _problems(index: int, entry: Any) -> list[str]:
    """What is wrong with the shape of one entry; values are checked with those of COCO files."""
    if not isinstance(entry, Mapping):
        return [f"entry {index} is a {type(entry).__name__}, not a dictionary"]
    found = [f"entry {index} has no {key!r}" for key in _REQUIRED if key not in entry]
    for number, annotation in enumerate(entry.get("annotations", ())):
        where = f"annotation {number} of entry {index}"
        if not isinstance(annotation, Mapping):
            found.append(f"{where} is a {type(annotation).__name__}, not a dictionary")
            continue
        found += [
            f"{where} has no {key!r}"
            for key in ("bbox", "bbox_mode", "category_id")
            if key not in annotation
        ]
        box = annotation.get("bbox", (0, 0, 0, 0))
        if np.shape(box) != (4,) or not np.issubdtype(np.asarray(box).dtype, np.number):
            found.append(f"{where} has the box {box!r}, not four numbers")
    return found


def _columns(entries: Sequence[Mapping[str, Any]], thing_classes: Sequence[str]) -> Columns:
    ids = [entry["image_id"] for entry in entries]
    if not all(isinstance(each, (int, np.integer)) for each in ids) or len({*ids}) < len(ids):
        ids = list(range(1, len(ids) + 1))  # Pascal VOC has texts
    rows = [
        (image, annotation)
        for image, entry in zip(ids, entries, strict=True)
        for annotation in entry.get("annotations", ())
    ]
    boxes = [
        BoxMode.convert(list(map(float, row["bbox"])), row["bbox_mode"], BoxMode.XYWH_ABS)
        for _, row in rows
    ]

    def integers(values: Iterable[Any]) -> np.ndarray:
        return np.array([int(value) for value in values], dtype=np.int64)

    return Columns(
        category_ids=list(range(1, len(thing_classes) + 1)),
        category_names=[str(each) for each in thing_classes],
        image_ids=integers(ids),
        file_names=[os.path.abspath(entry["file_name"]).lstrip("/") for entry in entries],
        widths=integers(entry["width"] for entry in entries),
        heights=integers(entry["height"] for entry in entries),
        object_ids=np.arange(1, len(rows) + 1),
        object_images=integers(image for image, _ in rows),
        object_categories=integers(row["category_id"] for _, row in rows) + 1,
        boxes=np.array(boxes, dtype=np.float64).reshape(-1, 4),
        areas=np.array([row.get("area", np.nan) for _, row in rows], dtype=np.float64),
        crowd=integers(row.get("iscrowd", 0) for _, row in rows),
        ignored=np.zeros(len(rows), dtype=np.int64),
    )


def _digest(columns: Columns) -> str:
    """A digest of the content, in place of that of a file."""
    digest = hashlib.sha256()
    for value in vars(columns).values():
        digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return digest.hexdigest()
