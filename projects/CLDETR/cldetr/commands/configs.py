"""`cldetr configs`: what each config and each row of the tables computes; composes new ones."""

from __future__ import annotations

import argparse
from pathlib import Path

from tabulate import tabulate

from cldetr.config import check_keys
from cldetr.config_files import (
    CONFIGS,
    compose,
    config_files,
    dump_changes,
    find_config,
    first_comment,
    folder_names,
    named_runs,
    part_from,
)
from cldetr.files import atomic_path
from cldetr.report.sweep_table import paper_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="compose these, each over those before it, instead of listing all",
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY VALUE", help="overrides of the composition"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE.yaml", help="write the composition to a config file"
    )


def run(args: argparse.Namespace) -> int:
    """Lists all configs, or composes one and prints or writes the keys that are not default."""
    if not args.names:
        print(listing())
        return 0
    cfg = compose(args.names, args.set)
    check_keys(cfg)
    if args.write is None:
        print(dump_changes(cfg), end="")
        return 0
    with atomic_path(args.write) as partial:
        head = f"# {' + '.join(args.names)}: {' '.join(args.set) or 'as they are'}\n"
        partial.write_text(head + dump_changes(cfg), encoding="utf-8")
    print(f"wrote {args.write}: python train_net.py --config-file {args.write}")
    return 0


def listing() -> str:
    """The list: runs first, then the parts that they are composed of."""
    shown: dict[str, list[str]] = {}
    for table in paper_tables().values():
        for row in table.rows:
            if row.run and table.name not in shown.setdefault(row.run, []):
                shown[row.run].append(table.name)
    files = {name: path for name, path in config_files().items() if path.parent == CONFIGS}
    about = {
        **{name: first_comment(path) for name, path in files.items()},
        **{name: run.about for name, run in named_runs().items()},
    }
    headers, rows = ["name", "method", "scenario", "detector", "data", "tables", "what"], []
    for name, text in about.items():
        cfg = compose([name])
        domains = cfg.SCENARIO.PROTOCOL == "domains"
        size = len(cfg.DATASETS.TRAIN) if domains else cfg.SCENARIO.NAME
        scenario = f"{size} {cfg.SCENARIO.PROTOCOL}"
        parts = [part_from("detector", name), part_from("data", name)]
        tables = ", ".join(shown.get(name, []))
        rows.append([name, cfg.METHOD.NAME, scenario, *parts, tables, text])
    blocks = [tabulate(rows, headers, "plain", disable_numparse=True)]
    for folder in ("detector", "data", "scenario", "method"):
        rows = [[name, first_comment(find_config(name))] for name in folder_names(folder)]
        table = tabulate(rows, tablefmt="plain", disable_numparse=True)
        blocks.append(f"parts: {folder}\n{table}")
    return "\n\n".join(blocks)
