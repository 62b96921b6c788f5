"""`cldetr diagnose`: how good pseudo-labels are by K, λ and score, and which setting to take."""

from __future__ import annotations

import argparse
from pathlib import Path

from cldetr.analysis.diagnose import diagnose, diagnose_run, format_diagnosis, write_diagnosis
from cldetr.config import load_config
from cldetr.engine.restore import find_device
from cldetr.errors import InputError
from cldetr.report.diagnosis_plots import write_diagnosis_plots


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="instead: a model; with --config-file, --out",
    )
    parser.add_argument("--config-file", metavar="FILE", help="the config of the run to be")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write, with --weights; else into RUN"
    )
    parser.add_argument(
        "--phase",
        type=int,
        help="label the images of this phase (default: all; with --weights: 2)",
    )
    parser.add_argument(
        "--on",
        choices=("auto", "phase", "test"),
        default="auto",
        help="label the phase's training images, if their file knows the old classes, or the test "
        "images",
    )
    parser.add_argument("--limit", type=int, default=1000, help="number of images (default: 1000)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (a GPU, if any)")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="overrides of --config-file, with --weights",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints the tables and writes JSON, CSV and plots."""
    if args.limit < 1:
        raise InputError(f"--limit must be at least 1, not {args.limit}")
    if (args.run_dir is None) == (args.weights is None):
        raise InputError("give a run directory, or --weights with --config-file and --out")
    if args.run_dir is not None:
        if args.out or args.config_file or args.set:
            raise InputError(
                "--out, --config-file and --set go with --weights: a run has its own config and "
                "keeps the result; remove them"
            )
        found = diagnose_run(
            args.run_dir,
            phases=None if args.phase is None else [args.phase],
            where=args.on,
            limit=args.limit,
            device=args.device,
        )
        out = args.run_dir
    else:
        if args.config_file is None or args.out is None:
            raise InputError("--weights needs --config-file (what to train) and --out")
        cfg = load_config(args.config_file, args.set)
        cfg.MODEL.DEVICE = find_device(args.device)
        cfg.OUTPUT_DIR = str(args.out)
        found = [diagnose(cfg, args.phase or 2, args.weights, where=args.on, limit=args.limit)]
        out = args.out
        write_diagnosis(found[0], out)
    write_diagnosis_plots(found, out)
    print("\n\n".join(format_diagnosis(diagnosis) for diagnosis in found))
    print(f"\n{out}: diagnostics.json, diagnostics/*.csv, diagnostics/*.png, *.svg")
    return 0
