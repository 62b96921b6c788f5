"""What a run or a weights file says about itself, turned into a config and a model again."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model

from cldetr.config import (
    RUNTIME_KEYS,
    config_from_text,
    default_config,
    differing,
    identity,
    load_config,
    merge_keys,
)
from cldetr.engine.checkpoint import latest_checkpoint, load_into, load_state
from cldetr.engine.ledger import read_identity
from cldetr.errors import InputError
from cldetr.modeling.detector import Detector
from cldetr.scenario import Scenario
from cldetr.settings import leaves

logger = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/version")
# What the official checkpoints that `cldetr convert` reads were trained with.
_OFFICIAL = {
    "MODEL.META_ARCHITECTURE": "DeformableDETR",
    "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
    "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
    "MODEL.RESNETS.STRIDE_IN_1X1": False,
    "INPUT.FORMAT": "RGB",
}


def describe(
    cfg: CfgNode, scenario: Scenario, phase: int, stage: str, short_sides: Sequence[int]
) -> dict[str, Any]:
    """What a weights file says about itself: all that prediction needs.

    Args:
        cfg: of the run.
        scenario: of the run.
        phase: that the weights are of.
        stage: the same.
        short_sides: the smallest and the largest of the training images, before any resizing.
    """
    own = default_config()
    # The same weights make the same file, wherever they are made.
    kept = {key: value for key, value in leaves(cfg) if key not in RUNTIME_KEYS}
    merge_keys(own, kept, "the run's config")
    return {
        "format": 2,
        "categories": [{"id": each.id, "name": each.name} for each in scenario.categories],
        "seen": [scenario.categories[label].name for label in scenario.seen(phase)],
        "scenario": scenario.name,
        "phase": phase,
        "stage": stage,
        "short_sides": list(short_sides),
        "config": own.dump(),
    }


def config_of_run(root: str | os.PathLike[str], device: str = "auto") -> CfgNode:
    """Reads the config of a run directory, finished or not.

    Paths of data in it are as the run was given them: relative ones hold where it was started.

    Args:
        root: the run.
        device: what to compute on; "auto" is a GPU where there is one.
    """
    path = Path(root) / "config.yaml"
    if not (Path(root) / "identity.json").is_file() or not path.is_file():
        raise InputError(f"{root} is no run directory: it has no config.yaml and identity.json")
    cfg = load_config(str(path))
    stored, found = read_identity(Path(root) / "identity.json"), identity(cfg)
    differences = differing(stored, found)
    if differences:
        raise InputError.listing(
            f"{path} is damaged or was changed: it is not the config of this run any more (restore "
            "it, or start the run again with --resume, which writes it):",
            [f"{key}: the run has {old!r}, the file {new!r}" for key, old, new in differences],
        )
    cfg.OUTPUT_DIR = os.fspath(root)
    cfg.MODEL.DEVICE = find_device(device)
    return cfg


def find_device(device: str) -> str:
    """The device that "auto" means here; any other as it is."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(device: str) -> str:
    """The device that a config asks for, or the CPU on a machine without NVIDIA's driver.

    Where there is a driver, a GPU that PyTorch cannot use is an error: a run on the CPU would take
    weeks instead of hours. GPUs hidden by an empty CUDA_VISIBLE_DEVICES are not meant.
    """
    if not device.startswith("cuda") or torch.cuda.is_available():
        return device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if _DRIVER.exists() and not hidden:
        driver = " ".join(_DRIVER.read_text(encoding="utf-8", errors="replace").split()[:8])
        raise InputError(
            f"this machine has a GPU driver ({driver}), but torch {torch.__version__} cannot use "
            f"it: {_cuda_problem()}. Install a build of torch for this driver, or train on the CPU "
            "with MODEL.DEVICE cpu"
        )
    logger.warning("no GPU here: computing on the CPU")
    return "cpu"


def _cuda_problem() -> str:
    """Why CUDA does not start, in the words of PyTorch."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].rstrip(". ")
    return "no device is visible"


def config_of_weights(meta: Mapping[str, Any], path: str | os.PathLike[str]) -> CfgNode:
    """The config of the model that a weights file is of.

    Args:
        meta: what the file says about itself, under "cldetr": a run's own config, or what
            `cldetr convert` read from the weights.
        path: where the file is.
    """
    if "config" in meta:
        return config_from_text(meta["config"], str(path))
    if "settings" in meta:
        cfg = default_config()
        keys = {f"MODEL.{key}": value for key, value in meta["settings"].items()}
        if keys.get("MODEL.META_ARCHITECTURE") == "DETR":
            keys["MODEL.DETR.ONE_CLASS_PER_QUERY"] = True
        if keys.get("MODEL.META_ARCHITECTURE") == "HuggingFaceDetector":
            keys |= {"INPUT.MIN_SIZE_TRAIN": [0], "INPUT.MIN_SIZE_TEST": 0}  # the processor's
            keys["INPUT.CROP.ENABLED"] = False
        else:
            keys = _OFFICIAL | keys
        merge_keys(cfg, keys, str(path))
        return cfg
    raise InputError(
        f"{path} does not say which model it is of: give the config that it was trained with, "
        "--config-file"
    )


def build_detector(
    cfg: CfgNode, state: Mapping[str, Any], origin: str, device: str = "cpu"
) -> Detector:
    """Builds a config's detector for the categories of a weights file, and loads the weights."""
    own = cfg.clone()
    own.defrost()
    own.MODEL.DEVICE = device
    own.MODEL.DETR.NUM_CLASSES = len(state["cldetr"]["categories"])
    if -1 in own.MODEL.DETR.QUERY_GROUPS:  # a group for each phase: the file says which
        stored = config_of_weights(state["cldetr"], origin)
        own.MODEL.DETR.QUERY_GROUPS = stored.MODEL.DETR.QUERY_GROUPS
    detector = build_model(own)
    load_into(detector, state["model"], origin)
    return detector.eval()


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
