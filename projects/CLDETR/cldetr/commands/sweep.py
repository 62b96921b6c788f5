"""`cldetr sweep`: configs × seeds, one after another or side by side, and their table."""

from __future__ import annotations

import argparse
from pathlib import Path

from cldetr.engine.sweep import collect, markdown, plan, run_sweep
from cldetr.files import atomic_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--share-first",
        action="store_true",
        help="train the first phase once per seed, with the first config",
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="seeds at a time")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY VALUE", help="overrides")
    parser.add_argument(
        "--table-only", action="store_true", help="run nothing, collect what is there"
    )


def run(args: argparse.Namespace) -> int:
    """Runs what is not finished and prints the table."""
    chains = plan(args.configs, args.seeds, args.out, args.share_first)
    if not args.table_only:
        run_sweep(chains, args.set, args.parallel)
    table = markdown(collect(chains))
    with atomic_path(args.out / "table.md") as partial:
        partial.write_text(table + "\n", encoding="utf-8")
    print(table)
    return 0
