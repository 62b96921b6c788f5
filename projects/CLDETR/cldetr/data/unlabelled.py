"""Data sets without annotations: a folder of images, and the categories of a detector alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cldetr.data.coco import CocoData
from cldetr.data.scan import IMAGE_ENDINGS, check_file, is_image_name
from cldetr.errors import InputError
from cldetr.files import sha256_json
from cldetr.scenario import Category


def read_image_folder(folder: str | os.PathLike[str], name: str) -> CocoData:
    """The images below a folder, in the order of their names, without annotations.

    Args:
        folder: with images, in folders of its own or not.
        name: what to call the data set.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"there is no folder {root}: give one with images")
    files = sorted(path for path in root.rglob("*") if is_image_name(path.name))
    if not files:
        raise InputError(f"no image lies in {root} ({', '.join(IMAGE_ENDINGS)})")
    with ThreadPoolExecutor(8) as pool:
        checked = list(pool.map(check_file, files))
    problems = [f"{path}: {said}" for path, (said, _) in zip(files, checked, strict=True) if said]
    if problems:
        raise InputError.listing(f"{len(problems)} images in {root} cannot be used:", problems, 20)
    names = [path.relative_to(root).as_posix() for path in files]
    return _without_objects(name, root, (), names, [size for _, size in checked])


def no_images(name: str, origin: str, categories: Sequence[Category]) -> CocoData:
    """A data set of categories without an image: what a trained detector knows.

    Args:
        name: what to call it.
        origin: where the categories come from, for messages.
        categories: in the order of their labels.
    """
    return _without_objects(name, Path(origin), categories, [], [])


def _without_objects(
    name: str,
    root: Path,
    categories: Sequence[Category],
    files: Sequence[str],
    sizes: Sequence[tuple[int, int]],
) -> CocoData:
    shape = np.array(sizes, dtype=np.int32).reshape(-1, 2)
    named = [[category.id, category.name] for category in categories]
    return CocoData(
        name=name,
        json_file=root,  # what messages call it
        image_root=root,
        categories=tuple(categories),
        image_ids=np.arange(1, len(files) + 1, dtype=np.int64),
        file_names=list(files),
        widths=shape[:, 0],
        heights=shape[:, 1],
        starts=np.zeros(len(files) + 1, dtype=np.int64),
        labels=np.empty(0, dtype=np.int32),
        boxes=np.empty((0, 4)),
        areas=np.empty(0),
        crowd=np.empty(0, dtype=bool),
        object_ids=np.empty(0, dtype=np.int64),
        fingerprint=sha256_json([named, list(files), shape.tolist()]),
    )
