"""Collects all problems of an annotation file, to report them in one message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from cldetr.errors import InputError

SHOWN = 10  # entries named per kind of problem; the rest is counted

# kind → (what is wrong, how to fix it)
KINDS = {
    "not an object": ("entries are not objects", "write each entry as {…}"),
    "missing key": ("entries lack a key", "add it to each of them"),
    "not an integer": ("values are not 64-bit integers", "write them as plain integers"),
    "not a string": ("values are not strings", "write them in quotes"),
    "empty list": (
        "lists are empty",
        "list the categories with id and name, and the images, also those without objects",
    ),
    "category id twice": ("category ids are used more than once", "give every category its own id"),
    "category name twice": (
        "category names are used more than once",
        "merge these categories or rename all but one",
    ),
    "empty category name": ("categories have an empty name", "name them"),
    "image id twice": ("image ids are used more than once", "give every image its own id"),
    "bad image size": (
        "images have an impossible width or height",
        "write the size of the file in pixels",
    ),
    "unsafe file name": (
        "file names lead out of the image folder or are not relative paths",
        "write them relative to the image folder, with forward slashes and without '..'",
    ),
    "annotation id twice": (
        "annotation ids are used more than once",
        "give every annotation its own id; evaluation would silently lose objects",
    ),
    "unknown image": (
        "annotations belong to an image that is not listed",
        "list the image or remove them",
    ),
    "unknown category": (
        "annotations have a category that is not listed",
        "list the category or remove them",
    ),
    "bad crowd flag": ("annotations have an iscrowd other than 0 and 1", "write 0 or 1"),
    "ignored": (
        "annotations have the key `ignore`, which COCO has not",
        "set iscrowd to 1 on them or remove them",
    ),
    "bad area": ("annotations have an area that is not a finite number ≥ 0", "correct or omit it"),
    "bad box": (
        "boxes are not x, y, width, height with finite numbers and sizes ≥ 0",
        "correct them, or drop and count them (bad_boxes='drop', --bad-boxes drop)",
    ),
}


class Problems:
    """Counts problems by kind and remembers where the first of each are."""

    def __init__(self, kinds: Mapping[str, tuple[str, str]] | None = None) -> None:
        """Takes the problems that only a format has, beside those in `KINDS`."""
        self._kinds = {**(kinds or {}), **KINDS}
        self._counts: Counter[str] = Counter()
        self._where: dict[str, list[str]] = {kind: [] for kind in self._kinds}

    def add(self, kind: str, where: str) -> None:
        """Adds one problem of a kind; `where` is an entry such as "annotation 7: …"."""
        self.add_rows(kind, np.array([True]), lambda _: where)

    def add_rows(self, kind: str, wrong: np.ndarray, describe: Callable[[int], str]) -> None:
        """Adds a problem for each row of the mask `wrong`; `describe` names a row."""
        rows = np.flatnonzero(wrong).tolist()
        self._counts[kind] += len(rows)
        self._where[kind] += map(describe, rows[: SHOWN - len(self._where[kind])])

    def stop(self, name: str) -> None:
        """Raises one error if there are problems: per kind what, how often, where, and the fix."""
        lines = []
        for kind, (what, fix) in self._kinds.items():
            if count := self._counts[kind]:
                rest = ", …" if count > SHOWN else ""
                lines.append(
                    f"{what} ({count:,}): {', '.join(self._where[kind])}{rest}. Fix: {fix}."
                )
        if total := self._counts.total():
            raise InputError.listing(f"{name} has {total:,} problem{'s' * (total > 1)}:", lines)
