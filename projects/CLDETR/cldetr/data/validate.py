"""The checks on an annotation file's columns, all of them before anything is said.

What cannot be used stops the load with one message. The little that is put right (boxes that are
empty or reach over the border, as COCO itself has) is counted in a `LoadReport`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cldetr.data.parse import Columns
from cldetr.data.problems import Problems
from cldetr.scenario import Category

MAX_SIDE = 1 << 16  # pixels; JPEG ends at 65,535
# A box may reach over the border by this much, in pixels: x + w of numbers with two decimals.
ROUNDING = 1e-3

_UNSAFE = re.compile(
    r"""^\s*$ | ^/ | \\ | ^[A-Za-z]: | :// | (?:^|/)\.\.(?:/|$) | /$ | [\x00-\x09\x0b-\x1f]""",
    re.VERBOSE | re.MULTILINE,
)


@dataclass(frozen=True)
class LoadReport:
    """What a load found and what it changed."""

    images: int
    objects: int  # kept, crowd regions included
    crowd: int
    empty_images: int  # without any object; they are kept
    crowd_only_images: int  # kept; crowd is no target
    dropped_bad: int  # boxes that are no boxes, left out on request
    dropped_empty: int  # boxes of no area or outside of their image
    clipped: int  # boxes that reached over the border
    computed_areas: int  # the file gave none: width · height of the box
    repeated_files: int  # images whose file another image has too
    unused_categories: tuple[str, ...] = ()  # without any object
    # The boxes left out, as (annotation id, image id, category id).
    left_out: tuple[tuple[int, int, int], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> LoadReport:
        """The opposite of `as_dict`, also after a way through JSON."""
        report = dict(content)
        report["unused_categories"] = tuple(report["unused_categories"])
        report["left_out"] = tuple(tuple(row) for row in report["left_out"])
        return cls(**report)

    def summary(self) -> str:
        """One line for the log."""
        parts = [
            f"{self.images:,} images ({self.empty_images:,} without objects)",
            f"{self.objects:,} objects ({self.crowd:,} crowd)",
        ]
        changes = {
            "bad boxes left out": self.dropped_bad,
            "empty or outside boxes left out": self.dropped_empty,
            "boxes clipped to the image": self.clipped,
            "areas computed": self.computed_areas,
            "images share a file with another": self.repeated_files,
        }
        return ", ".join(parts + [f"{n:,} {what}" for what, n in changes.items() if n])


@dataclass(frozen=True)
class CheckedObjects:
    """The annotations that are kept, grouped by image. Shape shorthand: I images, N objects."""

    categories: tuple[Category, ...]  # ascending id
    starts: np.ndarray  # (I + 1,) int64
    labels: np.ndarray  # (N,) int32
    boxes: np.ndarray  # (N, 4) float64, x y w h
    areas: np.ndarray  # (N,) float64
    crowd: np.ndarray  # (N,) bool
    object_ids: np.ndarray  # (N,) int64
    report: LoadReport


def check_columns(
    columns: Columns, problems: Problems, name: str, *, drop_bad_boxes: bool, trim: bool
) -> CheckedObjects:
    """Checks everything, raises one error for all that is wrong, and returns what is kept.

    Args:
        columns: the file.
        problems: what reading it already found.
        name: what messages call the file.
        drop_bad_boxes: leave out boxes that are no boxes instead of stopping.
        trim: leave out empty and outside boxes, and cut the others to their image.
    """
    categories = _check_categories(columns, problems)
    _check_images(columns, problems)
    numbers = _places(columns.object_images, columns.image_ids)
    labels = _places(
        columns.object_categories, np.array([category.id for category in categories], np.int64)
    )
    bad = _check_annotations(columns, numbers, labels, problems, drop_bad_boxes)
    problems.stop(name)

    boxes, outside, clipped = columns.boxes, np.zeros_like(bad), np.zeros_like(bad)
    if trim:
        boxes, outside, clipped = _clip(columns, numbers, bad)
    kept = np.flatnonzero(~bad & ~outside)
    kept = kept[np.argsort(numbers[kept], kind="stable")]
    boxes, computed = boxes[kept], np.isnan(columns.areas[kept])
    crowd = columns.crowd[kept].astype(bool)
    per_image = np.bincount(numbers[kept], minlength=len(columns.image_ids))
    crowd_per_image = np.bincount(numbers[kept][crowd], minlength=len(columns.image_ids))
    per_label = np.bincount(labels[kept], minlength=len(categories))
    report = LoadReport(
        images=len(columns.image_ids),
        objects=len(kept),
        crowd=int(crowd.sum()),
        empty_images=int((per_image == 0).sum()),
        crowd_only_images=int(((per_image > 0) & (per_image == crowd_per_image)).sum()),
        dropped_bad=int(bad.sum()),
        dropped_empty=int(outside.sum()),
        clipped=int(clipped.sum()),
        computed_areas=int(computed.sum()),
        repeated_files=len(columns.file_names) - len(set(columns.file_names)),
        unused_categories=tuple(
            category.name
            for category, count in zip(categories, per_label, strict=True)
            if count == 0
        ),
        left_out=_rows(columns, np.flatnonzero(bad | outside)),
    )
    return CheckedObjects(
        categories=categories,
        starts=np.concatenate([[0], np.cumsum(per_image)]).astype(np.int64),
        labels=labels[kept].astype(np.int32),
        boxes=boxes,
        areas=np.where(computed, boxes[:, 2] * boxes[:, 3], columns.areas[kept]),
        crowd=crowd,
        object_ids=columns.object_ids[kept],
        report=report,
    )


def is_unsafe(file_name: str) -> bool:
    """Whether a file name is absolute, a URL, has '..' or backslashes, or is no name at all."""
    return "\n" in file_name or _UNSAFE.search(file_name) is not None


def _check_categories(columns: Columns, problems: Problems) -> tuple[Category, ...]:
    pairs = list(zip(columns.category_ids, columns.category_names, strict=True))
    for number in _repeated(columns.category_ids):
        names = " and ".join(repr(name) for other, name in pairs if other == number)
        problems.add("category id twice", f"{number} ({names})")
    for name in _repeated(columns.category_names):
        ids = " and ".join(str(number) for number, other in pairs if other == name)
        problems.add("category name twice", f"{name!r} (ids {ids})")
    for number, name in pairs:
        if not name.strip():
            problems.add("empty category name", str(number))
    return tuple(Category(number, name) for number, name in sorted(pairs))


def _check_images(columns: Columns, problems: Problems) -> None:
    ids = columns.image_ids
    problems.add_rows("image id twice", _repeats(ids), lambda row: f"image {ids[row]}")
    sides = np.stack([columns.widths, columns.heights])
    problems.add_rows(
        "bad image size",
        np.any((sides <= 0) | (sides > MAX_SIDE), axis=0),
        lambda row: f"image {ids[row]}: {columns.widths[row]}×{columns.heights[row]}",
    )
    names = columns.file_names
    every = "\n".join(
        names
    )  # one search for all of them, and for each only where it finds something
    if every.count("\n") >= len(names) or _UNSAFE.search(every):
        problems.add_rows(
            "unsafe file name",
            np.fromiter(map(is_unsafe, names), bool, len(names)),
            lambda row: f"image {ids[row]}: {names[row][:60]!r}",
        )


def _check_annotations(
    columns: Columns,
    numbers: np.ndarray,
    labels: np.ndarray,
    problems: Problems,
    drop_bad_boxes: bool,
) -> np.ndarray:
    """Checks all but the place of the boxes; returns a mask of those that are no boxes, (N,)."""
    ids = columns.object_ids
    problems.add_rows("annotation id twice", _repeats(ids), lambda row: f"annotation {ids[row]}")
    problems.add_rows(
        "unknown image",
        numbers < 0,
        lambda row: f"annotation {ids[row]}: image {columns.object_images[row]}",
    )
    problems.add_rows(
        "unknown category",
        labels < 0,
        lambda row: f"annotation {ids[row]}: category {columns.object_categories[row]}",
    )
    problems.add_rows(
        "bad crowd flag",
        (columns.crowd != 0) & (columns.crowd != 1),
        lambda row: f"annotation {ids[row]}: {columns.crowd[row]}",
    )
    problems.add_rows("ignored", columns.ignored != 0, lambda row: f"annotation {ids[row]}")
    problems.add_rows(
        "bad area", columns.areas < 0, lambda row: f"annotation {ids[row]}: {columns.areas[row]}"
    )
    bad = ~np.isfinite(columns.boxes).all(axis=1) | (columns.boxes[:, 2:] < 0).any(axis=1)
    if not drop_bad_boxes:
        problems.add_rows(
            "bad box",
            bad,
            lambda row: (
                f"annotation {ids[row]}: "
                f"{columns.unreadable.get(row) or columns.boxes[row].tolist()}"
            ),
        )
    return bad


def _clip(
    columns: Columns, numbers: np.ndarray, bad: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts boxes to their images: boxes (N, 4), which have no area in it, which were cut (N,)."""
    limits = np.stack([columns.widths[numbers], columns.heights[numbers]], axis=1)  # (N, 2)
    with np.errstate(over="ignore"):  # 1e308 + 1e308 is over the border, whatever it is
        low, high = columns.boxes[:, :2], columns.boxes[:, :2] + columns.boxes[:, 2:]
    over = ((low < -ROUNDING) | (high > limits + ROUNDING)).any(axis=1) & ~bad
    low, high = low.clip(0, limits), high.clip(0, limits)
    outside = ((high - low <= 0) | (columns.boxes[:, 2:] == 0)).any(axis=1) & ~bad
    clipped = over & ~outside
    boxes = columns.boxes.copy()
    boxes[clipped] = np.concatenate([low, high - low], axis=1)[clipped]
    return boxes, outside, clipped


def _rows(columns: Columns, rows: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    ids = (columns.object_ids, columns.object_images, columns.object_categories)
    return tuple(zip(*(column[rows].tolist() for column in ids), strict=True))


def _places(wanted: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The place of each wanted id in `known`, −1 where it is absent."""
    if len(known) == 0:
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(known, kind="stable")
    ascending = known[order]
    places = np.searchsorted(ascending, wanted).clip(max=len(known) - 1)
    return np.where(ascending[places] == wanted, order[places], -1)


def _repeats(ids: np.ndarray) -> np.ndarray:
    """Mask of the ids that an earlier row has too, (N,)."""
    mask = np.ones(len(ids), dtype=bool)
    mask[np.unique(ids, return_index=True)[1]] = False
    return mask


def _repeated(values: Sequence[Any]) -> list[Any]:
    return sorted(value for value, count in Counter(values).items() if count > 1)
