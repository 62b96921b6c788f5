"""The scan before training: every image file exists, is complete and has the stated size."""

from __future__ import annotations

import logging
import os
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
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif")
_LAST_BYTES = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


def is_image_name(name: str) -> bool:
    """Whether a file is an image by its ending; hidden ones are some system's, not the user's."""
    return name.lower().endswith(IMAGE_ENDINGS) and not name.startswith(".")


def scan_images(data: CocoData) -> None:
    """Checks image files; raises one error that lists all bad ones.

    Of JPEG and PNG files it reads the header and the last bytes, not the pixels: it finds missing,
    empty, truncated, unreadable and oversized files and those of another size than stated, but no
    flipped bit inside the pixels. Other formats, which have no such ending, are decoded.
    """
    total = len(data.image_ids)
    with ThreadPoolExecutor(8) as pool:
        bar = tqdm(
            pool.map(lambda index: check_image(data, index), range(total), chunksize=64),
            total=total,
            desc=f"checking images of {data.name}",
            unit="image",
            disable=True if total < 5000 else None,  # None: only on a terminal
            leave=False,
        )
        problems = [problem for problem in bar if problem is not None]
    if len(problems) == total > 1 and all("there is no such file" in line for line in problems):
        raise InputError(
            f"{data.name}: none of its {total:,} image files is in {data.image_root}, the first, "
            f"{data.file_names[0]}, for example: check the image folder"
        )
    if problems:
        raise InputError.listing(
            f"{data.name}: {len(problems)} of {total} image files cannot be used:",
            problems,
            limit=_LISTED,
        )
    logger.info("%s: all %d image files are complete", data.name, total)


def check_image(data: CocoData, index: int) -> str | None:
    """What is wrong with one image file, or None."""
    label = f"image {int(data.image_ids[index])}, {data.file_names[index]}"
    try:
        path = data.image_path(index)
    except InputError as error:
        return str(error)
    if not os.path.exists(path):
        return f"{label}: there is no such file (put it below {data.image_root})"
    problem, size = check_file(path)
    stated = int(data.widths[index]), int(data.heights[index])
    if problem is None and size != stated:
        problem = f"is {size[0]}×{size[1]}, its annotation says {stated[0]}×{stated[1]}"
    return problem and f"{label}: {problem}"


def check_file(path: str | os.PathLike[str]) -> tuple[str | None, tuple[int, int]]:
    """Checks an image file, a JPEG or PNG by its header and ending alone.

    Returns:
        what is wrong with it, or None, and its width and height after EXIF rotation.
    """
    unknown = (0, 0)
    try:
        if not os.path.isfile(path):
            return "there is no such file", unknown
        if os.path.getsize(path) == 0:
            return "the file is empty", unknown
        with Image.open(path) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                return f"{width}×{height} is more than {MAX_PIXELS:,} pixels", unknown
            ending = _LAST_BYTES.get(image.format or "")
            if ending is None:
                image.load()
            elif ending not in _last_bytes(path):
                return "the file is truncated", unknown
            return None, _upright_size(image)
    except UnidentifiedImageError:
        return "not a readable image", unknown
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return f"not a readable image ({error})", unknown


def read_size(path: str | os.PathLike[str]) -> tuple[int, int] | str:
    """Width and height of an image after EXIF rotation, from its header; or what is wrong."""
    try:
        with Image.open(path) as image:
            return _upright_size(image)
    except FileNotFoundError:
        return "there is no such file"
    except UnidentifiedImageError:
        return "not a readable image"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return f"not a readable image ({error})"


def _upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    # Pillow decodes a PNG in search of a tag that its header does not have.
    tagged = image.format != "PNG" or "exif" in image.info
    if tagged and image.getexif().get(_EXIF_ORIENTATION, 1) in _SIDEWAYS:
        return height, width
    return width, height


def _last_bytes(path: str | os.PathLike[str]) -> bytes:
    """The last kilobytes of a file: some cameras pad files after the ending."""
    with open(path, "rb") as stream:
        stream.seek(max(os.path.getsize(path) - 4096, 0))
        return stream.read()
