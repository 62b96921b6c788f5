"""From the text of a COCO annotation file to columns.

The fast reader decodes into typed structures, skips what detection does not need (polygons,
licences) and stops at the first unexpected value. Then the slow reader goes through the file as
generic JSON and collects *all* problems, so that a user can fix them in one go.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from cldetr.data.problems import Problems
from cldetr.errors import InputError

_INT64 = range(-(2**63), 2**63)

logger = logging.getLogger(__name__)


class CocoBox(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """A box, x y width height in pixels."""

    x: float
    y: float
    w: float
    h: float


class CocoCategory(msgspec.Struct, gc=False):
    """A category of a COCO file."""

    id: int
    name: str


class CocoImage(msgspec.Struct, gc=False):
    """An image of a COCO file."""

    id: int
    file_name: str
    width: int
    height: int


class CocoAnnotation(msgspec.Struct, gc=False):
    """An annotation of a COCO file."""

    id: int
    image_id: int
    category_id: int
    bbox: CocoBox
    area: float | None = None
    iscrowd: int | bool = 0
    ignore: int | bool = 0


class CocoFile(msgspec.Struct, gc=False):
    """What detection needs of a COCO file."""

    images: list[CocoImage]
    annotations: list[CocoAnnotation]
    categories: list[CocoCategory]


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "images": CocoImage,
    "annotations": CocoAnnotation,
    "categories": CocoCategory,
}


class Columns:
    """The sections of a file as columns, unchecked. Shape shorthand: I images, N annotations."""

    def __init__(
        self,
        file: CocoFile,
        unreadable: Mapping[int, str] | None = None,
        image_label: Callable[[int], str] | None = None,
        object_label: Callable[[int], str] | None = None,
    ) -> None:
        """Takes the columns.

        Args:
            file: what was read.
            unreadable: row → text, of boxes that are not four numbers.
            image_label: what messages call the image of a row, "image 7" by default.
            object_label: the same of annotations; a file and a line for example.
        """
        images, annotations = file.images, file.annotations
        self.category_ids = _column(file.categories, "id").tolist()  # refuses what is too big
        self.category_names = [category.name for category in file.categories]
        self.image_ids = _column(images, "id")  # (I,)
        self.file_names = [image.file_name for image in images]
        self.widths = _column(images, "width")  # (I,)
        self.heights = _column(images, "height")  # (I,)
        self.object_ids = _column(annotations, "id")  # (N,)
        self.object_images = _column(annotations, "image_id")  # (N,)
        self.object_categories = _column(annotations, "category_id")  # (N,)
        sides = [_column(annotations, f"bbox.{side}", np.float64) for side in "xywh"]
        self.boxes = np.stack(sides, axis=1)  # (N, 4)
        areas = (math.nan if row.area is None else row.area for row in annotations)
        self.areas = np.fromiter(areas, np.float64, len(annotations))  # NaN where there is none
        self.crowd = _column(annotations, "iscrowd")  # (N,)
        self.ignored = _column(annotations, "ignore")  # (N,) a key of some converters
        self.unreadable = dict(unreadable or {})  # row → the text of its box
        self.image_label = image_label or (lambda row: f"image {self.image_ids[row]}")
        self.object_label = object_label or (lambda row: f"annotation {self.object_ids[row]}")

    def fingerprint(self) -> str:
        """A digest of the content."""
        digest = hashlib.sha256()
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                digest.update(value.tobytes())
            elif not callable(value):
                digest.update(repr(value).encode())
        return digest.hexdigest()


def read_columns(content: Any, name: str, problems: Problems) -> Columns:
    """Reads a file's content (bytes or a memory map).

    Args:
        content: the whole file.
        name: what messages call the file.
        problems: receives what is wrong with single entries; a file that is not JSON or lacks a
            section of a COCO file raises.
    """
    try:
        file = msgspec.json.decode(content, type=CocoFile)
        columns = Columns(file)
        sections: dict[str, Any] = {"images": file.images, "categories": file.categories}
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        logger.info("%s: reading it the slow way (%s)", name, error)
        sections = _read_json(bytes(content), name)
        columns = columns_from_sections(sections, problems)
    for key in ("images", "categories"):
        if not sections[key]:
            problems.add("empty list", key)
    return columns


def _column(rows: Sequence[Any], key: str, dtype: type = np.int64) -> np.ndarray:
    return np.fromiter(map(attrgetter(key), rows), dtype, len(rows))


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


def columns_from_sections(
    sections: Mapping[str, Sequence[Any]],
    problems: Problems,
    label: Callable[[str, int], str] | None = None,
) -> Columns:
    """Columns of generic entries, each value checked.

    Args:
        sections: the lists of a COCO file.
        problems: receives what is wrong.
        label: what messages call an entry, by section and index; by default its id, if it has one.
    """
    # An entry with a valid id is kept, with placeholders for its bad values: the load stops anyway,
    # and what refers to the entry should not be reported as well.
    file, unreadable = CocoFile([], [], []), {}
    labels: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for section, kind in SECTIONS.items():
        entries = getattr(file, section)
        for index, entry in enumerate(sections[section]):
            name = label(section, index) if label else f"{section}[{index}]"
            if not isinstance(entry, dict):
                problems.add("not an object", f"{name} is {_kind(entry)}")
                continue
            if not label and type(entry.get("id")) is int:
                name = f"{kind.__name__.removeprefix('Coco').lower()} {_shown(entry['id'])}"
            values = {
                field.name: _read_value(entry, field, name, problems)
                for field in msgspec.structs.fields(kind)
            }
            if isinstance(values.get("bbox"), str):
                unreadable[len(entries)] = values["bbox"]
                values["bbox"] = CocoBox(*[math.nan] * 4)
            if all(value is not None for key, value in values.items() if key != "area"):
                entries.append(kind(**values))
                labels[section].append(name)
    return Columns(
        file, unreadable, labels["images"].__getitem__, labels["annotations"].__getitem__
    )


def _read_value(
    entry: dict[str, Any], field: msgspec.structs.FieldInfo, label: str, problems: Problems
) -> Any:
    """A value of an entry; a placeholder, or the text of a box, where it cannot be used."""
    key, given = field.name, entry.get(field.name, field.default)
    # 640.0 is 640: some exporters write every number as a float.
    plain = int(given) if isinstance(given, float) and given.is_integer() else given
    with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):
        value = msgspec.convert(plain, field.type)
        if _is_valid(value):
            return value
    if key == "bbox":
        return _shown(entry.get(key, "missing"))
    if key == "area":
        problems.add("bad area", f"{label}: {_shown(given)}")
    elif key not in entry:
        problems.add("missing key", f"{label}: {key}")
    else:
        kind = "not a string" if field.type is str else "not an integer"
        problems.add(kind, f"{label}: {key} is {_shown(given)}")
    return {"name": label, "file_name": label, "width": 1, "height": 1}.get(key)


def _is_valid(value: Any) -> bool:
    if isinstance(value, int):
        return value in _INT64
    if isinstance(value, float):
        return math.isfinite(value)
    # UTF-8 cannot hold half a surrogate pair.
    return not isinstance(value, str) or value.encode("utf-8", "replace").decode() == value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a string"}
    return {**kinds, type(None): "null", list: "a list"}.get(type(value), "an object")
