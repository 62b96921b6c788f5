"""`cldetr report`: the page of a run, or one that compares several."""

from __future__ import annotations

import argparse
from pathlib import Path

from cldetr.errors import InputError
from cldetr.report.pages import write_comparison, write_run_page
from cldetr.report.rundir import find_runs, read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run directories, finished or not, or folders of runs, such as those of a sweep",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where index.html and figures/ go (default: report/ in the run directory, or in the "
        "folder of runs)",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page and says where it is."""
    runs = [read_run(folder) for folder in find_runs(args.runs)]
    out = args.out
    if out is None:
        if len(args.runs) > 1:
            raise InputError("to compare several runs, say where the page goes: add --out DIR")
        out = args.runs[0] / "report"
    page = write_run_page(runs[0], out) if len(runs) == 1 else write_comparison(runs, out)
    print(f"wrote {page}, and its plots as PNG and SVG in {out / 'figures'}")
    return 0
