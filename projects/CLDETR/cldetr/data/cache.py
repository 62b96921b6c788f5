"""The arrays of an annotation file on disk, found by the file's content.

One plain `.npz` per content and options, followed by its SHA-256: no pickle, and a cache that was
cut off or damaged is noticed, ignored and written again.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cldetr.data.validate import LoadReport
from cldetr.errors import InputError
from cldetr.files import atomic_path
from cldetr.scenario import Category

logger = logging.getLogger(__name__)

FORMAT = 2  # raise it whenever the arrays or their checks change: old caches are then ignored
_DIGEST = 32  # bytes of a SHA-256
_MIN_SIZE = 16 << 20  # bytes; smaller annotation files are read in a moment


class _Header(msgspec.Struct):
    """What is not an array."""

    categories: tuple[Category, ...]
    file_names: list[str]
    report: LoadReport


def cache_folder(json_file: str | os.PathLike[str]) -> Path | None:
    """The folder that caches the arrays of an annotation file; None for small files.

    `CLDETR_CACHE` if it is set (empty: no cache), else `cldetr` in the user's cache folder
    (`XDG_CACHE_HOME`, `~/.cache`). It may be deleted at any time.
    """
    try:
        if os.path.getsize(json_file) < _MIN_SIZE:
            return None
    except OSError:  # the reader will say what is wrong with the file
        return None
    own = os.environ.get("CLDETR_CACHE")
    if own is not None:
        return Path(own) if own else None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "cldetr"


def cache_file(
    folder: str | os.PathLike[str], fingerprint: str, bad_boxes: str, trim: bool
) -> Path:
    """The cache file of an annotation file's content, read with these options."""
    boxes = "trimmed" if trim else "raw"
    return Path(folder) / f"{fingerprint}-{bad_boxes}-{boxes}-v{FORMAT}.npz"


def write_cache(path: Path, fields: Mapping[str, Any]) -> None:
    """Writes fields of a `CocoData`; a failure only makes the next start slower."""
    arrays: dict[str, Any] = {k: v for k, v in fields.items() if isinstance(v, np.ndarray)}
    header = _Header(**{key: value for key, value in fields.items() if key not in arrays})
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(msgspec.json.encode(header), np.uint8), **arrays)
    try:
        with atomic_path(path) as partial, partial.open("wb") as stream:
            stream.write(buffer.getbuffer())
            stream.write(hashlib.sha256(buffer.getbuffer()).digest())
    except (OSError, InputError) as error:
        logger.warning("cannot write the cache %s (%s)", path, error.__cause__ or error)


def read_cache(path: Path) -> dict[str, Any] | None:
    """Reads what `write_cache` wrote; None where it is missing, damaged or of another version."""
    try:
        content = memoryview(path.read_bytes())
        body, digest = content[:-_DIGEST], bytes(content[-_DIGEST:])
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("it is damaged")
        with np.load(io.BytesIO(body), allow_pickle=False) as stored:
            arrays = dict(stored)
        header = msgspec.json.decode(arrays.pop("header").tobytes(), type=_Header)
        return {**arrays, **msgspec.structs.asdict(header)}
    except FileNotFoundError:
        return None
    except (OSError, KeyError, ValueError, msgspec.MsgspecError) as error:  # or of another version
        logger.warning("the cache %s is not used (%s): reading the annotation file", path, error)
        return None
