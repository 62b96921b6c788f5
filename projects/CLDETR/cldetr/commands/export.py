"""`cldetr export`: a trained detector as a file or folder that runs without this package."""

from __future__ import annotations

import argparse
from pathlib import Path

from cldetr.analysis.export import export_detector
from cldetr.analysis.export_huggingface import export_folder, export_onnx
from cldetr.analysis.predict import Predictor
from cldetr.errors import InputError

FORMATS = {
    "pt2": "a file that PyTorch runs, for images of one --size",
    "huggingface": "a folder that transformers loads",
    "onnx": "a file for onnxruntime",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--weights",
        type=Path,
        required=True,
        metavar="FILE",
        help="model.pth of a run, or a folder of Hugging Face transformers",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="a .pt2 or .onnx file, or a folder"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="pt2",
        help="; ".join(f"{name}: {what}" for name, what in FORMATS.items()),
    )
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="the one size of the input images; pt2 needs it, onnx where the model is of one size",
    )
    parser.add_argument("--config-file", metavar="FILE", help="the config of the model")


def run(args: argparse.Namespace) -> int:
    """Exports, verifies and tells how equal it is."""
    suffix = {"pt2": ".pt2", "onnx": ".onnx"}.get(args.format, "")
    if suffix and args.out.suffix != suffix:
        raise InputError(f"the output file must end in {suffix}: {args.out}")
    if args.format == "pt2" and args.size is None:
        raise InputError("--format pt2 is for images of one size: give it, --size HEIGHT WIDTH")
    if args.format == "huggingface" and args.size is not None:
        raise InputError("--size is for pt2 and onnx: an image processor says it in a folder")
    predictor = Predictor.from_checkpoint(args.weights, config_file=args.config_file, device="cpu")
    if args.format == "pt2":
        height, width = args.size
        apart = export_detector(predictor, height, width, args.out)
    elif args.format == "onnx":
        apart = export_onnx(predictor, args.out, args.size and tuple(args.size))
    else:
        apart = export_folder(predictor, args.out)
    print(f"{args.out}: equal to the detector within {apart:.2g} on random images")
    return 0
