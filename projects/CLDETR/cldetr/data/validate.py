"""All checks of an annotation file's columns, reported together.

What cannot be used stops the load with one message. What is corrected (boxes that are empty or
reach over the border, as in COCO itself) is counted in a `LoadReport`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
    crowd_only_images: int  # kept, without a training target
    dropped_bad: int  # malformed boxes, dropped on request
    dropped_empty: int  # boxes of no area or outside of their image
    clipped: int  # boxes that reached over the border
    computed_areas: int  # the file gave none: width · height of the box
    repeated_files: int  # images that share their file with another
    unused_categories: tuple[str, ...]  # without any object
    dropped: tuple[tuple[int, int, int], ...]  # boxes: annotation id, image id, category id

    def summary(self) -> str:
        """One line for the log."""
        changes = {
            "bad boxes dropped": self.dropped_bad,
            "empty or outside boxes dropped": self.dropped_empty,
            "boxes clipped to the image": self.clipped,
            "areas computed": self.computed_areas,
            "images share a file with another": self.repeated_files,
        }
        return (
            f"{self.images:,} images ({self.empty_images:,} without objects), "
            f"{self.objects:,} objects ({self.crowd:,} crowd)"
        ) + "".join(f", {n:,} {what}" for what, n in changes.items() if n)


def check_columns(
    columns: Columns, problems: Problems, name: str, *, drop_bad_boxes: bool, trim: bool
) -> dict[str, Any]:
    """Checks everything and raises one error for all that is wrong.

    Args:
        columns: the file.
        problems: what reading it already found.
        name: what messages call the file.
        drop_bad_boxes: drop malformed boxes instead of stopping.
        trim: drop empty and outside boxes, and cut the others to their image.

    Returns:
        the fields of a `CocoData` that depend on the file's content alone.
    """
    categories = _check_categories(columns, problems)
    _check_images(columns, problems)
    owners = indices_of(columns.object_images, columns.image_ids)  # (N,)
    labels = indices_of(
        columns.object_categories, np.array([category.id for category in categories], np.int64)
    )
    bad = _check_annotations(columns, owners, labels, problems, drop_bad_boxes)
    problems.stop(name)

    boxes, outside, clipped = columns.boxes, np.zeros_like(bad), np.zeros_like(bad)
    if trim:
        boxes, outside, clipped = _clip(columns, owners, bad)
    kept = np.flatnonzero(~bad & ~outside)
    kept = kept[np.argsort(owners[kept], kind="stable")]
    boxes, computed = boxes[kept], np.isnan(columns.areas[kept])
    crowd = columns.crowd[kept].astype(bool)
    per_image = np.bincount(owners[kept], minlength=len(columns.image_ids))
    crowd_per_image = np.bincount(owners[kept][crowd], minlength=len(columns.image_ids))
    per_label = np.bincount(labels[kept], minlength=len(categories)).tolist()
    dropped = np.flatnonzero(bad | outside)
    ids = (columns.object_ids, columns.object_images, columns.object_categories)
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
            category.name for category, n in zip(categories, per_label, strict=True) if n == 0
        ),
        dropped=tuple(zip(*(column[dropped].tolist() for column in ids), strict=True)),
    )
    return {
        "categories": categories,
        "image_ids": columns.image_ids,
        "file_names": columns.file_names,
        "widths": columns.widths.astype(np.int32),
        "heights": columns.heights.astype(np.int32),
        "starts": np.append(0, np.cumsum(per_image)),
        "labels": labels[kept].astype(np.int32),
        "boxes": boxes,
        "areas": np.where(computed, boxes[:, 2] * boxes[:, 3], columns.areas[kept]),
        "crowd": crowd,
        "object_ids": columns.object_ids[kept],
        "report": report,
    }


def is_unsafe(file_name: str) -> bool:
    """Whether a file name is absolute, a URL, empty, or has '..' or backslashes."""
    return "\n" in file_name or _UNSAFE.search(file_name) is not None


def indices_of(wanted: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The index of each wanted id in `known`, −1 where it is absent."""
    if len(known) == 0:
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(known, kind="stable")
    ascending = known[order]
    found = np.searchsorted(ascending, wanted).clip(max=len(known) - 1)
    return np.where(ascending[found] == wanted, order[found], -1)


def _check_categories(columns: Columns, problems: Problems) -> tuple[Category, ...]:
    pairs = list(zip(columns.category_ids, columns.category_names, strict=True))
    for key in _repeated(columns.category_ids):
        names = " and ".join(repr(name) for other, name in pairs if other == key)
        problems.add("category id twice", f"{key} ({names})")
    for name in _repeated(columns.category_names):
        ids = " and ".join(str(key) for key, other in pairs if other == name)
        problems.add("category name twice", f"{name!r} (ids {ids})")
    for key, name in pairs:
        if not name.strip():
            problems.add("empty category name", str(key))
    return tuple(Category(key, name) for key, name in sorted(pairs))


def _check_images(columns: Columns, problems: Problems) -> None:
    ids, names = columns.image_ids, columns.file_names
    problems.add_rows("image id twice", _repeats(ids), columns.image_label)
    sides = np.stack([columns.widths, columns.heights])
    problems.add_rows(
        "bad image size",
        np.any((sides <= 0) | (sides > MAX_SIDE), axis=0),
        lambda row: f"{columns.image_label(row)}: {columns.widths[row]}×{columns.heights[row]}",
    )
    every = "\n".join(names)  # one search for all, and for each only where it finds something
    if every.count("\n") >= len(names) or _UNSAFE.search(every):
        problems.add_rows(
            "unsafe file name",
            np.fromiter(map(is_unsafe, names), bool, len(names)),
            lambda row: f"{columns.image_label(row)}: {names[row][:60]!r}",
        )


def _check_annotations(
    columns: Columns,
    owners: np.ndarray,
    labels: np.ndarray,
    problems: Problems,
    drop_bad_boxes: bool,
) -> np.ndarray:
    """Checks all but the position of boxes; returns a mask of the malformed ones, (N,)."""

    def note(kind: str, wrong: np.ndarray, values: Any = None, what: str = "") -> None:
        problems.add_rows(
            kind,
            wrong,
            lambda row: (
                columns.object_label(row) + ("" if values is None else f": {what}{values[row]}")
            ),
        )

    note("annotation id twice", _repeats(columns.object_ids))
    note("unknown image", owners < 0, columns.object_images, "image ")
    note("unknown category", labels < 0, columns.object_categories, "category ")
    note("bad crowd flag", (columns.crowd != 0) & (columns.crowd != 1), columns.crowd)
    note("ignored", columns.ignored != 0)
    note("bad area", columns.areas < 0, columns.areas)
    bad = ~np.isfinite(columns.boxes).all(axis=1) | (columns.boxes[:, 2:] < 0).any(axis=1)
    if not drop_bad_boxes:
        rows = np.flatnonzero(bad).tolist()
        note(
            "bad box", bad, {row: columns.boxes[row].tolist() for row in rows} | columns.unreadable
        )
    return bad


def _clip(
    columns: Columns, owners: np.ndarray, bad: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts boxes to their images: boxes (N, 4), which have no area in it, which were cut (N,)."""
    limits = np.stack([columns.widths[owners], columns.heights[owners]], axis=1)  # (N, 2)
    with np.errstate(over="ignore"):  # 1e308 + 1e308 is over the border, whatever it is
        low, high = columns.boxes[:, :2], columns.boxes[:, :2] + columns.boxes[:, 2:]
    over = ((low < -ROUNDING) | (high > limits + ROUNDING)).any(axis=1) & ~bad
    low, high = low.clip(0, limits), high.clip(0, limits)
    outside = ((high - low <= 0) | (columns.boxes[:, 2:] == 0)).any(axis=1) & ~bad
    clipped = over & ~outside
    boxes = columns.boxes.copy()
    boxes[clipped] = np.concatenate([low, high - low], axis=1)[clipped]
    return boxes, outside, clipped


def _repeats(ids: np.ndarray) -> np.ndarray:
    """Mask of the ids that an earlier row has too, (N,)."""
    mask = np.ones(len(ids), dtype=bool)
    mask[np.unique(ids, return_index=True)[1]] = False
    return mask


def _repeated(values: Sequence[Any]) -> list[Any]:
    return sorted(value for value, count in Counter(values).items() if count > 1)
