"""`cldetr shapes`: generate the embedded data set and, on request, draw a sheet of it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from cldetr.data.shapes import SPLITS, ShapesOptions, ShapesPaths, ensure_shapes
from cldetr.errors import InputError
from cldetr.files import atomic_path

_COLUMNS, _ROWS, _TILE = 6, 4, 224  # of the sheet; px
_PALETTE = ("#ffd400", "#00e5ff", "#ff4fd8", "#7cff4f", "#ff8a3d", "#ffffff")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    default = ShapesOptions()
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("datasets/shapes"),
        metavar="DIR",
        help="default: %(default)s",
    )
    for flag, name, text in (
        ("--images", "train_images", "images for training"),
        ("--val", "val_images", "images for validation"),
        ("--size", "size", "width and height in pixels"),
        ("--categories", "categories", "number of categories"),
        ("--most-objects", "most_objects", "most objects per image"),
        ("--tail", "tail", "exponent of the long tail; 0: all categories alike"),
        ("--seed", "seed", "another seed, another data set"),
    ):
        value = getattr(default, name)
        parser.add_argument(
            flag, dest=name, type=type(value), default=value, metavar="N",
            help=f"{text} (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument(
        "--draw", type=Path, metavar="FILE.png", help="also draw a sheet of validation images"
    )


def run(args: argparse.Namespace) -> int:
    """Generates the data set and prints what it holds."""
    fields = ShapesOptions.__dataclass_fields__
    options = ShapesOptions(**{name: getattr(args, name) for name in fields})
    if args.draw and args.draw.suffix.lower() != ".png":
        raise InputError(f"--draw {args.draw}: the sheet is a PNG file; let its name end in .png")
    paths = ensure_shapes(args.out, options)
    contents = {split: json.loads(paths.annotations(split).read_bytes()) for split in SPLITS}
    for line in _table(contents):
        print(line)
    for split in SPLITS:
        print(f"{split + ':':6} {paths.annotations(split)}  {paths.images(split)}/")
    if args.draw:
        draw_sheet(paths, contents["val"], args.draw)
        print(f"sheet: {args.draw}")
    return 0


def draw_sheet(paths: ShapesPaths, content: Mapping[str, Any], out: Path) -> None:
    """Draws the first validation images in a grid, with their boxes and category names."""
    names = {category["id"]: category["name"] for category in content["categories"]}
    sheet = Image.new("RGB", (_COLUMNS * _TILE, _ROWS * _TILE), "#202020")
    font = ImageFont.load_default(size=12)
    for place, image in enumerate(content["images"][: _COLUMNS * _ROWS]):
        scale = (_TILE - 8) / image["width"]
        with Image.open(paths.images("val") / image["file_name"]) as picture:
            tile = picture.resize((_TILE - 8, _TILE - 8), Image.Resampling.BICUBIC)
        pen = ImageDraw.Draw(tile)
        for shape in content["annotations"]:
            if shape["image_id"] != image["id"]:
                continue
            x, y, width, height = (scale * value for value in shape["bbox"])
            colour = _PALETTE[shape["category_id"] % len(_PALETTE)]
            pen.rectangle((x, y, x + width, y + height), outline=colour)
            name = names[shape["category_id"]]
            # The name sits on the box's upper edge, within the picture.
            left, top, right, bottom = pen.textbbox((x, max(y - 14, 0)), name, font=font)
            shift = min(tile.width - 2 - right, 0)
            pen.rectangle((left + shift - 1, top - 1, right + shift + 1, bottom + 1), fill="black")
            pen.text((x + shift, max(y - 14, 0)), name, fill=colour, font=font)
        row, column = divmod(place, _COLUMNS)
        sheet.paste(tile, (column * _TILE + 4, row * _TILE + 4))
    with atomic_path(out) as partial:
        sheet.save(partial, format="PNG")


def _table(contents: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    counts = {
        split: Counter(shape["category_id"] for shape in content["annotations"])
        for split, content in contents.items()
    }
    lines = [f"{'category':<12}{'train':>8}{'val':>8}"]
    for category in contents["train"]["categories"]:
        cells = [f"{counts[split][category['id']]:>8}" for split in SPLITS]
        lines.append(f"{category['name']:<12}" + "".join(cells))
    lines.append(f"{'all':<12}" + "".join(f"{counts[split].total():>8}" for split in SPLITS))
    lines.append(f"{'images':<12}" + "".join(f"{len(contents[s]['images']):>8}" for s in SPLITS))
    return lines
