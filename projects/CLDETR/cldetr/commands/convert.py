"""`cldetr convert`: turn official checkpoints and backbones into files that MODEL.WEIGHTS takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from cldetr.data.manifest import load_manifest
from cldetr.engine.checkpoint import load_state, save_state
from cldetr.errors import InputError
from cldetr.modeling.convert import COCO, KINDS, Converted, convert_checkpoint
from cldetr.settings import suggest


class _Category(msgspec.Struct):
    id: int
    name: str


class _Annotations(msgspec.Struct):
    categories: list[_Category]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("source", type=Path, help="the checkpoint; no code in it is run")
    parser.add_argument("out", type=Path, help="where to write ours, ending in .pth")
    parser.add_argument(
        "--kind",
        choices=("auto", *KINDS),
        default="auto",
        help="what it is a checkpoint of; 'auto' tells by the names of its weights",
    )
    parser.add_argument(
        "--categories",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="COCO annotation files with the categories of the class head (default: COCO's 80)",
    )
    parser.add_argument(
        "--seen",
        nargs="+",
        metavar="NAME",
        help="the categories that it may know, to be the first phase (MODEL.DETECTOR): names, a "
        "file with a name in each line, or the manifest of a scenario (.json), whose first phase "
        "is meant. Rows of other categories are dropped; with --kind cl_detr they stay, because "
        "the released code trains them as negatives",
    )


def run(args: argparse.Namespace) -> int:
    """Converts one file and says what became of every weight."""
    if args.out.suffix != ".pth":
        raise InputError(f"the output file must end in .pth: {args.out}")
    categories = read_categories(args.categories) if args.categories else COCO
    # Official checkpoints hold their command line as a Namespace, which is plain data.
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = load_state(args.source)
    seen = read_seen(args.seen, categories) if args.seen else None
    if seen is not None and args.kind != "cl_detr":
        categories = tuple(category for category in categories if category[1] in seen)
    converted = convert_checkpoint(content, args.kind, categories)
    about: dict[str, Any] = {
        "kind": converted.kind,
        "categories": None
        if converted.categories is None
        else [{"id": number, "name": name} for number, name in converted.categories],
        "settings": converted.settings,
    }
    if seen is not None:
        about["seen"] = seen
    save_state(args.out, {"model": converted.model, "cldetr": about})
    _report(converted, args.out)
    return 0


def read_categories(files: Sequence[Path]) -> tuple[tuple[int, str], ...]:
    """Categories of annotation files: ascending ids per file, in the order of the files."""
    found: dict[int, str] = {}
    for file in files:
        try:
            categories = msgspec.json.decode(file.read_bytes(), type=_Annotations).categories
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise InputError(f"{file} is not a COCO annotation file: {error}") from error
        for category in sorted(categories, key=lambda category: category.id):
            if found.setdefault(category.id, category.name) != category.name:
                raise InputError(
                    f"category {category.id} is {found[category.id]!r} in one file and "
                    f"{category.name!r} in {file}"
                )
    if not found:
        raise InputError(f"no categories in {', '.join(map(str, files))}")
    return tuple(found.items())


def read_seen(words: Sequence[str], categories: Sequence[tuple[int, str]]) -> list[str]:
    """The names that --seen gives, all of them among the categories."""
    names, path = list(words), Path(words[0])
    if len(words) == 1 and path.is_file():
        if path.suffix == ".json":
            scenario = load_manifest(path)
            names = [scenario.categories[label].name for label in scenario.phases[0].classes]
        else:
            names = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    known = [name for _, name in categories]
    unknown = [f"{name!r}{suggest(name, known)}" for name in names if name not in known]
    if unknown:
        raise InputError.listing("--seen names what the checkpoint does not have:", unknown)
    return names


def _report(converted: Converted, out: Path) -> None:
    weights = sum(tensor.numel() for tensor in converted.model.values())
    print(f"{converted.kind}: {len(converted.model)} tensors, {weights:,} numbers → {out}")
    if converted.categories is not None:
        print(f"class head: {len(converted.categories)} categories")
    elif converted.kind == "up_detr":
        print("class head: none; it starts from its initial values")
    for reason, keys in converted.dropped.items():
        print(f"dropped, {reason}: {len(keys)}")
        for key in keys:
            print(f"  {key}")
    print("it fits a detector with")
    for key, value in converted.settings.items():
        print(f"  MODEL.{key} {value}")
