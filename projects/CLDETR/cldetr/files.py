"""Files that are either whole or not there: atomic writes, digests, canonical JSON."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside `path` that becomes `path` when the block ends well.

    The content is on disk (fsync) before the rename and the rename is on disk before this returns.
    When the block raises, the partial file is removed and an existing `path` stays as it was.
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        yield partial
        _fsync(partial)
        os.replace(partial, final)
        _fsync(final.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], content: Any, indent: int | None = 1) -> None:
    """Writes `content` as JSON, atomically. NaN is refused: it is not JSON."""
    with atomic_path(path) as partial:
        text = json.dumps(content, indent=indent, allow_nan=False, ensure_ascii=False)
        partial.write_text(text + "\n", encoding="utf-8")


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Computes the SHA-256 of a file's content."""
    with open(path, "rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def sha256_json(content: Any) -> str:
    """Computes the SHA-256 of `content` in canonical JSON (sorted keys, no spaces)."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
