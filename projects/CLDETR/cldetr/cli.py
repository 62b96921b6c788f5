"""The `cldetr` command: one subcommand per module in `cldetr.commands`."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from cldetr import __version__
from cldetr.errors import InputError

# name → what it does. A command is a module `cldetr.commands.<name>` with `add_arguments(parser)`
# and `run(args) -> int`; it is imported only when asked for, so that `--help` answers at once.
COMMANDS = {
    "doctor": "check what works on this machine, with the fix for what does not",
    "demo": "train our method and fine-tuning on the embedded data set, in minutes on a CPU",
    "build": "compile the fast operators for this machine",
    "shapes": "generate the embedded data set",
    "split": "divide a data set into phases, audit and save the result",
    "exemplars": "choose the exemplars of a data set",
    "configs": "list what each config computes, and compose new ones",
    "add": "teach a trained detector new categories from their data alone",
    "sweep": "run configs over several seeds and tabulate means with confidence intervals",
    "predict": "detect objects in images with a trained detector",
    "export": "export a detector for PyTorch, Hugging Face transformers or ONNX",
    "report": "write the report of a run, or one that compares several",
    "pictures": "draw pseudo-labels, their matching, and predictions of a run",
    "diagnose": "measure pseudo-labels for every K, λ and score, and recommend a setting",
    "convert-data": "write Pascal VOC, YOLO or registered data as a COCO file",
    "convert": "convert official Deformable DETR, DETR, UP-DETR and CL-DETR checkpoints",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status (2 for what the user can fix)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="cldetr",
        description="Incremental object detection with transformers. Training: train_net.py.",
    )
    parser.add_argument("--version", action="version", version=f"cldetr {__version__}")
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import your module first: a detector, rule or reader that a run was made with",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # Only the chosen command's module is imported: the others show one line of help.
    words = [word for before, word in zip(["", *argv], argv, strict=False) if before != "--import"]
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == chosen:
            command = importlib.import_module(f"cldetr.commands.{name.replace('-', '_')}")
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        for module in args.modules:
            _import(module)
        return int(args.run(args))
    except InputError as error:
        print(f"cldetr {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _import(module: str) -> None:
    """Imports a module of the user's, from the current folder too."""
    from cldetr.lazy import trust_package  # it imports torch

    sys.path.insert(0, os.getcwd())
    trust_package(module)


if __name__ == "__main__":
    sys.exit(main())
