"""LazyConfigs: a Python config becomes the config that a YAML file becomes.

A LazyConfig is Python code and is executed: use only files that you trust. It defines

    model                              L(...) that builds a detector; it has a `num_classes`. None
                                       where the detector of `train.detector` brings its own
    dataloader.train, .test            settings, or an L(...) with `dataset.names`
    dataloader.evaluator               one more evaluator (or a list) beside ours: L(...)
    optimizer                          settings, or an L(...) with `lr` and `params`
    lr_multiplier                      an fvcore ParamScheduler over each stage: L(...)
    train                              output_dir, init_checkpoint, amp, clip_grad, eval_period …
    scenario, method, schedule         the fields of the dataclasses of the same names
    input, datasets, solver, test      any other key of the YAML configs, in lower case

The L(...) parts are kept in the config as plain data under LAZY, so that RUN/config.yaml is the
whole configuration of such a run, too. Restoring them from data runs no code but constructors of
packages that are trusted: models of Detectron2, torch and this project, and packages that the user
has named (`trust_package`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

from detectron2.config import CfgNode, LazyConfig, instantiate
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils.registry import locate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from cldetr.errors import InputError
from cldetr.methods.method import Method
from cldetr.settings import (
    ScenarioSettings,
    Schedule,
    add_keys,
    leaves,
    parse_value,
    suggest,
)

_SETTINGS = {"scenario": ScenarioSettings(), "method": Method(), "schedule": Schedule()}
_PARTS = (
    *("model", "optimizer", "lr_multiplier"),
    *("dataloader.train", "dataloader.test", "dataloader.evaluator"),
)
# The names of detrex and of Detectron2's lazy configs, and the YAML keys that they stand for.
_KEYS = {
    "dataloader.train.dataset.names": "DATASETS.TRAIN",
    "dataloader.train.total_batch_size": "SOLVER.IMS_PER_BATCH",
    "dataloader.train.num_workers": "DATALOADER.NUM_WORKERS",
    "dataloader.test.dataset.names": "DATASETS.TEST",
    "optimizer.lr": "SOLVER.BASE_LR",
    "optimizer.weight_decay": "SOLVER.WEIGHT_DECAY",
    "optimizer.backbone_multiplier": "SOLVER.BACKBONE_MULTIPLIER",
    "optimizer.lr_multipliers": "SOLVER.LR_MULTIPLIERS",
    "train.output_dir": "OUTPUT_DIR",
    "train.init_checkpoint": "MODEL.WEIGHTS",
    "train.detector": "MODEL.DETECTOR",
    "train.device": "MODEL.DEVICE",
    "train.seed": "SEED",
    "train.amp.enabled": "SOLVER.AMP.ENABLED",
    "train.amp.dtype": "SOLVER.AMP.DTYPE",
    "train.float32_precision": "FLOAT32_PRECISION",
    "train.clip_grad.enabled": "SOLVER.CLIP_GRADIENTS.ENABLED",
    "train.clip_grad.max_norm": "SOLVER.CLIP_GRADIENTS.CLIP_VALUE",
    "train.clip_grad.norm_type": "SOLVER.CLIP_GRADIENTS.NORM_TYPE",
    "train.accumulate": "SOLVER.ACCUMULATE",
    "train.checkpointer.period": "SOLVER.CHECKPOINT_PERIOD",
    "train.eval_period": "TEST.EVAL_PERIOD",
    "train.log_period": "LOG_PERIOD",
    "train.log_images": "LOG_IMAGES",
    "train.vis_period": "VIS_PERIOD",
    "train.wandb.enabled": "WANDB.ENABLED",
    "train.wandb.project": "WANDB.PROJECT",
    "train.wandb.name": "WANDB.NAME",
    "train.report": "REPORT",
}
_SECTIONS = ("input", "datasets", "solver", "test", "dataloader", *_SETTINGS)

# Where what a `_target_` names must be defined; packages of the user's join by `trust_package`.
_trusted = [
    *("cldetr.modeling.", "cldetr.data.", "cldetr.evaluation.", "detectron2.modeling."),
    *("detectron2.layers.", "detectron2.data.", "detectron2.evaluation.", "detectron2.solver."),
    *("torch.nn.", "torch.optim.", "fvcore.common.param_scheduler."),
]
_named: set[str] = set()  # every `_target_` of the LazyConfig files that were run


def trust_package(name: str) -> None:
    """Imports a module of the user's and lets configs name what its package defines."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"cannot import {name}: {error}") from error
    _trusted.append(f"{name.partition('.')[0]}.")


def read_lazy_config(
    path: str, overrides: Sequence[str], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Runs a LazyConfig file; returns the YAML keys that it stands for, and their values.

    Args:
        path: of the file.
        overrides: `key=value` words.
        known: every key of the YAML configs, with its default.
    """
    try:
        tree = LazyConfig.load(path)
    except FileNotFoundError as error:
        raise InputError(f"cannot read the config {path}: {error}") from error
    for name in _targets(_plain(tree, path)):  # the user has run code that names them
        _named.add(name)
        package = f"{name.partition('.')[0]}."
        if not any(known.startswith(package) for known in _trusted):
            _trusted.append(package)
    for text in overrides:
        _override(tree, text, known)
    return _to_keys(_plain(tree, path), path, known)


def lazy_part(cfg: CfgNode, name: str, **changes: Any) -> Any:
    """Builds a part of a LazyConfig, such as "dataloader.train"; None where the config has none.

    Args:
        cfg: the config.
        name: the part.
        changes: values of fields of the part, which must have these fields; `__` stands for a dot.
    """
    node: Any = OmegaConf.create(json.loads(json.dumps(cfg.LAZY)), flags={"allow_objects": True})
    for word in name.split("."):
        node = node.get(word) if isinstance(node, DictConfig) else None
    if node is None:
        return None
    for target in _targets(OmegaConf.to_container(node)):
        if not _is_trusted(target):
            raise InputError(
                f"the config names {target!r}, which is not of a package that may be run: if you "
                "trust it, import its module first (`cldetr --import MODULE …`)"
            )
    for key, value in changes.items():
        field = key.replace("__", ".")
        first = field.partition(".")[0]
        if isinstance(node, DictConfig) and first not in node:
            raise InputError(f"{name} has no {first}: the trainer sets {field} for each stage")
        OmegaConf.update(node, field, value, merge=False, force_add=True)
    return (
        [instantiate(each) for each in node] if isinstance(node, ListConfig) else instantiate(node)
    )


@META_ARCH_REGISTRY.register()
def LazyModel(cfg: CfgNode) -> nn.Module:  # noqa: N802 - a name in a registry of classes
    """The `model` of a LazyConfig as a meta-architecture."""
    model = lazy_part(cfg, "model", num_classes=cfg.MODEL.DETR.NUM_CLASSES)
    if model is None:
        raise InputError("META_ARCHITECTURE LazyModel is for LazyConfigs: the config has no model")
    return model


def _to_keys(tree: dict[str, Any], path: str, yaml_keys: Collection[str]) -> dict[str, Any]:
    """The YAML keys that the plain data of a LazyConfig stands for."""
    values: dict[str, Any] = {}
    if "_target_" in (tree.get("model") or {}):
        values["MODEL.META_ARCHITECTURE"] = "LazyModel"
    elif (tree.get("scenario") or {}).get("protocol") != "extend":  # a detector is given there
        raise InputError(f"{path} defines no model: write model = L(Detector)(...)")
    problems = []
    for name, settings in _SETTINGS.items():
        if name in tree:
            node = CfgNode()
            add_keys(node, settings)
            values |= leaves(node, f"{name.upper()}.")
            tree[name] = _switch(tree[name], name, yaml_keys)
    for name in _PARTS:
        part = _take(tree, name)
        if part is not None:  # a list of parts is one value
            items = dict(leaves({name: part}))
            values |= {f"LAZY.{key}": value for key, value in items.items()}
            # What the run must know of it.
            values |= {_KEYS[key]: value for key, value in items.items() if key in _KEYS}
    known = [*_KEYS, *(key.lower() for key in yaml_keys)]
    for key, value in leaves(tree):
        target = _KEYS.get(key, key.upper() if key.split(".")[0] in _SECTIONS else "")
        if target not in yaml_keys:
            problems.append(f"unknown key {key}{suggest(key, known)}")
        elif isinstance(value, str) and target in ("DATASETS.TRAIN", "DATASETS.TEST"):
            values[target] = [value]
        else:
            values[target] = value
    if problems:
        raise InputError.listing(f"in {path}:", problems)
    return values


def _switch(node: Any, path: str, yaml_keys: Collection[str]) -> Any:
    """Adds `enabled` to the parts of a settings section that may be absent: False where None."""
    if f"{path}.enabled".upper() in yaml_keys and (node is None or isinstance(node, Mapping)):
        node = {"enabled": node is not None, **(node or {})}
    if isinstance(node, Mapping):
        return {key: _switch(value, f"{path}.{key}", yaml_keys) for key, value in node.items()}
    return node


def _take(tree: dict[str, Any], name: str) -> Any:
    """Removes a part that is an L(...), or a list of them, from the tree and returns it."""
    *parents, last = name.split(".")
    node: Any = tree
    for parent in parents:
        node = node.get(parent) or {}
    part = node.get(last)
    lazy = [part] if isinstance(part, Mapping) else part if isinstance(part, list) else []
    if lazy and all(isinstance(each, Mapping) and "_target_" in each for each in lazy):
        return node.pop(last)
    return None


def _override(tree: DictConfig, text: str, yaml_keys: Mapping[str, Any]) -> None:
    """Sets one existing key, or one field of a settings section, from `key=value`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"overrides of a LazyConfig are key=value, not {text!r}")
    known = _known_keys(tree, yaml_keys)
    if key not in known:
        raise InputError(f"unknown key {key} on the command line{suggest(key, known)}")
    parsed = parse_value(value)
    if isinstance(yaml_keys.get(_KEYS.get(key, key.upper())), str) and not isinstance(parsed, str):
        parsed = value.strip("'\"")  # a text stays a text, even one that looks like a number
    try:
        targets = [*_targets({"_target_": parsed} if key.endswith("_target_") else parsed)]
        OmegaConf.update(tree, key, parsed, merge=False, force_add=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise InputError(f"{key} cannot be {value[:60]!r}: {error}") from error
    strange = [name for name in targets if not _is_trusted(name)]
    if strange:
        raise InputError(
            f"{key}: _target_ may only name what {', '.join(_trusted)}… define, not {strange[0]!r}"
        )


def _known_keys(tree: DictConfig, yaml_keys: Collection[str]) -> list[str]:
    """Every key that an override may set: those of the file, all settings, and what holds them."""
    settings = [key.lower() for key in yaml_keys if key.split(".")[0].lower() in _SECTIONS]
    settings = [key for key in settings if not key.endswith(".enabled") or key.startswith("input")]
    present = [key for key, _ in leaves(cast("dict[str, Any]", OmegaConf.to_container(tree)))]
    words = [key.split(".") for key in (*settings, *present)]
    above = {".".join(key[:depth]) for key in words for depth in range(1, len(key))}
    return [*_KEYS, *settings, *present, *sorted(above)]


def _is_trusted(name: str) -> bool:
    """Whether a dotted name leads to something that a trusted package defines, not just to it.

    `torch.nn.modules.os.system` begins well, but `system` is not of torch.
    """
    if name in _named:
        return True
    if not name.startswith(tuple(_trusted)):
        return False
    found = _locate(name)
    # A module that is run as a script, or is itself a package, has its name without a dot.
    return f"{getattr(found, '__module__', '')}.".startswith(tuple(_trusted))


def _locate(name: str) -> Any:
    """What a dotted name leads to, None where it leads to nothing."""
    with contextlib.suppress(Exception):  # whatever importing a module may raise
        return locate(name)
    return None


def _targets(node: Any) -> Iterator[str]:
    """Every `_target_` in a tree."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield str(node["_target_"])
        node = list(node.values())
    if isinstance(node, (list, tuple)):
        for item in node:
            yield from _targets(item)


def _plain(node: Any, path: str) -> dict[str, Any]:
    """A tree as plain data: classes and functions as their dotted names."""
    return cast("dict[str, Any]", _tidy(OmegaConf.to_container(node, resolve=False), path))


def _tidy(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _tidy(item, path) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tidy(item, path) for item in value]
    if callable(value):
        name = f"{value.__module__}.{value.__qualname__}"
        if _locate(name) is not value:
            raise InputError(
                f"{path}: {name} cannot be found again by its name; define it at the top of a "
                "module and import it from there"
            )
        return name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(f"{path}: {value!r} is an object; write it as L(...)")
