"""`cldetr shapes`: generate the embedded data set and, with --draw, a sheet of its images."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cldetr.data.shapes import SPLITS, ShapesOptions, ShapesPaths, ensure_shapes
from cldetr.data.textures import LOOKS
from cldetr.drawing.boxes import Box, class_color, draw_boxes, make_canvas, save_png
from cldetr.errors import InputError

_COLUMNS, _ROWS, _TILE = 6, 4, 224  # of the sheet; px


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
        ("--most-objects", "most_objects", "limit of objects per image"),
        ("--smallest", "smallest", "least longer side of an object, as a share of the image's"),
        ("--tail", "tail", "exponent of the long tail; 0: all categories alike"),
        ("--seed", "seed", "another seed, another data set"),
    ):
        value = getattr(default, name)
        parser.add_argument(
            flag, dest=name, type=type(value), default=value, metavar="N",
            help=f"{text} (default: {value:g})",
        )  # fmt: skip
    parser.add_argument(
        "--look", choices=list(LOOKS), default=default.look,
        help="the same scenes as another kind of picture, another domain (default: %(default)s)",
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
    for index, image in enumerate(content["images"][: _COLUMNS * _ROWS]):
        with Image.open(paths.images("val") / image["file_name"]) as picture:
            canvas = make_canvas(np.asarray(picture), short_side=_TILE - 8, fit=True)
        boxes = []
        for shape in content["annotations"]:
            if shape["image_id"] == image["id"]:
                x, y, width, height = shape["bbox"]
                category = shape["category_id"]
                corners = (x, y, x + width, y + height)
                boxes.append(Box(corners, class_color(category), names[category]))
        draw_boxes(canvas, boxes)
        row, column = divmod(index, _COLUMNS)
        sheet.paste(canvas.image, (column * _TILE + 4, row * _TILE + 4))
    save_png(sheet, out)


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
