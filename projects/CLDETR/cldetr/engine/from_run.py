"""What a run or a weights file says about itself, turned into a recipe or a model again."""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cldetr.data.mapper import Augmentation
from cldetr.engine.checkpoint import latest_checkpoint, load_state
from cldetr.engine.from_lazy import model_from_tree
from cldetr.engine.from_yaml import model_from_description
from cldetr.engine.ledger import read_recipe
from cldetr.engine.recipe import ModelSettings, Recipe, Runtime
from cldetr.engine.settings import build_settings
from cldetr.errors import InputError

# What the official checkpoints that `cldetr convert` reads were trained with.
_OFFICIAL = {
    "PIXEL_MEAN": [123.675, 116.28, 103.53],
    "PIXEL_STD": [58.395, 57.12, 57.375],
    "RESNETS.STRIDE_IN_1X1": False,
}


def recipe_of_run(root: str | os.PathLike[str], device: str = "auto") -> Recipe:
    """Reads the recipe of a run directory, finished or not.

    Paths of data in it are as the run was given them: relative ones hold where it was started.

    Args:
        root: the run.
        device: what to compute on; "auto" is a GPU where there is one.
    """
    path = Path(root) / "recipe.json"
    if not path.is_file():
        raise InputError(f"{root} is no run directory: it has no recipe.json")
    identity = read_recipe(path)
    hints = typing.get_type_hints(Recipe)
    sections = {
        name: build_settings(hints[name], identity[name], name)
        for name in ("data", "scenario", "method", "schedule", "optimizer", "augmentation")
    }
    model = restore_model(identity["model"]["description"], sections["augmentation"].format)
    runtime = Runtime(output_dir=os.fspath(root), device=find_device(device))
    return Recipe(model=model, seed=identity["seed"], runtime=runtime, **sections)


def find_device(device: str) -> str:
    """The device that "auto" means here; any other as it is."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def model_of_weights(
    meta: Mapping[str, Any], path: str | os.PathLike[str]
) -> tuple[ModelSettings, Augmentation]:
    """The model that a weights file is of, and the sizes of images that it was tested at.

    The file itself tells; else the run directory that it lies in; else what `cldetr convert` read
    off the weights.

    Args:
        meta: what the file says about itself, under "cldetr".
        path: where it lies.
    """
    if "model" in meta:
        augmentation = build_settings(Augmentation, meta["augmentation"], "augmentation")
        return restore_model(meta["model"], augmentation.format), augmentation
    for folder in list(Path(path).absolute().parents)[:5]:  # RUN/phase1/train/checkpoints/x/y.pth
        if (folder / "recipe.json").is_file():
            recipe = recipe_of_run(folder)
            return recipe.model, recipe.augmentation
    if "settings" in meta:
        description: dict[str, Any] = {}
        official = dict(_OFFICIAL)
        if meta["settings"].get("META_ARCHITECTURE") == "DETR":
            official["DETR.ONE_CLASS_PER_QUERY"] = True
        for key, value in (official | dict(meta["settings"])).items():
            *parents, last = key.split(".")
            node = description
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        return model_from_description(description, "RGB"), Augmentation()
    raise InputError(
        f"{path} does not say which model it is of, and lies in no run directory: "
        "give the config that it was trained with, --config-file"
    )


def restore_model(description: Mapping[str, Any], input_format: str) -> ModelSettings:
    """Turns the description of a model, YAML's keys or a lazy tree, into the model."""
    if "_target_" in description:
        return model_from_tree(description)
    return model_from_description(description, input_format)


def final_weights(root: str | os.PathLike[str], phase: int) -> Path | None:
    """The weights that a phase of a run ended with, None where it has not."""
    for stage in ("calibrate", "train"):
        folder = Path(root) / f"phase{phase}" / stage
        if (folder / "stage.json").is_file():
            return folder / "model.pth"
    return None


def training_weights(root: str | os.PathLike[str], phase: int) -> dict[str, Any] | None:
    """The state of a phase's training step: its end, or its newest checkpoint; None before any."""
    folder = Path(root) / f"phase{phase}" / "train"
    if (folder / "stage.json").is_file():
        return load_state(folder / "model.pth")
    found = latest_checkpoint(folder / "checkpoints")
    return None if found is None else found.state
