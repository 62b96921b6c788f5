"""Atomic writes, digests and JSON files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from cldetr.errors import InputError

WIDTH = 100  # columns of a JSON file for people

# Errors of a write that the user can fix: a full disk, no permission, a broken disk.
DISK_ERRORS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        *(errno.EROFS, errno.EACCES, errno.EIO, errno.ENOTDIR, errno.EISDIR),
    }
)


@contextmanager
def atomic_path(path: str | os.PathLike[str], folder: bool = False) -> Iterator[Path]:
    """Yields a temporary path beside `path` that becomes `path` when the block ends well.

    The content is on disk (fsync) before the rename and the rename is on disk before this returns.
    When the block raises, the partial file is removed and an existing `path` stays as it was; a
    write that fails, on a full disk say, is an `InputError`. With `folder` the temporary path is a
    folder, which becomes `path` with all files in it at once.
    """
    final = Path(path)
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        (partial if folder else final.parent).mkdir(parents=True, exist_ok=not folder)
        yield partial
        _fsync(partial)
        if folder:
            _remove(final)
        os.replace(partial, final)
        _fsync(final.parent)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise disk_error(error, final) from error
    finally:
        _remove(partial)


def disk_error(error: OSError, path: str | os.PathLike[str] | None = None) -> InputError:
    """The error for a file, of a known name or not, that cannot be written."""
    return InputError(
        f"cannot write {path or error.filename or 'a file'}: {error.strerror}. What was saved "
        "before is kept; free space or fix the disk, and continue a run with --resume"
    )


def remove_partials(root: str | os.PathLike[str]) -> None:
    """Removes partial files of killed processes below a folder that this process owns."""
    for path in Path(root).rglob(".*.partial"):
        _remove(path)


def write_json(path: str | os.PathLike[str], content: Any, pretty: bool = True) -> None:
    """Writes `content` as JSON, atomically, in short lines or all in one. NaN is refused."""
    with atomic_path(path) as partial:
        partial.write_text((_pretty if pretty else _flat)(content) + "\n", encoding="utf-8")


def write_sealed(path: str | os.PathLike[str], content: Mapping[str, Any]) -> str:
    """Writes a JSON object with the digest of its content as `hash`, and returns that."""
    digest = sha256_json(content)
    write_json(path, {**content, "hash": digest})
    return digest


def read_sealed(path: str | os.PathLike[str], kind: str, format: int, fix: str) -> dict[str, Any]:
    """Reads what `write_sealed` wrote, without the `hash`; what was changed since is refused.

    Args:
        path: of the file.
        kind: what messages call it, "manifest" for example.
        format: what its key `format` must be.
        fix: what to do when it is damaged, for the message.
    """
    try:
        content = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise InputError(f"the {kind} {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not a valid {kind} ({error}): {fix}") from None
    if content.get("format") != format:
        raise InputError(
            f"the {kind} {path} has format {content.get('format')!r}, this version of cldetr reads "
            f"{format}: use the version that wrote it, or {fix}"
        )
    digest = content.pop("hash", None)
    if sha256_json(content) != digest:
        raise InputError(f"the {kind} {path} was changed after it was written: {fix}")
    return content


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


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _pretty(value: Any, indent: int = 0, key: str = "") -> str:
    """JSON with one line for what fits on it, and as many plain values per line as fit."""
    flat = key + _flat(value)
    if not isinstance(value, dict | list | tuple) or indent + len(flat) < WIDTH:
        return flat
    if isinstance(value, dict):
        items = [_pretty(item, indent + 1, f"{_flat(str(key))}: ") for key, item in value.items()]
        packed = False
    else:
        items = [_pretty(item, indent + 1) for item in value]
        packed = not any(isinstance(item, dict | list | tuple) for item in value)
    lines = items[:1]
    for item in items[1:]:
        if packed and indent + len(lines[-1]) + len(item) + 4 <= WIDTH:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    pad = "\n" + " " * (indent + 1)
    return flat[: len(key) + 1] + pad + f",{pad}".join(lines) + pad[:-1] + flat[-1]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
