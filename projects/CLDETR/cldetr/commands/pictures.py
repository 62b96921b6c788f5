"""`cldetr pictures`: pseudo-labels, their matching, and predictions before and after a phase."""

from __future__ import annotations

import argparse
from pathlib import Path

from cldetr.analysis.pictures import draw_run_pictures
from cldetr.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run, finished or not")
    parser.add_argument("--phase", type=int, help="draw this phase alone (default: all)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--images",
        type=int,
        nargs="+",
        metavar="ID",
        help="image ids: training images show their labels and matching, test images predictions",
    )
    which.add_argument(
        "--sample", type=int, default=8, help="how many of each kind and phase (default: 8)"
    )
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="RUN",
        help="show the predictions of another run of the same scenario beside, such as fine-tuning",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (a GPU, if any)")


def run(args: argparse.Namespace) -> int:
    """Draws and tells where the pictures are."""
    if args.sample < 1:
        raise InputError(f"--sample must be at least 1, not {args.sample}")
    phases = None if args.phase is None else [args.phase]
    written = draw_run_pictures(
        args.run_dir,
        phases=phases,
        images=args.images,
        sample=args.sample,
        beside=args.beside,
        device=args.device,
    )
    print(f"{len(written)} pictures and captions.json in {args.run_dir / 'pictures'}")
    return 0
