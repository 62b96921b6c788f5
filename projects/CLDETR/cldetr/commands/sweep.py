"""`cldetr sweep`: experiments × seeds, side by side where there is room, and their table."""

from __future__ import annotations

import argparse
import datetime
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from cldetr.config import OVERRIDABLE, check_keys, load_config, merge_overrides
from cldetr.config_files import compose, folder_names, part_from
from cldetr.engine import IncrementalTrainer
from cldetr.engine.cluster import run_on_cluster
from cldetr.engine.initial_weights import check_weights
from cldetr.engine.plan import Cost, Plan, make_plan, sum_text
from cldetr.engine.sweep import Experiment, Job, collect, plan, run_here
from cldetr.errors import InputError
from cldetr.files import atomic_path
from cldetr.report.pages import write_comparison
from cldetr.report.rundir import read_run
from cldetr.report.sweep_table import (
    COLUMNS,
    RUNS,
    csv_text,
    format_rows,
    latex,
    own_rows,
    paper_tables,
    read_runs_csv,
    runs_csv_text,
    table_rows,
    voc_columns,
)

Elsewhere = tuple[Mapping[str, RUNS], list[str]]  # what `read_runs_csv` returns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "configs",
        nargs="*",
        metavar="CONFIG",
        help="YAML files, or names that `cldetr configs` lists",
    )
    parser.add_argument(
        "--table",
        choices=list(paper_tables()),
        help="the rows of a table, with the paper's figures beside them; rows of CONFIG come below",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        metavar="N",
        help="each decides category order, data order and training (default: 0 1 2)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the runs and their table"
    )
    parser.add_argument(
        "--tables",
        type=Path,
        metavar="DIR",
        help="folder of the table and the report, if not --out",
    )
    parser.add_argument(
        "--share-first",
        action="store_true",
        help="train equal first phases once per seed",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=[],
        metavar="DETECTOR=FILE",
        help="initial weights of all runs of a detector, such as up_detr_r50=FILE",
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="your copy of train_net.py, which the runs start (default: the package's own)",
    )
    _add_machine_arguments(parser)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY VALUE", help="overrides of all configs"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="run nothing: say what each run will do and need, what would make it fail, and the "
        "sum of all",
    )
    parser.add_argument(
        "--table-only", action="store_true", help="run nothing, collect what is there"
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        type=Path,
        default=[],
        metavar="CSV",
        help="runs.csv of other sweeps: runs of the same config, settings and seed join the table",
    )


def _add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds where the runs are trained, and how many at a time."""
    parser.add_argument(
        "--gpus-per-run",
        type=int,
        metavar="N",
        help="default: all GPUs of the machine (with --cluster, those of gpus_per_node)",
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


def run(args: argparse.Namespace) -> int:
    """Runs what is not finished, prints the table and writes it as Markdown, CSV and LaTeX."""
    if not (args.configs or args.table):
        raise InputError("give configs, or a table with --table")
    names = [*(paper_tables()[args.table].runs() if args.table else []), *args.configs]
    weights = _weights(args.weights)
    if args.script and not args.script.is_file():
        raise InputError(f"--script: there is no file {args.script}")
    if args.script and args.plan:
        raise InputError(
            f"--plan does not know what {args.script} overrides: plan a run with "
            f"`python {args.script} --config-file FILE --plan`"
        )
    written = (args.tables or args.out) / "runs.csv"
    if any(path.resolve() == written.resolve() for path in args.runs):
        raise InputError(
            f"--runs: the sweep writes {written} itself; give a copy in another folder"
        )
    experiments = [_experiment(name, args.set, weights, args.script) for name in names]
    parameters = {name: yaml.safe_load(value) for name, value in _pairs(args.job, "--job")}
    devices = torch.cuda.device_count()
    gpus = args.gpus_per_run
    if gpus is None:
        gpus = int(parameters.get("gpus_per_node", devices)) if args.cluster else devices
    jobs = plan(
        experiments,
        args.seeds,
        args.out,
        share_first=args.share_first,
        gpus=gpus,
        script=args.script and args.script.resolve(),
    )
    if args.plan:
        return _print_plan([job for job in jobs if not job.finished])
    settings = {job.name: job.settings for job in jobs}
    elsewhere = [read_runs_csv(path, settings) for path in args.runs]
    room = devices // gpus if gpus else 1
    if not (room or args.parallel or args.cluster or args.table_only):
        raise InputError(f"this machine has {devices} GPUs, not {gpus}: lower --gpus-per-run")
    try:
        if not args.table_only:
            for job in jobs:  # before anything is trained; finished runs do not need them
                if not job.finished:
                    check_weights(job.cfg.MODEL.WEIGHTS)
            if args.cluster:
                run_on_cluster(jobs, args.out, args.cluster, parameters)
            else:
                run_here(jobs, args.parallel or room)
    finally:  # also with a run that failed: the table of the others
        results, left_out = _collect(args, jobs, elsewhere)
        _write_table(args, results, settings, left_out)
    finished = [read_run(job.folder) for job in jobs if job.finished]
    if finished:
        page = write_comparison(finished, (args.tables or args.out) / "report")
        print(f"\nThe runs side by side: {page}")
    return 0


def _print_plan(jobs: Sequence[Job]) -> int:
    """Prints the plan of every run and the sum; returns 2 where one would fail."""
    plans: list[Plan] = []
    costs: dict[str, Cost] = {}
    for job in jobs:
        plans.append(
            make_plan(
                job.cfg,
                IncrementalTrainer.build_model,
                name=str(job.folder),
                processes=max(job.gpus, 1),
                costs=costs,
                # What a run takes over from its leader is yet to be trained.
                check_files=None if job.leader is None else lambda cfg: None,
            )
        )
        print(plans[-1].text())
    print(sum_text(plans))
    return 2 if any(found.problems for found in plans) else 0


def _experiment(
    name: str, overrides: Sequence[str], weights: dict[str, str], script: Path | None = None
) -> Experiment:
    """A config by its path or name, with the overrides of the sweep."""
    is_file = Path(name).is_file()
    cfg = load_config(name) if is_file else compose([name])
    detector = "" if name.endswith(".py") else part_from("detector", name)
    if detector in weights:
        cfg.MODEL.WEIGHTS = weights[detector]
    merge_overrides(cfg, overrides)
    check_keys(cfg, overridden=OVERRIDABLE if script else ())  # a run of a script checks itself
    return Experiment(Path(name).stem if is_file else name, cfg)


def _weights(words: Sequence[str]) -> dict[str, str]:
    """`DETECTOR=FILE` words as weights by detector."""
    weights = dict(_pairs(words, "--weights"))
    detectors = folder_names("detector")
    for detector, path in weights.items():
        if detector not in detectors:
            raise InputError(
                f"--weights: unknown detector {detector!r}; choose one of {', '.join(detectors)}"
            )
        check_weights(path)
    return weights


def _pairs(words: Sequence[str], option: str) -> list[tuple[str, str]]:
    """Splits the `NAME=VALUE` words of an option."""
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise InputError(f"{option} takes NAME=VALUE words, not {wrong[0]!r}")
    return [(word.partition("=")[0], word.partition("=")[2]) for word in words]


def _collect(
    args: argparse.Namespace, jobs: Sequence[Job], elsewhere: Sequence[Elsewhere]
) -> tuple[Mapping[str, RUNS], list[str]]:
    """Results of the sweep and of those of --runs, and a line for each run that is left out."""
    found, left_out = collect(jobs)
    sources: dict[str, Mapping[str, RUNS]] = {str(args.out): found}
    for path, (runs, refused) in zip(args.runs, elsewhere, strict=True):
        left_out += refused
        sources[str(path)] = runs
        if not any(seed in args.seeds for seeds in runs.values() for seed in seeds):
            left_out.append(f"{path} has no run of these configs, settings and seeds")
    results: dict[str, dict[int, Mapping[str, Any]]] = {}
    for name, seed in dict.fromkeys((job.name, job.seed) for job in jobs):
        having = [source for source, runs in sources.items() if seed in runs.get(name, {})]
        if having:
            results.setdefault(name, {})[seed] = sources[having[0]][name][seed]
        left_out += [
            f"{name}, seed {seed}: the run of {other}; that of {having[0]} counts"
            for other in having[1:]
        ]
    return results, left_out


def _write_table(
    args: argparse.Namespace,
    results: Mapping[str, RUNS],
    settings: Mapping[str, str],
    left_out: Sequence[str],
) -> None:
    """Prints the table and writes it; of runs that are left out it gives no numbers."""
    voc = voc_columns(found for runs in results.values() for found in runs.values())
    if args.table:
        table = paper_tables()[args.table]
        columns = (*table.columns, *voc)
        rows = table_rows(table, results, columns)
        figures = any(row.figures for row in table.rows)
        heading = table.title + ". In brackets: the paper's figures." * figures + "\n\n"
    else:
        columns, heading = (*COLUMNS, *voc), ""
        rows = own_rows(results, columns)
    text = heading + format_rows(rows, columns, "github")
    if left_out:
        text += "\nNot in the table:\n\n" + "".join(f"- {line}\n" for line in left_out)
    for name, content in {
        "table.md": text + "\n" + _provenance(args),
        "table.csv": csv_text(rows, columns),
        "table.tex": latex(rows, columns),
        "runs.csv": runs_csv_text(results, settings),
    }.items():
        with atomic_path((args.tables or args.out) / name) as partial:
            partial.write_text(content, encoding="utf-8")
    print(text)


def _provenance(args: argparse.Namespace) -> str:
    """What a reader needs to make the table again."""
    words = [
        "cldetr",
        *(f"--import {module}" for module in args.modules),
        "sweep",
        *args.configs,
        *([f"--table {args.table}"] if args.table else []),
        *("--seeds", *map(str, args.seeds)),
        *(["--share-first"] if args.share_first else []),
        *(["--weights", *args.weights] if args.weights else []),
        *([f"--script {args.script}"] if args.script else []),
        *(["--set", *args.set] if args.set else []),
        *(["--runs", *map(str, args.runs)] if args.runs else []),
    ]
    versions = ", ".join(f"{name} {version(name)}" for name in ("cldetr", "torch", "numpy"))
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"`{' '.join(words)}` on {today}; {versions}, Python {platform.python_version()}.\n"
