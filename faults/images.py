"""Bad image files: all listed by the scan before training, none replaced by something else.

Every kind is planted beside good files. The scan must name each of them in one message and no good
one; decoding one (with the scan turned off) must stop with its name.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detectron2.data import detection_utils
from PIL import Image

from cldetr.data.coco import load_coco
from cldetr.data.mapper import read_image
from cldetr.data.scan import scan_images
from cldetr.errors import InputError
from faults.tally import Options, Tally

SIZE = 64, 48


def run(options: Options) -> Tally:
    """Plants every kind of bad file once, among good ones."""
    tally = Tally("images")
    folder = options.folder("images")
    secret = options.work / "secret.png"
    secret.write_bytes(_encode("PNG"))
    for name, plant in KINDS.items():
        plant(folder / f"{name.replace(' ', '_')}.img")
    good = [f"good{number}.img" for number in range(10)]
    for number, name in enumerate(good):
        (folder / name).write_bytes(_encode(["JPEG", "PNG", "BMP", "GIF", "WEBP"][number % 5]))
    names = sorted([f"{name.replace(' ', '_')}.img" for name in KINDS] + good)
    content = {
        "images": [
            {"id": number, "file_name": name, "width": SIZE[0], "height": SIZE[1]}
            for number, name in enumerate(names, start=1)
        ],
        "annotations": [],
        "categories": [{"id": 1, "name": "thing"}],
    }
    (options.work / "annotations.json").write_text(json.dumps(content), encoding="utf-8")
    data = load_coco(options.work / "annotations.json", folder)
    try:
        scan_images(data)
        said = ""
    except InputError as error:
        said = str(error)
    tally.check("good files: none is listed", "good" not in said, said)
    for name, plant in BROKEN_INSIDE.items():
        path = options.work / f"{name}.img"
        plant(path)
        wrong = _decode(path)
        tally.check(
            "kinds of damage that no header tells: decoding stops by name", not wrong, wrong
        )
    for name in KINDS:
        file = f"{name.replace(' ', '_')}.img"
        number = names.index(file)
        tally.check("kinds of bad files: listed by the scan", file in said, name)
        try:
            wrong = _decode(data.image_path(number))
        except InputError as error:
            wrong = "" if file in str(error) else f"{name}: {error}"
        tally.check("kinds of bad files: decoding stops by name", not wrong, wrong)
    return tally


def stock(options: Options) -> Tally:
    """The same files against Detectron2's `read_image`."""
    tally = Tally("images, stock")
    folder = options.folder("images")
    (options.work / "secret.png").write_bytes(_encode("PNG"))
    for name, plant in {**KINDS, **BROKEN_INSIDE}.items():
        if name in ("named pipe", "link to a device"):
            continue  # it would wait, or read, for ever
        path = folder / f"{name}.img"
        plant(path)
        try:
            shape = detection_utils.read_image(str(path), "RGB").shape
            tally.check("kinds of bad files: decoding stops", False, f"{name}: taken as {shape}")
        except Exception:
            tally.check("kinds of bad files: decoding stops", True)
    return tally


def _decode(path: Path) -> str:
    """Says what is wrong with the way that a bad file is handled in training."""
    try:
        image = read_image({"file_name": str(path), "width": 64, "height": 48}, "RGB")
    except InputError as error:
        return "" if path.name in str(error) else f"{path.name}: {error}"
    except Exception as error:
        return f"{path.name}: {type(error).__name__}: {error}"
    return f"{path.name}: decoded to {image.shape}"


def _encode(kind: str, size: tuple[int, int] = SIZE, **more: Any) -> bytes:
    buffer = io.BytesIO()
    image = Image.effect_noise(size, 60).convert("RGB")
    image.save(buffer, kind, **more)
    return buffer.getvalue()


def _cut(kind: str, share: float) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        content = _encode(kind)
        path.write_bytes(content[: int(len(content) * share)])

    return plant


def _bytes(content: bytes) -> Callable[[Path], None]:
    return lambda path: _write(path, content)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _broken_header(path: Path) -> None:
    content = bytearray(_encode("PNG"))
    content[12:16] = b"JUNK"
    path.write_bytes(content)


def _turned(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path.write_bytes(_encode("JPEG", exif=exif))


def _zero_tail(path: Path) -> None:
    content = _encode("JPEG", quality=95, size=(64, 48))
    path.write_bytes(content[: len(content) // 2] + bytes(8192))


def _broken_pixels(path: Path) -> None:
    content = bytearray(_encode("PNG"))
    start = content.index(b"IDAT") + 4
    content[start : start + 100] = bytes(100)
    path.write_bytes(content)


def _missing_rows(path: Path) -> None:
    """A PNG whose pixels end early, in a stream that is whole."""
    whole = _png_header(*SIZE)
    path.write_bytes(whole)


BROKEN_INSIDE: dict[str, Callable[[Path], None]] = {
    "PNG with damaged pixels": _broken_pixels,
    "PNG with missing rows": _missing_rows,
}
KINDS: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "empty": _bytes(b""),
    "folder": lambda path: path.mkdir(),
    "named pipe": lambda path: os.mkfifo(path),
    "text": _bytes(b"this is no image\n"),
    "web page": _bytes(b"<!DOCTYPE html><html><body>404 Not Found</body></html>"),
    "zeros": _bytes(bytes(5000)),
    "header of a JPEG": _bytes(_encode("JPEG")[:20]),
    "first half of a JPEG": _cut("JPEG", 0.5),
    "JPEG without its last bytes": lambda path: _write(path, _encode("JPEG")[:-2]),
    "JPEG with a zero tail": _zero_tail,
    "first half of a PNG": _cut("PNG", 0.5),
    "PNG without its end": lambda path: _write(path, _encode("PNG")[:-12]),
    "PNG with a broken header": _broken_header,
    "first half of a BMP": _cut("BMP", 0.5),
    "first half of a GIF": _cut("GIF", 0.5),
    "first half of a WebP": _cut("WEBP", 0.5),
    "first half of a TIFF": _cut("TIFF", 0.5),
    "another size": lambda path: _write(path, _encode("PNG", (60, 48))),
    "turned by its EXIF tag": _turned,
    "pixel bomb": _bytes(_png_header(60_000, 60_000)),
    "small pixel bomb": _bytes(_png_header(13_000, 13_000)),
    "dangling link": lambda path: path.symlink_to("nowhere.png"),
    "circular link": lambda path: path.symlink_to(path.name),
    "link out of the folder": lambda path: path.symlink_to("../secret.png"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
}
