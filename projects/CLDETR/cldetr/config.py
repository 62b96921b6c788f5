"""Every configuration key, with the paper's symbol where it has one, and safe reading of configs.

`get_cfg()` of Detectron2 plus `add_cldetr_config(cfg)` is the full set of keys. Detectron2's keys
mean here what they mean there; one that nothing would obey is refused (`check_keys`). SCENARIO,
METHOD and SCHEDULE are declared as dataclasses, in `cldetr.settings` and `cldetr.methods`; the
model's keys are in `cldetr.modeling.config`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml
from detectron2.config import CfgNode as CN
from detectron2.config import get_cfg

from cldetr.data.mapper import Augmentation
from cldetr.errors import InputError
from cldetr.lazy import read_lazy_config
from cldetr.methods.method import CLDETR, Method
from cldetr.modeling.config import add_model_config
from cldetr.settings import (
    ScenarioSettings,
    Schedule,
    add_keys,
    leaves,
    parse_value,
    read_keys,
    suggest,
)


def add_cldetr_config(cfg: CN) -> None:
    """Adds all keys of this project, with the paper's values for Deformable DETR on COCO."""
    add_model_config(cfg)
    # A trained detector that is the first phase: it is checked and used, not trained.
    cfg.MODEL.DETECTOR = ""

    # Each entry: a registered data set, or "ANNOTATIONS.json:IMAGE_FOLDER". One entry in TRAIN is
    # divided by SCENARIO; several are the phases, one each. Where these are domains, TEST has one
    # entry for each of TRAIN, in the same order.
    cfg.DATASETS.TRAIN = ("coco_2017_train",)
    cfg.DATASETS.TEST = ("coco_2017_val",)
    # With SCENARIO.PROTOCOL extend, what else is left of the old data: labelled images, such as the
    # exemplars of an earlier run (data sets as above).
    cfg.DATASETS.EXEMPLARS = ()
    # … and a folder of images that show old categories, without annotations.
    cfg.DATASETS.OLD_IMAGES = ""
    cfg.DATASETS.BAD_BOXES = "stop"  # or "drop": drop and count boxes that make no sense
    cfg.DATASETS.SCAN = True  # check every image file before training

    for name, settings in (
        ("SCENARIO", ScenarioSettings()),
        ("METHOD", CLDETR),
        ("SCHEDULE", Schedule()),
    ):
        cfg[name] = CN()
        add_keys(cfg[name], settings)
    # Set by the trainer, for the `build_*` methods to read: the stage that they build for.
    cfg.STAGE = CN()
    cfg.STAGE.PHASE = 0  # from 1; 0 outside of a stage
    cfg.STAGE.NAME = ""  # "train", "calibrate" or "evaluate"
    # The parts of a LazyConfig that are objects of their own: `model`, `optimizer` and so on.
    cfg.LAZY = CN(new_allowed=True)

    solver = cfg.SOLVER
    solver.BASE_LR = 2e-4
    solver.BACKBONE_MULTIPLIER = 0.1  # on the learning rate of the backbone
    # … and of the parameters whose names contain a text.
    solver.LR_MULTIPLIERS = [["sampling_offsets", 0.1], ["reference_points", 0.1]]
    solver.WEIGHT_DECAY = 1e-4
    solver.WEIGHT_DECAY_NORM = 1e-4
    solver.WARMUP_ITERS = 0
    solver.CLIP_GRADIENTS.ENABLED = True
    solver.CLIP_GRADIENTS.CLIP_TYPE = "norm"
    solver.CLIP_GRADIENTS.CLIP_VALUE = 0.1
    solver.CLIP_GRADIENTS.FULL_MODEL = True  # the norm of all gradients together, as DETR does
    solver.IMS_PER_BATCH = 32  # over all processes; -1: from the number of images
    # Parts in which each process computes its share of a step; -1: from the size of the images.
    solver.ACCUMULATE = 1
    solver.AMP.DTYPE = "bfloat16"  # or "float16", with loss scaling
    solver.CHECKPOINT_PERIOD = 1000
    # How a GPU multiplies float32 numbers: "high" in TF32, which has 10 bits of mantissa, "highest"
    # in float32, "medium" in bfloat16 where it can; "" keeps PyTorch's. A CPU uses float32.
    cfg.FLOAT32_PRECISION = "high"

    plain = Augmentation()
    cfg.INPUT.FORMAT = plain.format
    cfg.INPUT.MIN_SIZE_TRAIN = list(plain.short_sides)
    cfg.INPUT.MAX_SIZE_TRAIN = plain.max_side
    cfg.INPUT.MIN_SIZE_TEST = plain.test_short_side
    cfg.INPUT.MAX_SIZE_TEST = plain.test_max_side
    cfg.INPUT.CROP.ENABLED = True
    cfg.INPUT.CROP.TYPE = "absolute_range"
    cfg.INPUT.CROP.SIZE = list(plain.crop_size)
    cfg.INPUT.CROP.PROBABILITY = plain.crop
    cfg.INPUT.CROP.MIN_SIZE = list(plain.crop_short_sides)  # resized to one of these before

    cfg.TEST.RESTRICT_IMAGES = False  # the released code's restricted image set
    # Add Pascal VOC's AP at an IoU of 0.5, 11-point (VOC07) and all-point (VOC12).
    cfg.TEST.VOC_METRICS = False
    cfg.TEST.CONFUSION_SCORE = 0.3  # least score of detections in the confusion matrix
    cfg.TEST.JOINT_RESULTS = ""  # results.json of a joint run, for the gap to it

    cfg.DATALOADER.NUM_WORKERS = 2
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = False  # samples are addressed by position
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = False  # skip images without any annotation
    cfg.SEED = 0
    add_output_config(cfg)


def add_output_config(cfg: CN) -> None:
    """Adds the keys of what a run writes."""
    cfg.OUTPUT_DIR = "output"
    cfg.VIS_PERIOD = 1000  # steps between pictures of a stage in TensorBoard; 0: none
    cfg.LOG_IMAGES = 3  # images in each of them
    cfg.LOG_PERIOD = 20
    cfg.WANDB = CN()
    cfg.WANDB.ENABLED = False  # send numbers and pictures to Weights & Biases, too
    cfg.WANDB.PROJECT = "cldetr"  # project at W&B
    cfg.WANDB.NAME = ""  # name of the run at W&B; OUTPUT_DIR by default
    cfg.REPORT = True  # end a run with pictures, diagnostics and a page of it


# What may change between two starts of the same run; everything else is its identity.
RUNTIME_KEYS = frozenset(
    {
        *("VERSION", "OUTPUT_DIR", "MODEL.DEVICE", "DATALOADER.NUM_WORKERS", "CUDNN_BENCHMARK"),
        *("LOG_PERIOD", "LOG_IMAGES", "VIS_PERIOD", "REPORT", "SOLVER.CHECKPOINT_PERIOD"),
        *("TEST.EVAL_PERIOD", "TEST.JOINT_RESULTS", "TEST.EXPECTED_RESULTS"),
        *("TEST.CONFUSION_SCORE", "WANDB.ENABLED", "WANDB.PROJECT", "WANDB.NAME"),
    }
)

_RENAMED = {
    "INPUT.FLIP": "INPUT.RANDOM_FLIP (horizontal, vertical or none)",
    "INPUT.CROP.WINDOW": "INPUT.CROP.SIZE",
    "SOLVER.CLIP": "SOLVER.CLIP_GRADIENTS.CLIP_VALUE (and CLIP_GRADIENTS.ENABLED)",
    "SOLVER.BACKBONE_FACTOR": "SOLVER.BACKBONE_MULTIPLIER",
    "SOLVER.SLOW_FACTOR": "SOLVER.LR_MULTIPLIERS, a list of [text in the name, factor]",
    "SOLVER.SLOW_NAMES": "SOLVER.LR_MULTIPLIERS, a list of [text in the name, factor]",
}

_ADAMW = "the optimizer is AdamW; override build_optimizer for another"
_LOADER = "samples are addressed by position, for exact resume; override build_train_loader"
_PROPOSALS = "set predictors take no proposals"
_BOXES = "boxes alone are learnt"
# Detectron2's keys that nothing here obeys: what to do instead, and the method whose override may
# obey them after all.
_UNUSED = {
    "SOLVER.MAX_ITER": ("set SCHEDULE.FIRST, TRAIN and CALIBRATE (EPOCHS, MAX_STEPS)", None),
    "SOLVER.STEPS": ("set SCHEDULE.FIRST, TRAIN and CALIBRATE (DROPS)", None),
    "SOLVER.REFERENCE_WORLD_SIZE": ("IMS_PER_BATCH is divided among the processes", None),
    "SOLVER.NUM_DECAYS": ("set SCHEDULE.FIRST, TRAIN and CALIBRATE (DROPS)", "build_lr_scheduler"),
    "SOLVER.MOMENTUM": (_ADAMW, "build_optimizer"),
    "SOLVER.NESTEROV": (_ADAMW, "build_optimizer"),
    "DATALOADER.ASPECT_RATIO_GROUPING": (_LOADER, "build_train_loader"),
    "DATALOADER.SAMPLER_TRAIN": (_LOADER, "build_train_loader"),
    "DATALOADER.REPEAT_THRESHOLD": (_LOADER, "build_train_loader"),
    "DATALOADER.REPEAT_SQRT": (_LOADER, "build_train_loader"),
    "DATALOADER.RANDOM_SUBSET_RATIO": (_LOADER, "build_train_loader"),
    "DATASETS.PROPOSAL_FILES_TRAIN": (_PROPOSALS, None),
    "DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TRAIN": (_PROPOSALS, None),
    "DATASETS.PROPOSAL_FILES_TEST": (_PROPOSALS, None),
    "DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST": (_PROPOSALS, None),
    "INPUT.MASK_FORMAT": (_BOXES, "build_train_loader"),
    "TEST.KEYPOINT_OKS_SIGMAS": (_BOXES, "build_evaluator"),
    "TEST.AUG.ENABLED": ("there is no test-time augmentation; override test", "test"),
    "TEST.AUG.MIN_SIZES": ("there is no test-time augmentation; override test", "test"),
    "TEST.AUG.MAX_SIZE": ("there is no test-time augmentation; override test", "test"),
    "TEST.AUG.FLIP": ("there is no test-time augmentation; override test", "test"),
    "TEST.PRECISE_BN.ENABLED": ("add hooks.PreciseBN in build_hooks", "build_hooks"),
    "TEST.PRECISE_BN.NUM_ITER": ("add hooks.PreciseBN in build_hooks", "build_hooks"),
    "GLOBAL.HACK": ("it has no meaning", None),
    "STAGE.PHASE": ("the trainer sets it for each stage", None),
    "STAGE.NAME": ("the trainer sets it for each stage", None),
}
# Detectron2's third, WarmupStepWithFixedGammaLR, fails after the last step of a training.
_LR_SCHEDULES = ("WarmupMultiStepLR", "WarmupCosineLR")


@functools.cache
def _defaults() -> dict[str, Any]:
    return dict(leaves(default_config()))


def is_set(key: str, value: Any) -> bool:
    """Whether a value is not the key's default; tuples that went through a file are lists."""
    return json.dumps(value) != json.dumps(_defaults().get(key))


def default_config() -> CN:
    """Detectron2's and this project's keys with their default values."""
    cfg = get_cfg()
    add_cldetr_config(cfg)
    return cfg


def scenario_settings(cfg: CN) -> ScenarioSettings:
    """Reads SCENARIO."""
    if any(isinstance(phase, str) for phase in cfg.SCENARIO.PHASES):
        raise InputError(
            f"SCENARIO.PHASES is {cfg.SCENARIO.PHASES}: give a list of categories for each phase, "
            "[[car, bus], [bicycle]]"
        )
    return read_keys(ScenarioSettings, cfg.SCENARIO, "SCENARIO")


def method_of(cfg: CN) -> Method:
    """Reads METHOD."""
    return read_keys(Method, cfg.METHOD, "METHOD")


def schedule_of(cfg: CN) -> Schedule:
    """Reads SCHEDULE."""
    return read_keys(Schedule, cfg.SCHEDULE, "SCHEDULE")


# The methods that may make use of keys that the trainer's own do not.
OVERRIDABLE = {method for _, method in _UNUSED.values() if method} | {"build_lr_scheduler"}


def check_keys(cfg: CN, overridden: Collection[str] = ()) -> None:
    """Refuses keys that are set and that nothing would obey, naming what to use instead.

    Args:
        cfg: a full config.
        overridden: names of the trainer's methods that a subclass overrides; keys that its own
            method may read are its own business.
    """
    problems = [
        f"{key} is not used: {instead}"
        for key, value in leaves(cfg)
        if key in _UNUSED and is_set(key, value)
        for instead, method in [_UNUSED[key]]
        if method not in overridden
    ]
    if cfg.SEED < 0:
        problems.append("SEED must be at least 0: every run is reproducible")
    problems += [
        f"SOLVER.{key} must be at least 1, or -1 (from the data), not {cfg.SOLVER[key]}"
        for key in ("IMS_PER_BATCH", "ACCUMULATE")
        if cfg.SOLVER[key] < 1 and cfg.SOLVER[key] != -1
    ]
    if cfg.INPUT.CROP.ENABLED and cfg.INPUT.CROP.TYPE != "absolute_range":
        problems.append(f"INPUT.CROP.TYPE takes absolute_range, not {cfg.INPUT.CROP.TYPE!r}")
    name = cfg.SOLVER.LR_SCHEDULER_NAME
    if name not in _LR_SCHEDULES and "build_lr_scheduler" not in overridden:
        problems.append(
            f"SOLVER.LR_SCHEDULER_NAME takes {' or '.join(_LR_SCHEDULES)}, not {name!r}: override "
            "build_lr_scheduler for another"
        )
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if clip.ENABLED and clip.CLIP_TYPE not in (("norm",) if clip.FULL_MODEL else ("norm", "value")):
        problems.append(
            "SOLVER.CLIP_GRADIENTS.CLIP_TYPE takes norm, or with FULL_MODEL False norm or value, "
            f"not {clip.CLIP_TYPE!r}"
        )
    if cfg.SOLVER.AMP.DTYPE not in ("bfloat16", "float16"):
        problems.append(f"SOLVER.AMP.DTYPE takes bfloat16 or float16, not {cfg.SOLVER.AMP.DTYPE!r}")
    if cfg.FLOAT32_PRECISION not in ("", "highest", "high", "medium"):
        problems.append(
            f'FLOAT32_PRECISION takes highest, high, medium or "", not {cfg.FLOAT32_PRECISION!r}'
        )
    if not 0 <= cfg.TEST.CONFUSION_SCORE <= 1:
        problems.append(
            f"TEST.CONFUSION_SCORE takes a score from 0 to 1, not {cfg.TEST.CONFUSION_SCORE}"
        )
    if problems:
        raise InputError.listing("in the configuration:", problems)
    # Each of these checks its own values.
    _, method, schedule = scenario_settings(cfg), method_of(cfg), schedule_of(cfg)
    if schedule.early_stop is not None and method.average is not None:
        raise InputError(
            "SCHEDULE.EARLY_STOP is for the weights that are trained, METHOD.AVERAGE saves an "
            "average of them: disable one"
        )


def check_model_keys(cfg: CN, read: Collection[str]) -> None:
    """Refuses keys under MODEL that are set, but were not read when the model was built."""
    problems = [
        f"{key} is set, but {cfg.MODEL.META_ARCHITECTURE} with {cfg.MODEL.BACKBONE.NAME} does not "
        "read it: remove it"
        for key, value in leaves(cfg)
        if key.startswith("MODEL.") and key not in read and is_set(key, value)
        if key not in ("MODEL.WEIGHTS", "MODEL.DETECTOR", "MODEL.DEVICE", "MODEL.DETR.NUM_CLASSES")
    ]
    if problems:
        raise InputError.listing("in the configuration:", problems)


def watch_keys(cfg: CN) -> tuple[CN, set[str]]:
    """A copy of a config, and the set of keys that are read from it or from clones of it."""
    read = _Keys()
    return _Watched(cfg.clone(), "", read), read


class _Keys(set[str]):
    """A set that clones of a config share."""

    def __deepcopy__(self, memo: Any) -> _Keys:
        return self


class _Watched(CN):
    """A config that notes which of its keys are read."""

    def __init__(self, node: CN, path: str, read: set[str]) -> None:
        dict.__init__(
            self,
            {
                key: _Watched(value, f"{path}{key}.", read) if isinstance(value, CN) else value
                for key, value in node.items()
            },
        )
        self.__dict__.update(node.__dict__, _path=path, _read=read)

    def __getitem__(self, name: str) -> Any:  # attributes are read through it, too
        value = super().__getitem__(name)
        if not isinstance(value, CN):
            self.__dict__["_read"].add(f"{self.__dict__['_path']}{name}")
        return value


def identity(cfg: CN) -> dict[str, Any]:
    """All that decides the numbers a run ends with, key by key, as JSON data."""
    kept = {
        key: value
        for key, value in leaves(cfg)
        if key not in RUNTIME_KEYS and not key.startswith("STAGE.")
    }
    return json.loads(json.dumps(kept))


def without_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from their keys' defaults: later versions add keys, not these."""
    return {key: value for key, value in settings.items() if is_set(key, value)}


def differing(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, stored value, current value) for every setting that differs.

    A key that one side lacks has its default there: a run of a version before the key was added did
    what the default does.
    """
    defaults = json.loads(json.dumps(_defaults()))
    values = [
        (key, stored.get(key, defaults.get(key)), current.get(key, defaults.get(key)))
        for key in sorted({*stored, *current})
    ]
    return [(key, old, new) for key, old, new in values if old != new]


def load_config(path: str, overrides: Sequence[str] = ()) -> CN:
    """Reads a YAML file (and its `_BASE_` files) or a LazyConfig, with overrides.

    Overrides of a YAML file are `KEY VALUE …`, those of a LazyConfig `key=value …`. Nothing in a
    YAML file is executed. Unknown keys are errors that name the nearest known ones.
    """
    overrides = [word for word in overrides if word != "--"]
    cfg = default_config()
    if path.endswith(".py"):
        merge_keys(cfg, read_lazy_config(path, overrides, _defaults()), origin=path)
        return cfg
    try:
        content = CN.load_yaml_with_base(path, allow_unsafe=False)
    except (
        yaml.YAMLError,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        RecursionError,
    ) as error:
        raise InputError(f"cannot read the config {path}: {error}") from error
    if not isinstance(content, Mapping):
        raise InputError(f"the config {path} holds no keys: write `KEY: value` lines")
    merge_keys(cfg, dict(leaves(content)), origin=path)
    merge_overrides(cfg, overrides)
    return cfg


def merge_overrides(cfg: CN, overrides: Sequence[str]) -> None:
    """Sets keys from the `KEY VALUE …` words of a command line."""
    if len(overrides) % 2:
        raise InputError(
            f"overrides are pairs, KEY VALUE; {overrides[-1]!r} has no partner "
            "(for KEY=VALUE use a LazyConfig)"
        )
    pairs = dict(zip(overrides[::2], overrides[1::2], strict=True))
    known = dict(leaves(cfg))
    values = {  # a text stays a text, even an empty one or one that looks like a number
        key: text if isinstance(known.get(key), str) else parse_value(text)
        for key, text in pairs.items()
    }
    merge_keys(cfg, values, origin="the command line")


def config_from_text(text: str, origin: str) -> CN:
    """Reads the config in a weights file, which `cfg.dump()` wrote; nothing in it is executed.

    The file may be of another version. What it says of the model and its input must be known here;
    other keys that are not, such as those of a method, are skipped.
    """
    cfg = default_config()
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"the config of {origin} is damaged: {error}") from error
    if not isinstance(content, Mapping):
        raise InputError(f"the config of {origin} is damaged: it holds no keys")
    needed = ("MODEL.", "INPUT.", "LAZY.")
    kept = {k: v for k, v in leaves(content) if k in _defaults() or k.startswith(needed)}
    merge_keys(cfg, kept, origin)
    return cfg


def merge_keys(cfg: CN, values: Mapping[str, Any], origin: str) -> None:
    """Sets keys by their names with dots; all unknown keys and wrong types make one error."""
    known = [key for key, _ in leaves(cfg)]
    problems = []
    for key, value in values.items():
        *parents, leaf = key.split(".")
        node = cfg
        if parents[:1] == ["LAZY"]:
            for parent in parents:
                node = node.setdefault(parent, CN(new_allowed=True))
            node[leaf] = value
            continue
        if key in _RENAMED:
            problems.append(f"{key} is now {_RENAMED[key]}")
            continue
        if key not in known:
            problems.append(f"unknown key {key}{suggest(key, known)}")
            continue
        for parent in parents:
            node = node[parent]
        value = _coerce(value, node[leaf])
        if node[leaf] is not None and type(value) is not type(node[leaf]):
            problems.append(
                f"{key} takes a {type(node[leaf]).__name__} such as {node[leaf]!r}, not {value!r}"
            )
            continue
        node[leaf] = value
    if problems:
        raise InputError.listing(f"in {origin}:", problems)


def _coerce(value: Any, current: Any) -> Any:
    """Takes 40 for 40.0, "1e-3" (a string to YAML) for 0.001, and lists for tuples."""
    if isinstance(current, float) and type(value) in (int, str):
        try:
            return float(value)
        except ValueError:
            return value
    if isinstance(current, (list, tuple)) and isinstance(value, (list, tuple)):
        return type(current)(value)
    return value
