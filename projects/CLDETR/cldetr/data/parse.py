"""From the text of a COCO annotation file to columns.

The fast reader decodes into typed structures, skips what detection does not need (polygons,
licences) and stops at the first unexpected value. Then the slow reader goes through the file as
generic JSON and collects *all* problems, so that a user can fix them in one go.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
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
    unreadable: dict[int, str] = field(default_factory=dict)  # row → the text of its box


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
        problems: receives what is wrong with single entries; a file that is not JSON or lacks a
            section of a COCO file raises.
    """
    try:
        file = msgspec.json.decode(content, type=_File)
        columns = _columns(file)
        sections: dict[str, Any] = {"images": file.images, "categories": file.categories}
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        logger.info("%s: reading it the slow way (%s)", name, error)
        sections = _read_json(bytes(content), name)
        columns = _slow_columns(sections, problems)
    for key in ("images", "categories"):
        if not sections[key]:
            problems.add("empty list", key)
    return columns


def _columns(file: _File) -> Columns:
    def column(rows: list[Any], key: str, dtype: type = np.int64) -> np.ndarray:
        return np.fromiter(map(attrgetter(key), rows), dtype, len(rows))

    images, annotations = file.images, file.annotations
    areas = (math.nan if row.area is None else row.area for row in annotations)
    return Columns(
        category_ids=column(file.categories, "id").tolist(),  # refuses what is too big
        category_names=[category.name for category in file.categories],
        image_ids=column(images, "id"),
        file_names=[image.file_name for image in images],
        widths=column(images, "width"),
        heights=column(images, "height"),
        object_ids=column(annotations, "id"),
        object_images=column(annotations, "image_id"),
        object_categories=column(annotations, "category_id"),
        boxes=np.stack([column(annotations, f"bbox.{key}", np.float64) for key in "xywh"], axis=1),
        areas=np.fromiter(areas, np.float64, len(annotations)),
        crowd=column(annotations, "iscrowd"),
        ignored=column(annotations, "ignore"),
    )


def _read_json(content: bytes, name: str) -> dict[str, list[Any]]:
    """Reads generic JSON with the three sections, or raises with the reason."""
    if not content.strip():
        raise InputError(f"{name} is empty: copy or download it again")
    if content.startswith((b"\x1f\x8b", b"PK\x03\x04")):
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
        hint = "it seems cut off: copy or download it again" if cut else "fix it there"
        raise InputError(
            f"{name} is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg}); "
            f"{hint}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 10,000 brackets
        raise InputError(
            f"{name} cannot be read as JSON ({error}): fix it or export it again"
        ) from None
    if not isinstance(file, dict):
        raise InputError(
            f"{name} holds {_kind(file)} where a COCO file has an object with the keys "
            f"{', '.join(SECTIONS)}: give an instances file, not results or captions"
        )
    wrong = [
        f"{key!r} is {_kind(file[key])}, not a list"
        if key in file
        else f"the key {key!r} is missing"
        for key in SECTIONS
        if not isinstance(file.get(key), list)
    ]
    if wrong:
        raise InputError.listing(f"{name} is not a COCO instances file:", wrong)
    return file


def _slow_columns(sections: dict[str, list[Any]], problems: Problems) -> Columns:
    # An entry with a valid id is kept, with placeholders for its bad values: the load stops anyway,
    # and what refers to the entry should not be reported as well.
    file = _File([], [], [])
    for entry in _entries(sections, "categories", problems):
        category = _Category(entry.integer("id"), entry.text("name"))
        if category.id is not None:
            file.categories.append(category)
    for entry in _entries(sections, "images", problems):
        image = _Image(
            entry.integer("id"),
            entry.text("file_name"),
            entry.integer("width", placeholder=1),
            entry.integer("height", placeholder=1),
        )
        if image.id is not None:
            file.images.append(image)
    unreadable: dict[int, str] = {}
    for entry in _entries(sections, "annotations", problems):
        box, shown = entry.box()
        values = {key: entry.integer(key) for key in ("id", "image_id", "category_id")}
        values |= {key: entry.flag(key) for key in ("iscrowd", "ignore")}
        values["area"] = entry.area()
        if None not in values.values():
            if shown:
                unreadable[len(file.annotations)] = shown
            file.annotations.append(_Annotation(bbox=box, **values))
    columns = _columns(file)
    columns.unreadable = unreadable
    return columns


@dataclass
class _Entry:
    """An entry of a section; reading a value adds what is wrong with it to the problems."""

    values: dict[str, Any]
    label: str  # what messages call it
    problems: Problems

    def integer(self, key: str, placeholder: Any = None) -> Any:
        value = self.values.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 640.0 is 640: some exporters write every number as a float
        if isinstance(value, int) and not isinstance(value, bool) and value in _INT64:
            return value
        self._report("not an integer", key)
        return placeholder

    def flag(self, key: str) -> Any:
        value = self.values.get(key, 0)
        return int(value) if isinstance(value, bool) or value == 0 else self.integer(key)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if isinstance(value, str) and value.encode("utf-8", "replace").decode() == value:
            return value  # without half a surrogate pair, which UTF-8 cannot hold
        self._report("not a string", key)
        return self.label

    def area(self) -> float | None:
        value = self.values.get("area")
        number = _number(value)
        if value is None or math.isfinite(number):
            return number
        self.problems.add("bad area", f"{self.label}: {_shown(value)}")
        return None

    def box(self) -> tuple[_Box, str]:
        """The box and, if it is not four numbers, its text."""
        value = self.values.get("bbox", "missing")
        numbers = [_number(item) for item in value] if isinstance(value, list) else []
        if len(numbers) != 4:
            numbers = [math.nan] * 4
        return _Box(*numbers), _shown(value) if any(map(math.isnan, numbers)) else ""

    def _report(self, kind: str, key: str) -> None:
        if key in self.values:
            self.problems.add(kind, f"{self.label}: {key} is {_shown(self.values[key])}")
        else:
            self.problems.add("missing key", f"{self.label}: {key}")


def _entries(sections: dict[str, list[Any]], section: str, problems: Problems) -> Iterator[_Entry]:
    """The entries of a section that are objects."""
    singular = "category" if section == "categories" else section[:-1]
    for index, values in enumerate(sections[section]):
        if isinstance(values, dict):
            key = values.get("id")
            known = isinstance(key, int) and not isinstance(key, bool)
            label = f"{singular} {_shown(key)}" if known else f"{section}[{index}]"
            yield _Entry(values, label, problems)
        else:
            problems.add("not an object", f"{section}[{index}] is {_kind(values)}")


def _number(value: Any) -> float:
    """A number as a float, NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a string"}
    return {**kinds, type(None): "null", list: "a list"}.get(type(value), "an object")
