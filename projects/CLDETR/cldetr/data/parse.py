"""From the text of a COCO annotation file to plain columns of numbers.

Two readers give the same columns. The fast one decodes straight into typed structures and skips
what detection does not need (polygons, licences); it stops at the first thing it does not expect.
Then the patient one reads the file as generic JSON and notes *everything* that is wrong, because a
person who mends a file wants to mend it once.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from cldetr.data.problems import Problems
from cldetr.errors import InputError

SECTIONS = ("images", "annotations", "categories")
_INT64 = range(-(2**63), 2**63)

logger = logging.getLogger(__name__)


@dataclass
class Columns:
    """The sections of a file as columns, unchecked. Shape shorthand: I images, N annotations."""

    category_ids: list[int]
    category_names: list[str]
    image_ids: np.ndarray  # (I,) int64
    file_names: list[str]
    widths: np.ndarray  # (I,) int64
    heights: np.ndarray  # (I,) int64
    object_ids: np.ndarray  # (N,) int64
    object_images: np.ndarray  # (N,) int64, image ids
    object_categories: np.ndarray  # (N,) int64, category ids
    boxes: np.ndarray  # (N, 4) float64, x y w h; NaN where they are not four numbers
    areas: np.ndarray  # (N,) float64, NaN where the file gives none
    crowd: np.ndarray  # (N,) int64
    ignored: np.ndarray  # (N,) int64, the key "ignore" of some converters
    unreadable: dict[int, str] = field(default_factory=dict)  # row → its box as it is written


class _Box(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    x: float
    y: float
    w: float
    h: float


class _Category(msgspec.Struct, gc=False):
    id: int
    name: str


class _Image(msgspec.Struct, gc=False):
    id: int
    file_name: str
    width: int
    height: int


class _Annotation(msgspec.Struct, gc=False):
    id: int
    image_id: int
    category_id: int
    bbox: _Box
    area: float | None = None
    iscrowd: int | bool = 0
    ignore: int | bool = 0


class _File(msgspec.Struct, gc=False):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def read_columns(content: Any, name: str, problems: Problems) -> Columns:
    """Reads a file's content (bytes or a memory map).

    Args:
        content: the whole file.
        name: what messages call the file.
        problems: receives what is wrong with single entries; a file that is not JSON, or has not
            the sections of a COCO file, raises at once.
    """
    try:
        file = msgspec.json.decode(content, type=_File)
        columns = _fast_columns(file)
        empty = [key for key in ("images", "categories") if not getattr(file, key)]
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        logger.info("%s: reading it the slow way (%s)", name, error)
        generic = _read_json(bytes(content), name)
        columns = _patient_columns(generic, problems)
        empty = [key for key in ("images", "categories") if not generic[key]]
    for section in empty:
        problems.add("empty list", section)
    return columns


def _fast_columns(file: _File) -> Columns:
    images, annotations = file.images, file.annotations
    corners = [_column(annotations, f"bbox.{key}", np.float64) for key in "xywh"]
    areas = (math.nan if row.area is None else row.area for row in annotations)
    return Columns(
        category_ids=_column(file.categories, "id", np.int64).tolist(),  # refuses what is too big
        category_names=[category.name for category in file.categories],
        image_ids=_column(images, "id", np.int64),
        file_names=[image.file_name for image in images],
        widths=_column(images, "width", np.int64),
        heights=_column(images, "height", np.int64),
        object_ids=_column(annotations, "id", np.int64),
        object_images=_column(annotations, "image_id", np.int64),
        object_categories=_column(annotations, "category_id", np.int64),
        boxes=np.stack(corners, axis=1),
        areas=np.fromiter(areas, np.float64, len(annotations)),
        crowd=_column(annotations, "iscrowd", np.int64),
        ignored=_column(annotations, "ignore", np.int64),
    )


def _column(rows: list[Any], key: str, dtype: type) -> np.ndarray:
    return np.fromiter(map(attrgetter(key), rows), dtype, len(rows))


def _read_json(content: bytes, name: str) -> dict[str, list[Any]]:
    """Reads generic JSON with the three sections, or says why it cannot."""
    if not content.strip():
        raise InputError(f"{name} is empty: put the annotation file there again")
    if content.startswith(b"\x1f\x8b") or content.startswith(b"PK\x03\x04"):
        raise InputError(f"{name} is compressed: unpack it and give the .json file")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start}): save it as UTF-8 JSON"
        ) from None
    if text.startswith("\ufeff"):
        raise InputError(f"{name} starts with a byte order mark: save it as UTF-8 without one")
    try:
        file = json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg
        hint = "it seems cut off: copy or download it again" if cut else "mend it there"
        raise InputError(
            f"{name} is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg}); "
            f"{hint}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 10,000 brackets
        raise InputError(f"{name} cannot be read as JSON ({error})") from None
    if not isinstance(file, dict):
        raise InputError(
            f"{name} holds {_kind(file)} where a COCO file has an object with the keys "
            f"{', '.join(SECTIONS)}: give an instances file, not results or captions"
        )
    wrong = [
        f"the key {key!r} is missing"
        if key not in file
        else f"{key!r} is {_kind(file[key])}, no list"
        for key in SECTIONS
        if not isinstance(file.get(key), list)
    ]
    if wrong:
        raise InputError.listing(f"{name} is not a COCO instances file:", wrong)
    return file


def _patient_columns(file: dict[str, list[Any]], problems: Problems) -> Columns:
    # An entry with a readable id is kept whatever else is wrong with it, in placeholders: the load
    # stops anyway, and what refers to the entry is not to be reported as well.
    categories = []
    for entry, label in _entries(file, "categories", problems):
        number = _integer(entry, "id", label, problems)
        text = _text(entry, "name", label, problems)
        if number is not None:
            categories.append((number, f"category {number}" if text is None else text))
    images = []
    for entry, label in _entries(file, "images", problems):
        number = _integer(entry, "id", label, problems)
        text = _text(entry, "file_name", label, problems)
        sides = [_integer(entry, key, label, problems) for key in ("width", "height")]
        if number is not None:
            width, height = (1 if side is None else side for side in sides)
            images.append((number, "?" if text is None else text, width, height))
    annotations: list[tuple[Any, ...]] = []
    unreadable: dict[int, str] = {}
    for entry, label in _entries(file, "annotations", problems):
        row = (
            _integer(entry, "id", label, problems),
            _integer(entry, "image_id", label, problems),
            _integer(entry, "category_id", label, problems),
            _flag(entry, "iscrowd", label, problems),
            _flag(entry, "ignore", label, problems),
            _area(entry, label, problems),
        )
        if None not in row:
            box = _box(entry.get("bbox"))
            if box is None:
                unreadable[len(annotations)] = _shown(entry.get("bbox", "missing"))
            annotations.append((*row, *(box or (math.nan,) * 4)))

    def integers(rows: Iterable[Any], place: int) -> np.ndarray:
        return np.array([row[place] for row in rows], dtype=np.int64)

    numbers = np.array([row[5:] for row in annotations], dtype=np.float64).reshape(-1, 5)
    return Columns(
        category_ids=[number for number, _ in categories],
        category_names=[text for _, text in categories],
        image_ids=integers(images, 0),
        file_names=[text for _, text, _, _ in images],
        widths=integers(images, 2),
        heights=integers(images, 3),
        object_ids=integers(annotations, 0),
        object_images=integers(annotations, 1),
        object_categories=integers(annotations, 2),
        crowd=integers(annotations, 3),
        ignored=integers(annotations, 4),
        areas=numbers[:, 0],
        boxes=numbers[:, 1:],
        unreadable=unreadable,
    )


def _entries(
    file: dict[str, list[Any]], section: str, problems: Problems
) -> Iterable[tuple[dict[str, Any], str]]:
    """The entries of a section that are objects, each with what messages call it."""
    for place, entry in enumerate(file[section]):
        if isinstance(entry, dict):
            number = entry.get("id")
            known = isinstance(number, int) and not isinstance(number, bool)
            singular = {"categories": "category"}.get(section, section[:-1])
            yield entry, f"{singular} {_shown(number)}" if known else f"{section}[{place}]"
        else:
            problems.add("not an object", f"{section}[{place}] is {_kind(entry)}")


def _value(entry: dict[str, Any], key: str, label: str, problems: Problems) -> Any:
    if key not in entry:
        problems.add("missing key", f"{label}: {key}")
    return entry.get(key)


def _integer(entry: dict[str, Any], key: str, label: str, problems: Problems) -> int | None:
    value = _value(entry, key, label, problems)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 640.0 is 640: some exporters write every number as a float
    if isinstance(value, int) and not isinstance(value, bool) and value in _INT64:
        return value
    if key in entry:
        problems.add("not an integer", f"{label}: {key} is {_shown(entry[key])}")
    return None


def _flag(entry: dict[str, Any], key: str, label: str, problems: Problems) -> int | None:
    value = entry.get(key, 0)
    return int(value) if isinstance(value, bool) else _integer({key: value}, key, label, problems)


def _text(entry: dict[str, Any], key: str, label: str, problems: Problems) -> str | None:
    value = _value(entry, key, label, problems)
    if isinstance(value, str) and value.encode("utf-8", "replace").decode() == value:
        return value  # and no half of a surrogate pair, which no file can hold
    if key in entry:
        problems.add("not a text", f"{label}: {key} is {_shown(value)}")
    return None


def _area(entry: dict[str, Any], label: str, problems: Problems) -> float | None:
    value = entry.get("area")
    if value is None:
        return math.nan
    number = _number(value)
    if number is None or not math.isfinite(number):
        problems.add("bad area", f"{label}: {_shown(value)}")
        return None
    return number


def _box(value: Any) -> tuple[float, ...] | None:
    if not isinstance(value, list) or len(value) != 4:
        return None
    numbers = [_number(item) for item in value]
    return None if None in numbers else tuple(number for number in numbers if number is not None)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text"}
    return {**kinds, type(None): "null", list: "a list"}.get(type(value), "an object")
