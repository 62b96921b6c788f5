"""COCO annotation files, read once, checked whole, and kept as a few arrays."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cldetr.data.cache import cache_file, read_cache, write_cache
from cldetr.data.parse import Columns, read_columns
from cldetr.data.problems import Problems
from cldetr.data.texts import PackedTexts
from cldetr.data.validate import LoadReport, check_columns, is_unsafe
from cldetr.errors import InputError
from cldetr.files import sha256_file
from cldetr.scenario import Category

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
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
    file_names: Sequence[str]  # (I,) relative to image_root
    widths: np.ndarray  # (I,) int32
    heights: np.ndarray  # (I,) int32
    starts: np.ndarray  # (I + 1,) int64
    labels: np.ndarray  # (N,) int32
    boxes: np.ndarray  # (N, 4) float64, x y w h in pixels
    areas: np.ndarray  # (N,) float64
    crowd: np.ndarray  # (N,) bool
    object_ids: np.ndarray  # (N,) int64
    fingerprint: str  # SHA-256 of the annotation file's content
    report: LoadReport | None = None  # what the load found and changed

    def image_path(self, number: int) -> Path:
        """The file of image number `number`; names and links that leave the root are refused."""
        file_name = self.file_names[number]
        path = os.path.join(self.image_root, file_name)
        if is_unsafe(file_name) or not os.path.realpath(path).startswith(self._real_root):
            raise InputError(
                f"image {self.image_ids[number]} of {self.name}: {file_name!r} leads out of the "
                f"image folder {self.image_root}; put the file itself there"
            )
        return Path(path)

    def numbers_of(self, image_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Image numbers of image ids, in the order given; unknown ids are refused."""
        wanted = np.asarray(image_ids, dtype=np.int64)
        order = self._ascending
        places = np.searchsorted(self.image_ids, wanted, sorter=order)
        numbers = order[places.clip(max=len(order) - 1)]
        unknown = wanted[self.image_ids[numbers] != wanted]
        if len(unknown):
            raise InputError.listing(
                f"{len(unknown)} images are not in {self.name} ({self.json_file}):",
                [f"image {image}" for image in unknown],
                most=10,
            )
        return numbers

    @cached_property
    def _ascending(self) -> np.ndarray:
        return np.argsort(self.image_ids, kind="stable")

    @cached_property
    def _real_root(self) -> str:
        return os.path.join(os.path.realpath(self.image_root), "")  # with the separator


def load_coco(
    json_file: str | os.PathLike[str],
    image_root: str | os.PathLike[str],
    *,
    name: str | None = None,
    bad_boxes: str = "stop",
    trim: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> CocoData:
    """Reads and checks a COCO instances file.

    All problems make one `InputError`. Boxes that are empty or outside of their image are left out,
    those that reach over its border are cut to it; both are counted in the result's `report` and
    logged. `area` and `iscrowd` may be absent (width · height of the box; 0), the ids may not:
    evaluation needs them. Polygons are not read.

    Args:
        json_file: the annotation file.
        image_root: the folder that its file names are relative to. It need not exist yet.
        name: what messages call the data set; the file's name by default.
        bad_boxes: "stop" at boxes that are not four finite numbers with sizes ≥ 0, or "drop" and
            count them.
        trim: False keeps empty boxes and those over the border as they are, for evaluation: the
            numbers are then those of pycocotools on the same file.
        cache_dir: where to keep the arrays for later loads of the same content.
    """
    if bad_boxes not in ("stop", "drop"):
        raise InputError(f"bad_boxes is {bad_boxes!r}: choose stop or drop")
    path, root = Path(json_file), Path(image_root)
    begun = time.perf_counter()
    with _open(path) as content:
        fingerprint = sha256_file(path)
        cache = None if cache_dir is None else cache_file(cache_dir, fingerprint, bad_boxes, trim)
        fields = None if cache is None else read_cache(cache)
        cached = fields is not None
        if fields is None:
            fields = _read_fields(content, str(path), bad_boxes == "drop", trim)
    data = CocoData(
        name=path.stem if name is None else name,
        json_file=path,
        image_root=root,
        fingerprint=fingerprint,
        **fields,
    )
    if cache is not None and not cached:
        write_cache(cache, fields)
    report = data.report
    assert report is not None
    seconds = time.perf_counter() - begun
    logger.info("%s: %s, read in %.1f s", path.name, report.summary(), seconds)
    if report.unused_categories:
        logger.warning(
            "%s: no object of %d categories, their AP cannot be measured: %s",
            path.name,
            len(report.unused_categories),
            ", ".join(report.unused_categories[:10])
            + (", …" if len(report.unused_categories) > 10 else ""),
        )
    return data


def _read_fields(
    content: mmap.mmap | bytes, name: str, drop_bad_boxes: bool, trim: bool
) -> dict[str, Any]:
    """The fields of a `CocoData` that depend on the file's content alone."""
    problems = Problems()
    columns = read_columns(content, name, problems)
    return fields_of(columns, problems, name, drop_bad_boxes=drop_bad_boxes, trim=trim)


def fields_of(
    columns: Columns, problems: Problems, name: str, *, drop_bad_boxes: bool, trim: bool
) -> dict[str, Any]:
    """Checks columns and makes of them the fields of a `CocoData`; see `check_columns`."""
    checked = check_columns(columns, problems, name, drop_bad_boxes=drop_bad_boxes, trim=trim)
    return {
        "image_ids": columns.image_ids,
        "file_names": PackedTexts.pack(columns.file_names),
        "widths": columns.widths.astype(np.int32),
        "heights": columns.heights.astype(np.int32),
        **vars(checked),
    }


@contextlib.contextmanager
def _open(path: Path) -> Iterator[mmap.mmap | bytes]:
    """The content of a file without a copy of it in memory."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        raise InputError(f"there is no annotation file {path}: check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: give the annotation file in it") from None
    except OSError as error:
        raise InputError(f"the annotation file {path} cannot be read: {error.strerror}") from None
    with stream:
        if os.fstat(stream.fileno()).st_size == 0:
            yield b""
            return
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content
