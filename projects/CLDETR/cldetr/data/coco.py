"""COCO annotation files, read once, checked whole, and kept as a few arrays."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cldetr.data.cache import cache_file, read_cache, write_cache
from cldetr.data.parse import Columns, read_columns
from cldetr.data.problems import Problems
from cldetr.data.validate import LoadReport, check_columns, indices_of, is_unsafe
from cldetr.errors import InputError
from cldetr.files import sha256_file
from cldetr.scenario import Category

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class CocoData:
    """One annotation file as arrays: images in file order, objects grouped by image.

    The objects of the image with index i in `image_ids` are rows `starts[i]:starts[i + 1]` of the
    object arrays, in file order. Shape shorthand: I images, N objects.
    """

    name: str  # what messages call it
    json_file: Path
    image_root: Path
    categories: tuple[Category, ...]  # ascending id; a label is an index of this list
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

    def image_path(self, index: int) -> Path:
        """The file of an image; names and links that leave the root are refused."""
        file_name = self.file_names[index]
        path = os.path.join(self.image_root, file_name)
        if is_unsafe(file_name) or not os.path.realpath(path).startswith(self._real_root):
            raise InputError(
                f"image {self.image_ids[index]} of {self.name}: {file_name!r} leads out of the "
                f"image folder {self.image_root}; put the file itself there"
            )
        return Path(path)

    def indices_of(self, image_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Indices of image ids, in the order given; unknown ids are refused."""
        wanted = np.asarray(image_ids, dtype=np.int64)
        indices = indices_of(wanted, self.image_ids)
        unknown = wanted[indices < 0]
        if len(unknown):
            raise InputError.listing(
                f"{len(unknown)} images are not in {self.name} ({self.json_file}):",
                [f"image {image}" for image in unknown],
                limit=10,
            )
        return indices

    def subset(self, indices: np.ndarray, name: str) -> CocoData:
        """Some of the images, by index, with their objects: a data set of that name."""
        counts = np.diff(self.starts)[indices]
        starts = np.concatenate([[0], np.cumsum(counts)])
        # Row n of the subset is row n − starts[i] of its image, which begins elsewhere here.
        rows = np.arange(starts[-1]) + np.repeat(self.starts[indices] - starts[:-1], counts)
        images = {key: getattr(self, key)[indices] for key in ("image_ids", "widths", "heights")}
        objects = ("labels", "boxes", "areas", "crowd", "object_ids")
        return replace(
            self,
            name=name,
            file_names=[self.file_names[index] for index in indices.tolist()],
            starts=starts,
            **images,
            **{key: getattr(self, key)[rows] for key in objects},
        )

    @cached_property
    def _real_root(self) -> str:
        return os.path.join(os.path.realpath(self.image_root), "")  # with the separator

    @cached_property
    def _shared(self) -> dict[str, Any]:
        """The arrays as tensors in shared memory, which `torch` sends to workers as handles."""
        import torch  # not needed to read a file

        arrays = {key: value for key, value in vars(self).items() if isinstance(value, np.ndarray)}
        tensors = {
            key: torch.from_numpy(np.array(array)).share_memory_() for key, array in arrays.items()
        }
        vars(self).update({key: tensor.numpy() for key, tensor in tensors.items()})  # one copy
        return tensors

    def __getstate__(self) -> dict[str, Any]:
        shared = self._shared  # so that a worker that is spawned and not forked gets no copy
        return {
            key: shared.get(key, value) for key, value in vars(self).items() if key != "_shared"
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(
            {
                key: value.numpy() if hasattr(value, "numpy") else value
                for key, value in state.items()
            }
        )


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

    All problems make one `InputError`. Boxes that are empty or outside of their image are dropped,
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
    drop = _wants_drop(bad_boxes)
    path, begun = Path(json_file), time.perf_counter()
    with _open(path) as stream:
        fingerprint = sha256_file(path)
        cache = None if cache_dir is None else cache_file(cache_dir, fingerprint, bad_boxes, trim)
        fields = None if cache is None else read_cache(cache)
        if fields is None:
            problems = Problems()
            columns = read_columns(_content(stream), str(path), problems)
            fields = check_columns(columns, problems, str(path), drop_bad_boxes=drop, trim=trim)
            if cache is not None:
                write_cache(cache, fields)
    name = path.stem if name is None else name
    data = CocoData(name, path, Path(image_root), fingerprint=fingerprint, **fields)
    _log(data, begun)
    return data


def data_from_columns(
    columns: Columns,
    problems: Problems,
    *,
    name: str,
    origin: str,
    image_root: str | os.PathLike[str],
    begun: float,
    bad_boxes: str = "stop",
    trim: bool = True,
) -> CocoData:
    """Checks columns that a reader of another format has made.

    Args:
        columns: what was read.
        problems: what reading has found.
        name: of the data set.
        origin: what messages call where it comes from; there is no annotation file.
        image_root: the folder that file names are relative to.
        begun: when reading began, by `time.perf_counter`.
        bad_boxes: as in `load_coco`.
        trim: as in `load_coco`.
    """
    drop = _wants_drop(bad_boxes)
    fields = check_columns(columns, problems, origin, drop_bad_boxes=drop, trim=trim)
    fingerprint = columns.fingerprint()
    data = CocoData(name, Path(origin), Path(image_root), fingerprint=fingerprint, **fields)
    _log(data, begun)
    return data


def label_table(
    data: CocoData, categories: Sequence[Category], classes: Sequence[int]
) -> np.ndarray:
    """From a data set's own labels to those of the scenario, −1 where not in `classes`, (K,)."""
    wanted = {categories[label].name: label for label in classes}
    return np.array([wanted.get(own.name, -1) for own in data.categories], dtype=np.int64)


def _wants_drop(bad_boxes: str) -> bool:
    if bad_boxes not in ("stop", "drop"):
        raise InputError(f"bad_boxes is {bad_boxes!r}: choose stop or drop")
    return bad_boxes == "drop"


def _log(data: CocoData, begun: float) -> None:
    """Logs what a load found, and how long it took."""
    assert data.report is not None
    seconds = time.perf_counter() - begun
    name = data.json_file.name if data.json_file.suffix == ".json" else data.name
    logger.info("%s: %s, read in %.1f s", name, data.report.summary(), seconds)
    if unused := data.report.unused_categories:
        logger.warning(
            "%s: no object of %d categories, their AP cannot be measured: %s",
            name,
            len(unused),
            ", ".join(unused[:10]) + ", …" * (len(unused) > 10),
        )


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise InputError(f"there is no annotation file {path}: check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: give the annotation file in it") from None
    except OSError as error:
        raise InputError(f"the annotation file {path} cannot be read: {error.strerror}") from None


def _content(stream: BinaryIO) -> mmap.mmap | bytes:
    """The content of a file without a copy of it in memory."""
    if os.fstat(stream.fileno()).st_size == 0:
        return b""
    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
