"""The LazyConfig front door: a Python config becomes a recipe.

A LazyConfig is Python code and is executed: use only files that you trust. Overrides on the command
line are data: they may only change keys that exist, and name as `_target_` only parts of models,
of this project, Detectron2 or torch.

The file defines `model` (a lazy tree that ends in a detector), and any of `data`, `scenario`,
`method`, `schedule`, `optimizer`, `augmentation`, `seed`, `runtime` as plain dictionaries with the
fields of the dataclasses in `cldetr.engine.recipe` and `cldetr.methods.method`.
"""

from __future__ import annotations

import dataclasses
import pydoc
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from detectron2.config import LazyConfig, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cldetr.config import suggest
from cldetr.engine.recipe import ModelSettings, Recipe
from cldetr.engine.settings import build_settings
from cldetr.errors import InputError
from cldetr.modeling.detector import Detector

_MODEL_PARTS = ("cldetr.modeling.", "detectron2.modeling.", "detectron2.layers.", "torch.nn.")
_SECTIONS = tuple(
    field.name for field in dataclasses.fields(Recipe) if field.name not in ("model", "seed")
)


def recipe_from_lazy(path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Runs a LazyConfig file and applies `key=value` overrides."""
    cfg = LazyConfig.load(path)
    for text in overrides:
        _override(cfg, text)
    unknown = [
        f"unknown part {key}{suggest(key, (*_SECTIONS, 'model', 'seed', 'start'))}"
        for key in cfg
        if key not in (*_SECTIONS, "model", "seed", "start")
    ]
    if unknown:
        raise InputError.listing(f"in {path}:", unknown)
    hints = typing.get_type_hints(Recipe)
    sections = {
        name: build_settings(hints[name], _container(cfg[name]), name)
        for name in _SECTIONS
        if name in cfg
    }
    seed = cfg.get("seed", 0)
    if type(seed) is not int:
        raise InputError(f"seed takes an int, not {seed!r}")
    return Recipe(model=_model(cfg), seed=seed, **sections)


def model_from_tree(description: Mapping[str, Any]) -> ModelSettings:
    """Turns a lazy tree, as a recipe or a weights file holds it, into a model again.

    The tree is data from elsewhere: it may name parts of models only, nothing that merely happens
    to be importable through them.
    """
    for name in _targets(description):
        if not _is_model_part(name):
            raise InputError(
                f"the model is described by {name!r}, which is no part of a model; give the "
                "LazyConfig that it was made with, if you trust it"
            )
    return _settings(OmegaConf.create(dict(description)))


def _is_model_part(name: str) -> bool:
    """Whether a dotted name leads to something that is defined where models are, not just to it.

    `torch.nn.modules.os.system` begins well, but `system` is not of torch.
    """
    try:
        found = pydoc.locate(name) if name.startswith(_MODEL_PARTS) else None
    except pydoc.ErrorDuringImport:
        return False
    return str(getattr(found, "__module__", "")).startswith(_MODEL_PARTS)


def _targets(node: Any) -> Iterator[str]:
    """Every `_target_` in a tree."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield str(node["_target_"])
        node = list(node.values())
    if isinstance(node, (list, tuple)):
        for item in node:
            yield from _targets(item)


def _model(cfg: DictConfig) -> ModelSettings:
    start = _container(cfg.get("start", {}))
    unknown = [f"start.{key}" for key in start if key not in ("weights", "detector")]
    if unknown:
        raise InputError.listing("start takes weights and detector, not:", unknown)
    return _settings(cfg.model, **start)


def _settings(tree: DictConfig, **start: str) -> ModelSettings:
    def build(num_classes: int) -> Detector:
        own = tree.copy()
        own.num_classes = num_classes
        return instantiate(own)

    return ModelSettings(
        _container(tree), build, start.get("weights", ""), start.get("detector", "")
    )


def _override(cfg: DictConfig, text: str) -> None:
    """Sets one existing key, or one field of a settings section, from `key=value`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"overrides of a LazyConfig are key=value, not {text!r}")
    node: Any = cfg
    hint: Any = Recipe
    for word in key.split("."):
        known = _known(node, hint)
        if word not in known:
            raise InputError(f"unknown key {key} on the command line: {word}{suggest(word, known)}")
        node = node.get(word) if isinstance(node, DictConfig) else None
        hint = _dataclass_in(typing.get_type_hints(hint).get(word)) if hint else None
    try:
        parsed = yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"cannot read the value of {key}: {error}") from error
    try:
        names = list(_targets({"_target_": parsed} if key.endswith("_target_") else parsed))
        strange = [name for name in names if not _is_model_part(name)]
        if strange:
            raise InputError(
                f"{key}: _target_ may only name what {', '.join(_MODEL_PARTS)}… define, "
                f"not {strange[0]!r}"
            )
        OmegaConf.update(cfg, key, parsed, merge=False, force_add=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise InputError(f"{key} cannot be {value[:60]!r}: {error}") from error


def _known(node: Any, hint: Any) -> list[str]:
    """Keys that may be set below a node: those present, and the fields of its dataclass."""
    present = [str(key) for key in node] if isinstance(node, DictConfig) else []
    if hint is ModelSettings:
        return present  # the model is a lazy tree, not this dataclass
    return present + [field.name for field in dataclasses.fields(hint)] if hint else present


def _dataclass_in(hint: Any) -> Any:
    """The dataclass that a type hint means, through Optional."""
    options = typing.get_args(hint) or (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def _container(node: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    return typing.cast("dict[str, Any]", _tidy(plain))


def _tidy(value: Any) -> Any:
    """Classes and functions as their dotted names, so that a description is plain data."""
    if isinstance(value, Mapping):
        return {str(key): _tidy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return value
