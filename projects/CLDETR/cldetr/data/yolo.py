"""YOLO: a `data.yaml` that names classes and image folders, and a text file of labels per image.

`yolo:data.yaml/train` reads the images under the key `train` of data.yaml: a folder (searched
with its subfolders), a text file with a path a line, or a list of these; relative to the key
`path`, which is relative to data.yaml's folder. The labels of images/a/1.jpg are in
labels/a/1.txt: the last folder `images` of the path becomes `labels`; where there is none, they
are beside the image. An image without that file has no objects.

A line is `class x y width height`, centre and size as shares of the image, or
`class x1 y1 x2 y2 x3 y3 …`, a polygon, which becomes its box.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cldetr.data.coco import CocoData, data_from_columns
from cldetr.data.parse import (
    CocoAnnotation,
    CocoBox,
    CocoCategory,
    CocoFile,
    CocoImage,
    Columns,
)
from cldetr.data.problems import Problems
from cldetr.data.scan import is_image_name, read_size
from cldetr.data.voc import check_spellings, parse_number
from cldetr.errors import InputError

logger = logging.getLogger(__name__)

KINDS = {
    "no image": (
        "image files are missing or unreadable",
        "put them there, or remove them from the data set",
    ),
    "listed twice": ("images are listed more than once", "remove the lines"),
    "outside": ("listed images are outside of the data set's folder", "list images below it"),
    "one label file": (
        "images share a label file",
        "give images names that differ in more than their ending",
    ),
    "no text": ("label files are not text", "export them again"),
    "bad line": (
        "lines are neither `class x y width height` nor `class` and three or more points",
        "fix or remove them",
    ),
    "bad class": ("classes are not an index of the names in data.yaml", "fix them, or add names"),
    "not normalised": (
        "values are not shares of the image, 0 to 1",
        "divide x and width by the image's width, y and height by its height",
    ),
    "two spellings": (
        "class names differ in case or spaces alone",
        "spell a class in one way",
    ),
}
_SLACK = 0.01  # what rounding may carry a point over the border, as a share of the image
_IMAGES, _LABELS = f"{os.sep}images{os.sep}", f"{os.sep}labels{os.sep}"


def read_yolo(reference: str, *, bad_boxes: str = "stop", trim: bool = True) -> CocoData:
    """Reads the images under a key of data.yaml; all problems make one `InputError`.

    Args:
        reference: DATA.yaml/KEY, see the module.
        bad_boxes: "stop" at boxes that are not finite numbers with sizes ≥ 0, or "drop" and count
            them.
        trim: cut boxes to their image, as for training.
    """
    begun = time.perf_counter()
    file, split = os.path.split(reference)
    if not file.endswith((".yaml", ".yml")):
        key = f"{reference}/train" if reference.endswith((".yaml", ".yml")) else "data.yaml/train"
        raise InputError(f"yolo:{reference} names no part of a data.yaml: write yolo:{key}")
    settings = _read_settings(Path(file), split)
    names = _class_names(settings, file)
    problems = Problems(KINDS)
    check_spellings(names, problems)
    root, images = _find_images(Path(file), settings, split, problems)
    reader = _Reader(root, names, problems)
    for image in images:
        reader.read(image)
    reader.check_label_files(file)
    return data_from_columns(
        reader.columns(),
        problems,
        name=f"{Path(os.path.abspath(file)).parent.name}_{split}",
        origin=f"yolo:{reference}",
        image_root=root,
        begun=begun,
        bad_boxes=bad_boxes,
        trim=trim,
    )


def _read_settings(path: Path, split: str) -> Mapping[str, Any]:
    """The content of data.yaml; nothing in it is executed."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check the path") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{path}:{line} is not valid YAML ({error.problem}): fix it") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid YAML ({error}): fix it") from None
    if not isinstance(content, Mapping):
        raise InputError(f"{path} holds no keys: write `train: FOLDER` and `names: [a, b]` lines")
    if "kpt_shape" in content:
        raise InputError(f"{path} describes keypoints (kpt_shape): give a detection data set")
    if content.get(split) in (None, "", []):
        known = [key for key in ("train", "val", "test") if content.get(key)]
        hint = f"choose {' or '.join(known)}" if known else "add `train: FOLDER`"
        raise InputError(f"{path} has no {split!r}: {hint}")
    return content


def _class_names(settings: Mapping[str, Any], file: str) -> list[str]:
    names = settings.get("names")
    if isinstance(names, Mapping):
        keys = list(names)
        if sorted(map(str, keys)) != sorted(map(str, range(len(keys)))):
            raise InputError(f"{file}: names has the keys {keys[:20]}: number them 0, 1, 2 …")
        names = [names[key] for key in sorted(keys, key=int)]
    if not isinstance(names, list) or not names:
        raise InputError(f"{file}: names is {names!r}: list the class names, names: [cat, dog]")
    for name in names:
        # YAML reads a bare `no` as false. UTF-8 cannot hold half a surrogate pair.
        is_text = isinstance(name, str) and name.encode("utf-8", "replace").decode() == name
        if not is_text and type(name) not in (int, float):
            raise InputError(f"{file}: names has {name!r}, which is no text: put it in quotes")
    if "nc" in settings and settings["nc"] != len(names):
        raise InputError(
            f"{file}: nc is {settings['nc']!r}, but names has {len(names)} entries: correct one"
        )
    return [str(name).strip() for name in names]


def _find_images(
    file: Path, settings: Mapping[str, Any], split: str, problems: Problems
) -> tuple[Path, list[str]]:
    """The folder that all images are below, and their absolute paths."""
    base = file.absolute().parent
    if settings.get("path") is not None:
        base = base / _text(settings["path"], file, "path")
    entries = settings[split] if isinstance(settings[split], list) else [settings[split]]
    folders: list[str] = []
    found: dict[str, None] = {}
    for entry in entries:
        text = _text(entry, file, split)
        place = base / text
        if not place.exists() and text.startswith("../"):
            place = base / text[3:]  # exports written for another folder than they come in
        place = Path(os.path.normpath(place))
        if place.is_dir():
            folders.append(str(place))
            images = [
                os.path.join(folder, name)
                for folder, _, files in os.walk(place)
                for name in files
                if is_image_name(name)
            ]
            if not images:
                raise InputError(f"{file}: there is no image in {place}: check the key {split}")
            found.update(dict.fromkeys(sorted(images)))
        elif place.is_file() and place.suffix == ".txt":
            folders.append(os.path.normpath(base))
            for where, image in _listed(place):
                if image in found:
                    problems.add("listed twice", where)
                elif not image.startswith(os.path.join(os.path.normpath(base), "")):
                    problems.add("outside", f"{where}: {image}")
                else:
                    found[image] = None
        else:
            raise InputError(
                f"{file}: {split} is {text!r}, but there is no folder or list {place}: correct it"
            )
    return Path(os.path.commonpath(folders)), list(found)


def _text(value: Any, file: Path, key: str) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise InputError(f"{file}: {key} is {value!r}: write the path of a folder")
    if "://" in value:
        raise InputError(f"{file}: {key} is the address {value}: download it and give the folder")
    return value.strip()


def _listed(path: Path) -> list[tuple[str, str]]:
    """The paths in a text file, each with its line for messages."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text ({error}): fix it") from None
    return [
        (f"{path.name}:{number}", os.path.normpath(path.parent / line.strip()))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


class _Reader:
    """Reads label files one by one into the sections of a COCO file."""

    def __init__(self, root: Path, names: Sequence[str], problems: Problems) -> None:
        self.root, self.names, self.problems = root, names, problems
        self.images: list[CocoImage] = []
        self.annotations: list[CocoAnnotation] = []
        self.lines: list[tuple[str, int]] = []  # label file and line of each annotation
        self.unreadable: dict[int, str] = {}
        self.label_files: dict[str, str] = {}  # those read → their image
        self.missing: list[str] = []  # label files that images have not
        self.listings: dict[str, set[str]] = {}  # folder → its files

    def read(self, path: str) -> None:
        """Reads the size and the labels of an image."""
        size = read_size(path)
        if isinstance(size, str):
            self.problems.add("no image", f"{path}: {size}")
            return
        image = CocoImage(
            len(self.images) + 1, os.path.relpath(path, self.root).replace(os.sep, "/"), *size
        )
        self.images.append(image)
        file = label_file(path)
        if file in self.label_files:
            self.problems.add("one label file", f"{path} and {self.label_files[file]}")
        self.label_files[file] = path
        if not self._exists(file):
            self.missing.append(file)
            return
        try:
            with open(file, encoding="utf-8-sig") as stream:
                lines = stream.read().split("\n")  # as editors count them
        except (OSError, UnicodeDecodeError) as error:
            self.problems.add("no text", f"{file}: {error}")
            return
        for number, line in enumerate(lines, start=1):
            if words := line.split():
                self._object(words, image, file, number)

    def _exists(self, file: str) -> bool:
        folder, name = os.path.split(file)
        if folder not in self.listings:
            self.listings[folder] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
        return name in self.listings[folder]

    def _object(self, words: list[str], image: CocoImage, file: str, line: int) -> None:
        label, *values = map(parse_number, words)
        points = len(values)
        kind = None
        if points != 4 and (points < 6 or points % 2):
            kind = "bad line"
        elif not label.is_integer() or not 0 <= label < len(self.names):
            kind = "bad class"
        elif any(value < -_SLACK or value > 1 + _SLACK for value in _bounded(values)):
            kind = "not normalised"
        if kind:
            self.problems.add(kind, f"{file}:{line}: {' '.join(words)[:40]!r}")
            return
        x, y, w, h = values if points == 4 else _surround(values)
        if not all(map(math.isfinite, values)):
            x = math.nan  # so that it is told, or dropped
        if not (math.isfinite(x) and w >= 0 and h >= 0):
            self.unreadable[len(self.annotations)] = " ".join(words)[:40]
        width, height = image.width, image.height
        box = CocoBox((x - w / 2) * width, (y - h / 2) * height, w * width, h * height)
        number = len(self.annotations) + 1
        self.annotations.append(CocoAnnotation(number, image.id, int(label) + 1, box))
        self.lines.append((file, line))

    def check_label_files(self, file: str) -> None:
        """Stops where no label file is found at all, and reports some that are missing or alone."""
        if self.missing and len(self.missing) == len(self.images):
            raise InputError(
                f"{file}: no image has a label file, {self.missing[0]} for example: put them there "
                "(the folder images of a path becomes labels)"
            )
        if self.missing:
            logger.warning("%s: %d images have no label file: no object", file, len(self.missing))
        alone = [
            name
            for folder, files in self.listings.items()
            for name in files
            if name.endswith(".txt") and os.path.join(folder, name) not in self.label_files
            if _LABELS in os.path.join(folder, "")
        ]
        if alone:
            logger.warning(
                "%s: %d label files have no image and are not used, %s for example",
                *(file, len(alone), min(alone)),
            )

    def columns(self) -> Columns:
        """What was read."""
        if not self.images:
            self.problems.add("empty list", "images")
        categories = [CocoCategory(number, name) for number, name in enumerate(self.names, 1)]
        return Columns(
            CocoFile(self.images, self.annotations, categories),
            self.unreadable,
            lambda row: self.images[row].file_name,
            lambda row: f"{self.lines[row][0]}:{self.lines[row][1]}",
        )


def label_file(image: str) -> str:
    """The label file of an image, by the rule of YOLO."""
    stem = os.path.splitext(image)[0]
    return _LABELS.join(stem.rsplit(_IMAGES, 1)) + ".txt"


def _surround(points: Sequence[float]) -> tuple[float, float, float, float]:
    """The box around a polygon: centre and size."""
    xs, ys = points[0::2], points[1::2]
    low, high = (min(xs), min(ys)), (max(xs), max(ys))
    return (low[0] + high[0]) / 2, (low[1] + high[1]) / 2, high[0] - low[0], high[1] - low[1]


def _bounded(values: Sequence[float]) -> list[float]:
    """The finite values that must be shares of the image; a negative size is a bad box instead."""
    sizes = range(2, 4) if len(values) == 4 else range(0)
    return [
        value
        for index, value in enumerate(values)
        if math.isfinite(value) and not (index in sizes and value < 0)
    ]
