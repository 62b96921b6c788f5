"""`cldetr export`: a trained detector as a file that PyTorch runs without this package."""

from __future__ import annotations

import argparse
from pathlib import Path

from cldetr.analysis.export import export_detector
from cldetr.analysis.predict import Predictor
from cldetr.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--weights", type=Path, required=True, metavar="FILE", help="model.pth of a run"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="ending in .pt2")
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        required=True,
        metavar=("HEIGHT", "WIDTH"),
        help="of the input images: the exported detector takes this size only",
    )
    parser.add_argument("--config-file", metavar="FILE", help="the config of the weights")


def run(args: argparse.Namespace) -> int:
    """Exports, verifies and tells how equal it is."""
    if args.out.suffix != ".pt2":
        raise InputError(f"the output file must end in .pt2: {args.out}")
    predictor = Predictor.from_checkpoint(args.weights, config_file=args.config_file, device="cpu")
    height, width = args.size
    apart = export_detector(predictor, height, width, args.out)
    print(f"{args.out}: equal to the detector within {apart:.2g} on random images")
    return 0
