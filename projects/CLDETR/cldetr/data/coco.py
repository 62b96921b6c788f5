"""COCO annotation files, read once, checked whole, and kept as a few arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cldetr.scenario import Category


@dataclass(frozen=True)
class CocoData:
    """One annotation file as arrays: images in file order, objects grouped by image.

    The objects of image number i (its place in `image_ids`) are rows `starts[i]:starts[i + 1]` of
    the object arrays, in file order. Shape shorthand: I images, N objects.
    """

    name: str  # what messages call it
    json_file: Path
    image_root: Path
    categories: tuple[Category, ...]  # ascending id; a label is a place in this list
    image_ids: np.ndarray  # (I,) int64
    file_names: list[str]  # (I,) relative to image_root
    widths: np.ndarray  # (I,) int32
    heights: np.ndarray  # (I,) int32
    starts: np.ndarray  # (I + 1,) int64
    labels: np.ndarray  # (N,) int32
    boxes: np.ndarray  # (N, 4) float64, x y w h in pixels
    areas: np.ndarray  # (N,) float64
    crowd: np.ndarray  # (N,) bool
    object_ids: np.ndarray  # (N,) int64
    fingerprint: str  # SHA-256 of the annotation file's content
