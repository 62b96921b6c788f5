"""The arrays of an annotation file on disk, found by the file's content.

One plain `.npz` per content and option, followed by the SHA-256 of what precedes it: no pickle, and
a cache that was cut off or damaged is noticed, ignored and written again.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cldetr.data.coco import CocoData, PackedTexts
from cldetr.data.validate import LoadReport
from cldetr.files import atomic_path
from cldetr.scenario import Category

logger = logging.getLogger(__name__)

FORMAT = 1  # raise it whenever the arrays or their checks change: old caches are then ignored
ARRAYS = (
    "image_ids",
    "widths",
    "heights",
    "starts",
    "labels",
    "boxes",
    "areas",
    "crowd",
    "object_ids",
)
_DIGEST = 32  # bytes of a SHA-256


def cache_file(folder: Path, fingerprint: str, bad_boxes: str) -> Path:
    """Where the arrays of a content are kept."""
    return folder / f"{fingerprint[:32]}-{bad_boxes}-v{FORMAT}.npz"


def write_cache(folder: Path, bad_boxes: str, data: CocoData) -> None:
    """Writes the arrays; a folder that cannot be written costs only the next start its speed."""
    assert isinstance(data.file_names, PackedTexts)
    assert data.report is not None
    header = {
        "fingerprint": data.fingerprint,
        "categories": [[category.id, category.name] for category in data.categories],
        "report": data.report.as_dict(),
    }
    buffer = io.BytesIO()
    np.savez(
        buffer,
        header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        characters=data.file_names.characters,
        ends=data.file_names.ends,
        **{key: getattr(data, key) for key in ARRAYS},
    )
    path = cache_file(folder, data.fingerprint, bad_boxes)
    try:
        with atomic_path(path) as partial, partial.open("wb") as stream:
            stream.write(buffer.getbuffer())
            stream.write(hashlib.sha256(buffer.getbuffer()).digest())
    except OSError as error:
        logger.warning("no cache of %s could be written in %s (%s)", data.name, folder, error)


def read_cache(
    folder: Path, fingerprint: str, bad_boxes: str, place: tuple[str, Path, Path]
) -> CocoData | None:
    """Reads the arrays of a content, or None where there are none to trust.

    Args:
        folder: the cache.
        fingerprint: of the annotation file as it is now.
        bad_boxes: the option of the load.
        place: name, annotation file and image folder, which belong to the caller.
    """
    path = cache_file(folder, fingerprint, bad_boxes)
    try:
        content = memoryview(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("the cache %s cannot be read (%s): using the annotation file", path, error)
        return None
    body, digest = content[:-_DIGEST], bytes(content[-_DIGEST:])
    if hashlib.sha256(body).digest() != digest:
        logger.warning("the cache %s is damaged: reading the annotation file again", path)
        return None
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            return _restore(arrays, fingerprint, place)
    except (KeyError, TypeError, ValueError) as error:  # whole, but not what this version writes
        logger.warning("the cache %s is of no use (%s): reading the annotations again", path, error)
        return None


def _restore(
    arrays: Mapping[str, np.ndarray], fingerprint: str, place: tuple[str, Path, Path]
) -> CocoData:
    header = json.loads(arrays["header"].tobytes())
    if header["fingerprint"] != fingerprint:
        raise ValueError(f"of another file, {header['fingerprint']}")
    name, json_file, image_root = place
    return CocoData(
        name=name,
        json_file=json_file,
        image_root=image_root,
        categories=tuple(Category(number, text) for number, text in header["categories"]),
        file_names=PackedTexts(arrays["characters"], arrays["ends"]),
        fingerprint=fingerprint,
        report=LoadReport.from_dict(header["report"]),
        **{key: arrays[key] for key in ARRAYS},
    )
