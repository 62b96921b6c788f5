"""The YAML front door: a yacs config becomes a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import build_model

from cldetr.config import add_cldetr_config, load_config
from cldetr.data.mapper import Augmentation
from cldetr.engine.recipe import (
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    Recipe,
    Runtime,
    ScenarioSettings,
    Schedule,
)
from cldetr.engine.settings import build_settings
from cldetr.errors import InputError
from cldetr.methods.method import Method
from cldetr.modeling.detector import Detector


def recipe_from_yaml(path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a YAML config with `KEY VALUE` overrides."""
    return recipe_from_cfg(load_config(path, overrides))


def recipe_from_cfg(cfg: CfgNode) -> Recipe:
    """Turns a full config into a recipe."""
    return Recipe(
        model=_model(cfg),
        data=build_settings(
            DataSettings,
            {
                "train": cfg.DATASETS.TRAIN,
                "test": cfg.DATASETS.TEST,
                "bad_boxes": cfg.DATASETS.BAD_BOXES,
                "scan": cfg.DATASETS.SCAN,
            },
            "DATASETS",
        ),
        scenario=build_settings(ScenarioSettings, _lower(cfg.SCENARIO), "SCENARIO"),
        method=build_settings(Method, _method(cfg.METHOD), "METHOD"),
        schedule=build_settings(Schedule, _lower(cfg.SCHEDULE), "SCHEDULE"),
        optimizer=build_settings(
            OptimizerSettings,
            {
                "lr": cfg.SOLVER.BASE_LR,
                "backbone_factor": cfg.SOLVER.BACKBONE_FACTOR,
                "slow_factor": cfg.SOLVER.SLOW_FACTOR,
                "slow_names": cfg.SOLVER.SLOW_NAMES,
                "weight_decay": cfg.SOLVER.WEIGHT_DECAY,
                "clip": cfg.SOLVER.CLIP,
                "batch": cfg.SOLVER.IMS_PER_BATCH,
                "accumulate": cfg.SOLVER.ACCUMULATE,
                "amp": cfg.SOLVER.AMP.DTYPE if cfg.SOLVER.AMP.ENABLED else "off",
            },
            "SOLVER",
        ),
        augmentation=build_settings(
            Augmentation,
            {
                "flip": cfg.INPUT.FLIP,
                "short_sides": [side for side in cfg.INPUT.MIN_SIZE_TRAIN if side],
                "max_side": cfg.INPUT.MAX_SIZE_TRAIN,
                "crop": cfg.INPUT.CROP.PROBABILITY,
                "crop_short_sides": cfg.INPUT.CROP.MIN_SIZE,
                "crop_window": cfg.INPUT.CROP.WINDOW,
                "test_short_side": cfg.INPUT.MIN_SIZE_TEST,
                "test_max_side": cfg.INPUT.MAX_SIZE_TEST,
                "format": cfg.INPUT.FORMAT,
            },
            "INPUT",
        ),
        seed=max(cfg.SEED, 0),
        runtime=build_settings(
            Runtime,
            {
                "output_dir": cfg.OUTPUT_DIR,
                "device": cfg.MODEL.DEVICE,
                "workers": cfg.DATALOADER.NUM_WORKERS,
                "log_period": cfg.LOG_PERIOD,
                "log_images": cfg.LOG_IMAGES,
                "checkpoint_period": cfg.SOLVER.CHECKPOINT_PERIOD,
                "eval_period": cfg.TEST.EVAL_PERIOD,
                "restrict_eval": cfg.TEST.RESTRICT_IMAGES,
                "joint_results": cfg.TEST.JOINT_RESULTS,
                "report": cfg.REPORT,
            },
            "",
        ),
    )


def model_from_description(description: Mapping[str, Any], input_format: str) -> ModelSettings:
    """Turns the keys under MODEL, as a recipe or a weights file holds them, into a model again.

    Args:
        description: `ModelSettings.description` of a YAML config.
        input_format: the order of channels, "RGB" or "BGR".
    """
    cfg = get_cfg()
    add_cldetr_config(cfg)
    try:
        cfg.MODEL.merge_from_other_cfg(CfgNode(dict(description)))
    except (KeyError, ValueError) as error:
        raise InputError(
            f"the model is described by keys that this version does not have: {error}"
        ) from error
    cfg.MODEL.WEIGHTS = ""
    cfg.INPUT.FORMAT = input_format
    return _model(cfg)


def _model(cfg: CfgNode) -> ModelSettings:
    description = {
        key: value
        for key, value in _plain(cfg.MODEL).items()
        if key not in ("WEIGHTS", "DETECTOR", "DEVICE")
    }

    def build(num_classes: int) -> Detector:
        own = cfg.clone()
        own.defrost()
        own.MODEL.DETR.NUM_CLASSES = num_classes
        own.MODEL.DEVICE = "cpu"  # the engine moves it
        return build_model(own)

    return ModelSettings(
        description,
        build,
        cfg.MODEL.WEIGHTS,
        cfg.MODEL.DETECTOR,
        cfg.TEST.DETECTIONS_PER_IMAGE,
    )


def _method(cfg: CfgNode) -> dict[str, Any]:
    values = _lower(cfg)
    values["pseudo"] = _enabled(values["pseudo"])
    values["distill"] = _enabled(values["distill"])
    values["memory"] = _enabled(values["memory"])
    values["calibrate"]["complete"] = _enabled(values["calibrate"]["complete"])
    values["calibrate"] = _enabled(values["calibrate"])
    return values


def _enabled(values: dict[str, Any]) -> dict[str, Any] | None:
    return values if values.pop("enabled") else None


def _lower(node: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.lower(): _lower(value) if isinstance(value, Mapping) else value
        for key, value in node.items()
    }


def _plain(node: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _plain(value) if isinstance(value, Mapping) else value for key, value in node.items()
    }
