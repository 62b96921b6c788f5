"""`cldetr convert-data`: write a data set of any format as a COCO file."""

from __future__ import annotations

import argparse
from pathlib import Path

from cldetr.data.coco_writer import write_subset
from cldetr.data.datasets import read_dataset
from cldetr.data.views import whole_subset
from cldetr.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "data", metavar="DATA", help="voc:DIR/SPLIT, yolo:data.yaml/KEY, or a registered name"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--bad-boxes",
        choices=("stop", "drop"),
        default="stop",
        help="stop at boxes that make no sense, or drop and count them",
    )


def run(args: argparse.Namespace) -> int:
    """Reads, writes, and prints how to use what was written."""
    if args.out.suffix != ".json":
        raise InputError(f"--out {args.out}: let the name of the COCO file end in .json")
    # Boxes as they are: whoever reads the file cuts them to the image and counts that.
    data = read_dataset(args.data, bad_boxes=args.bad_boxes, trim=False)
    write_subset(args.out, whole_subset(data, "all"), data, data.categories)
    print(
        f"wrote {args.out}: {len(data.image_ids):,} images, {len(data.labels):,} objects of "
        f"{len(data.categories)} categories; use it as {args.out}:{data.image_root}"
    )
    return 0
