"""The configs that come with the package: found by name, and composed.

`configs/` has files and, in `runs.yaml`, named runs: lists of parts with a few keys of their own.
Names of files and runs are unique, so that a name alone says which one is meant:

    find_config("70_10")                             the file configs/70_10.yaml
    compose(["70_10_lwf"])                           a run of runs.yaml, as a full config
    compose(["shapes", "icarl"], ["SEED", "3"])      parts and overrides of your own
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode

from cldetr.config import default_config, merge_keys, merge_overrides
from cldetr.errors import InputError
from cldetr.settings import leaves, suggest

# In a checkout the folder is a link to the repository's; a wheel has a copy of it.
CONFIGS = Path(str(importlib.resources.files("cldetr") / "configs"))
_RUNS = CONFIGS / "runs.yaml"


@dataclass(frozen=True)
class NamedRun:
    """An entry of runs.yaml: configs by name, each over those before it, and the keys left."""

    name: str
    parts: tuple[str, ...]
    about: str
    keys: Mapping[str, Any] = field(default_factory=dict)


def find_config(name: str) -> Path:
    """The YAML file of that name, such as `70_10`; `lazy/70_10.py` is the LazyConfig of it."""
    path = CONFIGS / name
    if path.suffix == ".py" and path.is_file():
        return path
    files = config_files()
    stem = name.removesuffix(".yaml")
    if stem in files:
        return files[stem]
    if stem in named_runs():
        raise InputError(
            f"{stem} is a run of {_RUNS}, not a file: `cldetr configs {stem} --write FILE.yaml` "
            "makes one of it"
        )
    known = [*files, *named_runs()]
    raise InputError(
        f"no config is called {name!r}{suggest(name, known)} (`cldetr configs` lists all)"
    )


@functools.cache
def config_files() -> dict[str, Path]:
    """Every YAML config by its name; those to start come before the parts."""
    found = [path for path in [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("*/*.yaml")] if path != _RUNS]
    found.sort(key=lambda path: (path.parent != CONFIGS, path))
    files = {path.stem: path for path in found}
    assert len(files) == len(found), "names of configs are unique over all folders"
    return files


@functools.cache
def named_runs() -> dict[str, NamedRun]:
    """The runs of runs.yaml by name."""
    content = yaml.safe_load(_RUNS.read_text(encoding="utf-8"))
    return {
        name: NamedRun(name, tuple(run["parts"]), run["about"], dict(leaves(run.get("set") or {})))
        for name, run in content["runs"].items()
    }


def compose(names: Sequence[str], overrides: Sequence[str] = ()) -> CfgNode:
    """A full config from files and runs by name, each over those before it.

    Args:
        names: names as `cldetr configs` lists them.
        overrides: `KEY VALUE …` words, over all of them.
    """
    cfg = default_config()
    for name in names:
        merge_keys(cfg, _keys(name), origin=name)
    cfg.OUTPUT_DIR = f"output/{'_'.join(names)}"
    merge_overrides(cfg, overrides)
    return cfg


def parts_of(name: str) -> list[str]:
    """Names of all configs that a run or a file, by name or by path, is made of; itself last."""
    run = named_runs().get(name)
    if run is not None:
        bases: Sequence[str] = run.parts
    else:
        path = Path(name) if Path(name).is_file() else find_config(name)
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        named = content.get("_BASE_", []) if isinstance(content, Mapping) else []
        bases = [str(path.parent / base) for base in ([named] if isinstance(named, str) else named)]
    return [*(part for base in bases for part in parts_of(base)), Path(name).stem]


def part_from(folder: str, name: str) -> str:
    """The last part of a config that is of a folder, such as "detector"; "" where none is."""
    found = [part for part in parts_of(name) if part in folder_names(folder)]
    return found[-1] if found else ""


def folder_names(folder: str) -> list[str]:
    """Names of the configs in a folder, such as "detector"."""
    return [name for name, path in config_files().items() if path.parent.name == folder]


def dump_changes(cfg: CfgNode) -> str:
    """The keys of a config that differ from their defaults, as a YAML config."""
    defaults = dict(leaves(default_config()))
    nested: dict[str, Any] = {"VERSION": cfg.VERSION}
    for key, value in leaves(cfg):
        if key not in defaults or defaults[key] != value:
            *parents, leaf = key.split(".")
            node = nested
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
    return yaml.safe_dump(nested, sort_keys=False, allow_unicode=True, default_flow_style=None)


def first_comment(path: Path) -> str:
    """What a config file says of itself: its first sentence."""
    comment = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8"))
    text = " ".join(line.lstrip("# ") for line in comment[0].splitlines()) if comment else ""
    return re.split(r"\.(?:\s+(?=[A-Z])|$)", text)[0]  # Eq. 6 does not end a sentence


def _keys(name: str) -> dict[str, Any]:
    """The keys of a file or a run, with those of its parts below them."""
    run = named_runs().get(name)
    if run is None:
        return dict(leaves(CfgNode.load_yaml_with_base(str(find_config(name)))))
    parts = [*map(_keys, run.parts), run.keys]
    return {key: value for keys in parts for key, value in keys.items()}
