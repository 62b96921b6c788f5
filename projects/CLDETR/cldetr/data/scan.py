"""The pre-flight scan: every image file is there, whole and of the stated size, before training."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

from cldetr.data.coco import CocoData
from cldetr.errors import InputError

logger = logging.getLogger(__name__)

MAX_PIXELS = 1 << 27  # 134 million: twice what the largest consumer cameras take
_EXIF_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_LISTED = 1000  # bad files named in the message
_ENDINGS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


def scan_images(data: CocoData, indices: Iterable[int] | None = None, threads: int = 8) -> None:
    """Checks image files and stops with one message that lists all bad ones.

    Of JPEG and PNG files it reads headers and last bytes, not pixels: missing, empty, truncated,
    unreadable, oversized files and files of another size than stated are found; a flipped bit
    inside the pixels is not. Other kinds of files, which have no such ending, are decoded.
    """
    numbers = list(range(len(data.image_ids)) if indices is None else indices)
    with ThreadPoolExecutor(threads) as pool:
        checked = pool.map(lambda number: check_image(data, number), numbers, chunksize=64)
        bar = tqdm(
            checked,
            total=len(numbers),
            desc=f"checking images of {data.name}",
            unit="image",
            disable=True if len(numbers) < 5000 else None,  # None: only on a terminal
            leave=False,
        )
        problems = [problem for problem in bar if problem is not None]
    if problems:
        raise InputError.listing(
            f"{data.name}: {len(problems)} of {len(numbers)} image files cannot be used:",
            problems,
            most=_LISTED,
        )
    logger.info("%s: %d image files are there and whole", data.name, len(numbers))


def check_image(data: CocoData, number: int) -> str | None:
    """Says what is wrong with one image file, or None."""
    name = data.file_names[number]
    label = f"image {int(data.image_ids[number])}, {name}"
    try:
        path = data.image_path(number)
    except InputError as error:
        return str(error)
    if not os.path.exists(path):
        return f"{label}: there is no such file (put it below {data.image_root})"
    problem, size = check_file(path)
    if problem is not None:
        return f"{label}: {problem}"
    stated = int(data.widths[number]), int(data.heights[number])
    if size != stated:
        return f"{label}: is {size[0]}×{size[1]}, its annotation says {stated[0]}×{stated[1]}"
    return None


def check_file(path: str | os.PathLike[str]) -> tuple[str | None, tuple[int, int]]:
    """Looks at an image file.

    Returns:
        what is wrong with it, or None, and its width and height when turned upright.
    """
    problem = check_content(path)
    if problem is not None:
        return problem, (0, 0)
    try:
        with Image.open(path) as image:
            width, height = image.size
            # Pillow decodes a PNG in search of a tag that its header does not have.
            tagged = image.format != "PNG" or "exif" in image.info
            if tagged and image.getexif().get(_EXIF_ORIENTATION, 1) in _SIDEWAYS:
                width, height = height, width
    except (OSError, SyntaxError, ValueError) as error:
        return f"not a readable image ({error})", (0, 0)
    return None, (width, height)


def check_content(path: str | os.PathLike[str]) -> str | None:
    """Says what is wrong with an image file, of most kinds by its header and ending alone."""
    try:
        if not os.path.isfile(path):
            return "there is no such file"
        if os.path.getsize(path) == 0:
            return "the file is empty"
        with Image.open(path) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                return f"{width}×{height} is more than {MAX_PIXELS:,} pixels"
            ending = _ENDINGS.get(image.format or "")
            if ending is None:
                image.load()
    except UnidentifiedImageError:
        return "not a readable image"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return f"not a readable image ({error})"
    if ending is not None and not _ends_with(path, ending):
        return "the file is truncated"
    return None


def _ends_with(path: str | os.PathLike[str], ending: bytes) -> bool:
    """Whether the ending stands in the last kilobytes; cameras pad files with other bytes."""
    with open(path, "rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(stream.tell() - 4096, 0))
        return ending in stream.read()
