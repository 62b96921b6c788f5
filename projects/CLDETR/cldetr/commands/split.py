"""`cldetr split`: divide a data set into phases; print, audit and write the result."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from tabulate import tabulate

from cldetr.data.audit import audit_scenario
from cldetr.data.coco import CocoData
from cldetr.data.coco_writer import write_subset
from cldetr.data.datasets import read_dataset
from cldetr.data.manifest import save_manifest
from cldetr.errors import InputError
from cldetr.files import write_json
from cldetr.published import (
    find_published,
    is_published,
    order_source,
    published_orders,
    published_scenarios,
)
from cldetr.report.pages import write_audit_page
from cldetr.scenario import (
    BASE,
    Scenario,
    make_domain_scenario,
    make_scenario,
    make_separate_scenario,
)

ORDERS = ("id", "seed", "released", *published_orders())
PROTOCOLS = {
    "strict": "disjoint images",
    "traditional": "images with objects of the phase",
    "loco": "each image in one of the phases that it shows",
    "domains": "the same classes in each data set",
}
WIDTH = 96  # columns of the printed tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--list", action="store_true", help="list the published scenarios and orders, and stop"
    )
    what = parser.add_argument_group("what to divide")
    what.add_argument(
        "--annotations",
        metavar="DATA",
        help="COCO instances file, or any entry of DATASETS.TRAIN: voc:DIR/trainval, "
        "yolo:data.yaml/train, the name of a registered data set",
    )
    what.add_argument(
        "--phases-from", nargs="+", metavar="DATA", help="instead: a data set for each phase"
    )
    what.add_argument(
        "--image-root",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="image folder of COCO files (one, or one per file; default: the file's folder)",
    )
    what.add_argument(
        "--bad-boxes",
        choices=("stop", "drop"),
        default="stop",
        help="stop at boxes that make no sense, or drop and count them",
    )
    how = parser.add_argument_group("how to divide it")
    how.add_argument(
        "--scenario",
        metavar="SIZES|NAME",
        help="classes per phase: 70+10, 40+20x2, 15+1+1; or a published scenario: voc/19+1",
    )
    how.add_argument(
        "--phases",
        metavar="NAMES|FILE",
        help="instead: category names, 'cat,dog;bird' (';' between phases), or a file with a line "
        "per phase or a JSON list of lists",
    )
    how.add_argument(
        "--protocol",
        choices=tuple(PROTOCOLS),
        help="disjoint images (the paper's), all images with an object of the phase, each image in "
        "one of the phases that it shows, or with --phases-from the same classes in each data set, "
        "a domain (default: strict, or the published scenario's)",
    )
    how.add_argument(
        "--order",
        default="id",
        metavar="|".join((*ORDERS, "FILE")),
        help="of the classes: by id (default), shuffled by --class-seed, all that the released "
        "code does, PseDet's, or a file with one name a line or a JSON list",
    )
    how.add_argument("--class-seed", type=int, metavar="N", help="default: 0")
    how.add_argument("--data-seed", type=int, metavar="N", help="shuffles the images; default: 0")
    how.add_argument("--partial", action="store_true", help="allow classes that no phase learns")
    out = parser.add_argument_group("what to write")
    out.add_argument(
        "--out", type=Path, metavar="DIR", help="for manifest.json, audit.json and audit.html"
    )
    out.add_argument("--write-json", action="store_true", help="and a COCO file per phase")


def run(args: argparse.Namespace) -> int:
    """Makes the scenario, prints it, and writes what was asked for."""
    if args.list:
        print(list_published())
        return 0
    if args.write_json and args.out is None:
        raise InputError("--write-json needs --out DIR")
    scenario, data = _make(args)
    audit = audit_scenario(scenario, data)
    for line in describe(scenario, audit, data):
        print(line)
    if args.out is not None:
        digest = save_manifest(scenario, args.out / "manifest.json")
        write_json(args.out / "audit.json", audit)
        write_audit_page(scenario, audit, args.out / "audit.html")
        print(
            f"\nwrote {args.out / 'manifest.json'} ({digest[:12]}), {args.out / 'audit.json'} and "
            f"the page {args.out / 'audit.html'}"
        )
        written = [args.out / f"phase{phase.index}.json" for phase in scenario.phases]
        if args.write_json:
            learnt = scenario.seen(len(scenario.phases))  # training on the files learns these alone
            for phase, path in zip(scenario.phases, written, strict=True):
                source = data[phase.source]
                write_subset(path, phase.subset(), source, scenario.categories, learnt)
                print(f"wrote {path}")
        for path in sorted(set(args.out.glob("phase*.json")) - set(written * args.write_json)):
            print(f"note: {path} is an older file and not of this scenario")
    return 0


def list_published() -> str:
    """The published scenarios with their protocols and data, and where the lists are from."""
    scenarios = published_scenarios()
    rows = [
        [name, "+".join(str(len(phase)) for phase in each.phases), each.protocol, each.data]
        for name, each in scenarios.items()
    ]
    headers = ["scenario", "classes", "protocol", "data"]
    blocks = [tabulate(rows, headers, "plain", disable_numparse=True)]
    blocks += [f"order {name} of the classes: {order_source(name)}" for name in published_orders()]
    families = {name.partition("/")[0]: each for name, each in scenarios.items()}
    blocks += [f"{name}: {each.source}. {each.note}" for name, each in families.items()]
    return "\n\n".join([blocks[0], *(textwrap.fill(text, WIDTH) for text in blocks[1:])])


def describe(
    scenario: Scenario, audit: Mapping[str, Any], data: Mapping[str, CocoData]
) -> Iterator[str]:
    """The lines that the command prints: phases, objects per class, and the audit's findings."""
    seeds = [
        f"{what} seed {seed}"
        for what, seed in (("class", scenario.class_seed), ("data", scenario.data_seed))
        if seed is not None
    ]
    details = [
        f"{scenario.protocol} ({PROTOCOLS.get(scenario.protocol, 'a data set per phase')})",
        f"classes by {scenario.order}",
        *seeds,
    ]
    yield f"{scenario.name}: {', '.join(details)}"
    for source, one in data.items():
        yield f"{source}: {one.json_file} ({len(one.image_ids):,} images)"
    yield ""
    yield from _phase_table(audit["phases"])
    yield ""
    yield from _size_table(audit["phases"])
    for phase in audit["phases"]:
        yield ""
        yield f"phase {phase['index']}, instances per class"
        yield from _columns(phase["instances_per_class"])
    yield ""
    yield from _findings(scenario, audit)


def _phase_table(phases: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = ("index", "classes", "images", "annotated", "empty", "instances", "crowd")
    cells = [["phase", *keys[1:], "old hidden", "later hidden"]]
    for phase in phases:
        values = [*(phase[key] for key in keys), phase["hidden"]["old"], phase["hidden"]["future"]]
        cells.append([f"{value:,}" for value in values])
    return _align_right(cells)


def _size_table(phases: Sequence[Mapping[str, Any]]) -> list[str]:
    counts = ["phase", "objects per image: mean", "max", "max, hidden too"]
    cells = [[*counts, "√area of boxes in px: 5%", "50%", "95%"]]
    for phase in phases:
        objects, sizes = phase["objects_per_image"], phase["box_sizes"]
        cells.append(
            [str(phase["index"]), f"{objects['mean']:.1f}", *map(str, list(objects.values())[1:])]
            + ["–" if size is None else f"{size:.0f}" for size in sizes.values()]
        )
    return _align_right(cells)


def _align_right(cells: Sequence[Sequence[str]]) -> list[str]:
    right = ["right"] * len(cells[0])
    return tabulate(cells, (), "plain", disable_numparse=True, colalign=right).splitlines()


def _columns(counts: Mapping[str, int]) -> Iterator[str]:
    """Names with counts, the most frequent first, down the columns of a page."""
    ranked = [(name[:30], counts[name]) for name in sorted(counts, key=lambda name: -counts[name])]
    cells = tabulate(ranked, tablefmt="plain", intfmt=",", disable_numparse=[0]).splitlines()
    columns = max(WIDTH // (len(cells[0]) + 4), 1)
    rows = -(-len(cells) // columns)
    for row in range(rows):
        yield "  " + "    ".join(cells[row::rows])


def _findings(scenario: Scenario, audit: Mapping[str, Any]) -> Iterator[str]:
    yield "audit"
    shared = [
        f"phases {pair['phases'][0]} and {pair['phases'][1]} share {pair['images']:,}"
        for pair in audit["overlap"]
    ]
    disjoint = scenario.protocol in ("strict", "loco")
    wrong = f" (the {scenario.protocol} protocol allows none)" if shared and disjoint else ""
    yield f"  image overlap: {'; '.join(shared) or 'none'}{wrong}"
    for phase in audit["phases"]:
        hidden = phase["hidden"]
        total = sum(hidden.values())
        never = f", {hidden['never']:,} of none" if hidden["never"] else ""
        yield (
            f"  phase {phase['index']}: {total:,} objects left unannotated in "
            f"{phase['images_with_hidden']:,} images ({hidden['old']:,} of old classes, "
            f"{hidden['future']:,} of later{never})"
        )
        if phase["dropped"]:
            yield f"  phase {phase['index']}: boxes dropped at loading: {phase['dropped']:,}"
    absent = [
        f"{entry['class']} (phase {entry['phase']})" for entry in audit["classes_without_instances"]
    ]
    yield f"  classes without instances: {', '.join(absent) or 'none'}"
    if audit["classes_never_learnt"]:
        yield f"  classes never learnt: {', '.join(audit['classes_never_learnt'])}"
    if audit["unused_images"]:
        yield f"  images in no phase: {audit['unused_images']:,}"
    if audit["repeated_files"]:
        yield f"  images that share their file with another: {audit['repeated_files']:,}"


def _make(args: argparse.Namespace) -> tuple[Scenario, dict[str, CocoData]]:
    if args.phases_from:
        if args.annotations or args.scenario or args.phases:
            raise InputError(
                "--phases-from makes a phase of each file: give it without --annotations, "
                "--scenario and --phases"
            )
        sets = [
            replace(data, name=f"phase{index}")
            for index, data in enumerate(_read(args.phases_from, args), start=1)
        ]
        make = make_domain_scenario if args.protocol == "domains" else make_separate_scenario
        return make(sets), {data.name: data for data in sets}
    if args.protocol == "domains":
        raise InputError("--protocol domains needs a data set for each domain: --phases-from")
    if args.annotations is None:
        raise InputError("give --annotations DATA, or --phases-from DATA DATA …")
    if (args.scenario is None) == (args.phases is None):
        raise InputError("give either --scenario SIZES|NAME or --phases NAMES")
    order = args.order
    if order not in ORDERS:
        if not os.path.isfile(order):
            raise InputError(f"--order {order}: choose {', '.join(ORDERS)} or the file of an order")
        order = _read_list(order, list[str])
    phases = args.scenario if args.phases is None else _read_phases(args.phases)
    [data] = _read([args.annotations], args)
    scenario = make_scenario(
        phases,
        data,
        protocol=args.protocol or _own_protocol(args.scenario),
        order=order,
        class_seed=args.class_seed,
        data_seed=args.data_seed,
        partial=args.partial,
    )
    return scenario, {BASE: data}


def _own_protocol(scenario: str | None) -> str:
    """The protocol of a published scenario; the paper's otherwise."""
    if scenario is not None and is_published(scenario):
        return find_published(scenario).protocol
    return "strict"


def _read(references: Sequence[str], args: argparse.Namespace) -> list[CocoData]:
    """Reads data sets; the images of a COCO file are in its folder where none is given."""
    roots = args.image_root or [os.path.dirname(reference) for reference in references]
    roots = roots * len(references) if len(roots) == 1 else roots
    if len(roots) != len(references):
        raise InputError(
            f"--image-root names {len(roots)} folders for {len(references)} files: give one, or "
            "one each"
        )
    return [
        read_dataset(reference, bad_boxes=args.bad_boxes, image_root=root)
        for reference, root in zip(references, roots, strict=True)
    ]


def _read_phases(text: str) -> list[list[str]]:
    """Category names per phase, from the command line or from a file."""
    lines = _read_list(text, list[list[str]]) if os.path.isfile(text) else text.split(";")
    return [
        [name.strip() for name in line.split(",") if name.strip()]
        if isinstance(line, str)
        else line
        for line in lines
    ]


def _read_list(path: str, kind: type[list[Any]]) -> list[Any]:
    """A JSON list of a kind, or the non-empty lines of a text file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            return msgspec.json.decode(text, type=kind)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise InputError(
            f"{path} cannot be read as a list of category names (of such lists, for phases): "
            f"{error}"
        ) from None
    return [line.strip() for line in text.splitlines() if line.strip()]
