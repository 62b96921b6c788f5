"""`cldetr build`: compile the fast operators for this machine."""

from __future__ import annotations

import argparse
import logging

from cldetr.layers.build import build_libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--cuda",
        choices=("auto", "on", "off"),
        default="auto",
        help="build for GPUs where torch and nvcc allow it (auto), insist on it, or skip it; "
        "TORCH_CUDA_ARCH_LIST chooses the architectures",
    )
    parser.add_argument("--force", action="store_true", help="compile everything again")
    parser.add_argument("--verbose", action="store_true", help="show the compilers' commands")


def run(args: argparse.Namespace) -> int:
    """Builds what is missing or out of date and prints one line per library."""
    if args.verbose:
        logging.getLogger("cldetr.layers.build").setLevel(logging.DEBUG)
    for line in build_libraries(args.cuda, args.force):
        print(line)
    return 0
