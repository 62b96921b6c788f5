"""Data sets that a registered function returns, as the arrays that scenarios are made of."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.structures import BoxMode

from cldetr.data.coco import CocoData
from cldetr.data.parse import (
    CocoAnnotation,
    CocoBox,
    CocoCategory,
    CocoFile,
    CocoImage,
    Columns,
)
from cldetr.data.problems import Problems
from cldetr.data.validate import check_columns
from cldetr.errors import InputError


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
    if not thing_classes:
        raise InputError(
            f"the data set {name!r} does not name its categories: set "
            f"MetadataCatalog.get({name!r}).thing_classes"
        )
    problems = list(_problems(dicts, len(thing_classes))) if dicts else ["it returns no image"]
    if problems:
        raise InputError.listing(
            f"the function registered as {name!r} does not return Detectron2's standard "
            f"dictionaries ({len(problems)} problems):",
            problems,
        )
    columns = _columns(dicts, thing_classes)
    drop = bad_boxes == "drop"
    fields = check_columns(columns, Problems(), name, drop_bad_boxes=drop, trim=trim)
    return CocoData(
        name=name,
        json_file=Path(name),  # what messages call it: there is no file
        image_root=Path("/"),
        fingerprint=_fingerprint(columns),
        **fields,
    )


def _problems(dicts: Sequence[Any], categories: int) -> Iterator[str]:
    """What is wrong with the entries' form; the values are checked with those of COCO files."""
    image_keys = {
        "file_name": (_is_path, "give the path of the image"),
        "height": (_is_integer, "give it in pixels"),
        "width": (_is_integer, "give it in pixels"),
        "image_id": (lambda value: isinstance(value, str | int | np.integer), "give each its own"),
        "annotations": (lambda value: isinstance(value, Sequence), "give a list"),
    }
    object_keys = {
        "bbox": (
            lambda value: np.asarray(value, dtype=np.float64).shape == (4,),
            "give four numbers",
        ),
        "bbox_mode": (
            lambda value: value in (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS),
            "give BoxMode.XYXY_ABS or BoxMode.XYWH_ABS",
        ),
        "category_id": (
            lambda value: _is_integer(value) and 0 <= value < categories,
            f"give an index of thing_classes, 0 to {categories - 1}",
        ),
        "iscrowd": (lambda value: value in (0, 1), "give 0 or 1"),
        "area": (lambda value: float(value) >= 0, "give square pixels, or omit the key"),
    }
    for index, entry in enumerate(dicts):
        wrong = list(_wrong_keys(f"entry {index}", entry, {"annotations": []}, image_keys))
        yield from wrong
        if not wrong:
            for i, annotation in enumerate(entry.get("annotations", ())):
                where = f"entry {index}, annotation {i}"
                yield from _wrong_keys(where, annotation, {"iscrowd": 0, "area": 0}, object_keys)


def _wrong_keys(
    where: str,
    entry: Any,
    defaults: Mapping[str, Any],
    keys: Mapping[str, tuple[Callable[[Any], bool], str]],
) -> Iterator[str]:
    if not isinstance(entry, Mapping):
        yield f"{where} is of type {type(entry).__name__}: return a dictionary"
        return
    values = {**defaults, **entry}
    for key, (is_valid, fix) in keys.items():
        if key not in values:
            yield f"{where} has no {key!r}: {fix}"
        elif not _holds(is_valid, values[key]):
            yield f"{where}: {key!r} is {str(values[key])[:60]!r}: {fix}"


def _holds(is_valid: Callable[[Any], bool], value: Any) -> bool:
    try:
        return bool(is_valid(value))
    except (TypeError, ValueError):
        return False


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and os.fspath(value) != ""


def _columns(dicts: Sequence[Mapping[str, Any]], thing_classes: Sequence[str]) -> Columns:
    file = CocoFile([], [], [CocoCategory(k, str(name)) for k, name in enumerate(thing_classes, 1)])
    for image, entry in zip(_image_ids([entry["image_id"] for entry in dicts]), dicts, strict=True):
        path = os.path.abspath(entry["file_name"]).lstrip("/")
        file.images.append(CocoImage(image, path, int(entry["width"]), int(entry["height"])))
        for row in entry.get("annotations", ()):
            box = list(map(float, row["bbox"]))
            annotation = CocoAnnotation(
                id=len(file.annotations) + 1,
                image_id=image,
                category_id=int(row["category_id"]) + 1,
                bbox=CocoBox(*BoxMode.convert(box, row["bbox_mode"], BoxMode.XYWH_ABS)),
                area=row.get("area"),
                iscrowd=int(row.get("iscrowd", 0)),
            )
            file.annotations.append(annotation)
    return Columns(file)


def _image_ids(ids: Sequence[Any]) -> list[int]:
    """Image ids as integers: Pascal VOC has texts, "000005" or "2007_000027"."""
    try:
        return np.array([int(image_id) for image_id in ids], dtype=np.int64).tolist()
    except (ValueError, OverflowError):
        return list(range(1, len(ids) + 1))


def _fingerprint(columns: Columns) -> str:
    """A digest of the content, as a file has one."""
    digest = hashlib.sha256()
    for value in vars(columns).values():
        digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return digest.hexdigest()
