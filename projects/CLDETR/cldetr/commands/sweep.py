"""`cldetr sweep`: configs × seeds, side by side where there is room, and their table."""

from __future__ import annotations

import argparse
import datetime
import platform
from importlib.metadata import version
from pathlib import Path

import torch
import yaml

from cldetr.engine.cluster import run_on_cluster
from cldetr.engine.sweep import collect, config_names, plan, run_here
from cldetr.errors import InputError
from cldetr.files import atomic_path
from cldetr.report.comparison import write_comparison
from cldetr.report.paper import find_table, paper_tables
from cldetr.report.rundir import read_run
from cldetr.report.sweep_table import COLUMNS, csv_text, latex, markdown, own_rows, paper_rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG.yaml")
    parser.add_argument(
        "--table",
        choices=list(paper_tables()),
        help="the rows of one of the paper's tables instead of CONFIG, its figures beside them",
    )
    parser.add_argument(
        "--config-root", type=Path, default=Path("configs"), metavar="DIR", help="for --table"
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        metavar="N",
        help="each decides category order, data order and training (default: 0 1 2)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--share-first",
        action="store_true",
        help="configs with the same first phase train it once per seed",
    )
    parser.add_argument(
        "--gpus-per-run", type=int, metavar="N", help="default: 1 where there are GPUs"
    )
    parser.add_argument(
        "--parallel",
        type=int,
        metavar="N",
        help="runs at a time (default: as many as the GPUs allow; 1 on a CPU)",
    )
    parser.add_argument(
        "--cluster", choices=["slurm", "local"], help="submit each run as a job, by submitit"
    )
    parser.add_argument(
        "--job",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="for --cluster: timeout_min=2880 slurm_partition=gpu gpus_per_node=8 …",
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY VALUE", help="overrides")
    parser.add_argument(
        "--table-only", action="store_true", help="run nothing, collect what is there"
    )


def run(args: argparse.Namespace) -> int:
    """Runs what is not finished, prints the table and writes it as Markdown, CSV and LaTeX."""
    paper = find_table(args.table) if args.table else None
    if bool(args.configs) == bool(paper):
        raise InputError("a sweep takes config files, or one of the paper's tables by --table")
    configs = paper.configs(args.config_root) if paper else args.configs
    devices = torch.cuda.device_count()
    gpus = min(devices, 1) if args.gpus_per_run is None else args.gpus_per_run
    chains = plan(
        configs,
        args.seeds,
        args.out,
        share_first=args.share_first,
        overrides=args.set,
        gpus=gpus,
    )
    try:
        if args.cluster and not args.table_only:
            run_on_cluster(chains, args.out, args.cluster, _job_parameters(args.job))
        elif not args.table_only:
            room = devices // gpus if gpus else 1
            if args.parallel is None and not room:
                raise InputError(f"a run wants {gpus} GPUs, this machine has {devices}")
            run_here(chains, args.parallel or room)
    finally:  # also with a run that failed: the table of the others
        found = collect(chains)
        names = config_names(configs)
        found = {name: found[name] for name in names if name in found}
        if paper:
            by_file = {
                row.config: names[configs.index(args.config_root / row.config)]
                for row in paper.rows
                if row.config
            }
            rows, columns = paper_rows(paper, by_file, found), paper.columns
            heading = f"{paper.title}. In brackets: the paper's figures.\n\n"
        else:
            rows, columns, heading = own_rows(found), COLUMNS, ""
        table = markdown(rows, columns)
        for suffix, text in {
            "md": heading + table + "\n" + _provenance(args),
            "csv": csv_text(rows, columns),
            "tex": latex(rows, columns),
        }.items():
            with atomic_path(args.out / f"table.{suffix}") as partial:
                partial.write_text(text, encoding="utf-8")
        print(heading + table)
    if found:
        folders = [job.folder for chain in chains for job in chain.jobs if job.finished]
        page = write_comparison([read_run(folder) for folder in folders], args.out / "report")
        print(f"\nThe runs side by side: {page}")
    return 0


def _job_parameters(words: list[str]) -> dict[str, object]:
    """`NAME=VALUE` words as plain values."""
    parameters = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"--job takes NAME=VALUE words, not {word!r}")
        parameters[name] = yaml.safe_load(value)
    return parameters


def _provenance(args: argparse.Namespace) -> str:
    """What a reader needs to make the table again."""
    words = [
        "cldetr sweep",
        *([f"--table {args.table}"] if args.table else map(str, args.configs)),
        *("--seeds", *map(str, args.seeds)),
        *(["--share-first"] if args.share_first else []),
        *(["--set", *args.set] if args.set else []),
    ]
    versions = ", ".join(f"{name} {version(name)}" for name in ("cldetr", "torch", "numpy"))
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"`{' '.join(words)}` on {today}; {versions}, Python {platform.python_version()}.\n"
