"""A collector that turns any number of faults in a file into one message a person can work off."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from cldetr.errors import InputError

SHOWN = 10  # entries named per kind of problem; the rest is counted

# kind → (what is wrong, how to mend it)
KINDS = {
    "not an object": ("entries are no objects", "write each entry as {…}"),
    "missing key": ("entries lack a key", "add it to each of them"),
    "not an integer": ("values are no 64-bit integers", "write them as plain integers"),
    "not a text": ("values are no texts", "write them in quotes"),
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
        "file names lead out of the image folder or are no relative paths",
        "write them relative to the image folder, with forward slashes and without '..'",
    ),
    "annotation id twice": (
        "annotation ids are used more than once",
        "number the annotations anew; evaluation would quietly lose objects",
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
        "annotations carry `ignore`, which COCO does not know",
        "set iscrowd to 1 on them or remove them",
    ),
    "bad area": ("annotations have an area that is no finite number ≥ 0", "correct or omit it"),
    "bad box": (
        "boxes are not [x, y, width, height] with finite numbers and sizes ≥ 0",
        "correct them, or leave them out and count them (bad_boxes='drop', --bad-boxes drop)",
    ),
}


class Problems:
    """Counts problems by kind and remembers where the first of each are."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._places: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, kind: str, place: str) -> None:
        """Notes one problem of a kind in `KINDS` at a place such as "annotation 7: …"."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        places = self._places.setdefault(kind, [])
        if len(places) < SHOWN:
            places.append(place)

    def add_rows(self, kind: str, wrong: np.ndarray, describe: Callable[[int], str]) -> None:
        """Notes the rows where the mask `wrong` holds; `describe` says what a row is called."""
        rows = np.flatnonzero(wrong)
        if len(rows):
            self._counts[kind] = self._counts.get(kind, 0) + len(rows)
            places = self._places.setdefault(kind, [])
            places += [describe(int(row)) for row in rows[: SHOWN - len(places)]]

    def lines(self) -> Iterable[str]:
        """One line per kind, in the order of `KINDS`: what, how often, where, and the fix."""
        for kind, (what, fix) in KINDS.items():
            if count := self._counts.get(kind):
                rest = ", …" if count > len(self._places[kind]) else ""
                yield f"{what} ({count:,}): {', '.join(self._places[kind])}{rest}. Fix: {fix}."

    def stop(self, name: str) -> None:
        """Raises one error with all problems, if there are any."""
        if self:
            total = sum(self._counts.values())
            raise InputError.listing(
                f"{name} has {total:,} problem{'s' if total > 1 else ''}:", list(self.lines())
            )
