"""Every configuration key, with the paper's symbol where it has one, and safe reading of YAML.

`detectron2.config.get_cfg()` plus `add_cldetr_config(cfg)` is the full set of keys. The model's own
keys are in `cldetr.modeling.config`. What a key means in the engine is told by the dataclass that
it fills (`cldetr.engine.recipe`, `cldetr.methods`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from detectron2.config import CfgNode as CN
from detectron2.config import get_cfg

from cldetr.data.mapper import Augmentation
from cldetr.errors import InputError
from cldetr.modeling.config import add_model_config


def add_cldetr_config(cfg: CN) -> None:
    """Adds all keys of this project, with the paper's values for Deformable DETR on COCO."""
    add_model_config(cfg)
    # A trained detector that is the first phase: it is checked and used, not trained.
    cfg.MODEL.DETECTOR = ""

    # Each entry: a registered COCO-format data set, or "ANNOTATIONS.json:IMAGE_FOLDER".
    # One entry in TRAIN is divided by SCENARIO; several are the phases, one each.
    cfg.DATASETS.TRAIN = ("coco_2017_train",)
    cfg.DATASETS.TEST = ("coco_2017_val",)
    cfg.DATASETS.BAD_BOXES = "stop"  # or "drop": leave out and count boxes that make no sense
    cfg.DATASETS.SCAN = True  # look at every image file before training

    cfg.SCENARIO = CN()
    cfg.SCENARIO.NAME = "70+10"  # A+B, A+XxY, A+B+C…
    cfg.SCENARIO.PROTOCOL = "strict"  # the paper's, or "traditional" (supplement A)
    cfg.SCENARIO.ORDER = "seed"  # of the classes: "id", "seed" or "released"
    cfg.SCENARIO.CLASS_SEED = 0
    cfg.SCENARIO.DATA_SEED = 0
    cfg.SCENARIO.PHASES = []  # explicit: a list of category names per phase, instead of NAME

    cfg.METHOD = CN()
    cfg.METHOD.NAME = "cldetr"  # what tables call it
    cfg.METHOD.UNSEEN = "mask"  # head rows of later classes: out of the loss, or "negative"
    cfg.METHOD.JOINT = False  # all data seen so far with all labels: the upper bound
    cfg.METHOD.REVEAL_OLD = False  # true boxes of old classes on new images: the KD-oracle

    cfg.METHOD.PSEUDO = _pseudo_keys(enabled=True)  # DKD, Sec. 3.3

    cfg.METHOD.DISTILL = CN()  # a loss against the old model, query by query
    cfg.METHOD.DISTILL.ENABLED = False
    cfg.METHOD.DISTILL.LOSS = "lwf"  # or "erd"
    cfg.METHOD.DISTILL.WEIGHT = 1.0
    cfg.METHOD.DISTILL.BOX_L1 = 5.0  # γ_2
    cfg.METHOD.DISTILL.BOX_GIOU = 2.0  # γ_1
    cfg.METHOD.DISTILL.NORMALISER = "queries"  # of "lwf": the mean over queries, or "images"
    cfg.METHOD.DISTILL.DEVIATIONS = 2.0  # of "erd": responses above mean + so many deviations
    cfg.METHOD.DISTILL.NMS_IOU = 0.005  # of "erd"

    cfg.METHOD.MEMORY = CN()
    cfg.METHOD.MEMORY.ENABLED = True
    cfg.METHOD.MEMORY.STRATEGY = "kl"  # Eq. 6; others: see `cldetr exemplars --help`
    cfg.METHOD.MEMORY.BUDGET = 0.1  # R_i: at most 1 a share of the phase's images, else a number
    cfg.METHOD.MEMORY.REPLAY = True  # train on D_i ∪ E_1:i−1, not on D_i alone

    cfg.METHOD.CALIBRATE = CN()
    cfg.METHOD.CALIBRATE.ENABLED = True
    cfg.METHOD.CALIBRATE.REVEAL = False  # exemplars with all true labels: an oracle
    # Beyond the paper: complete the exemplars' labels by the model's own predictions.
    cfg.METHOD.CALIBRATE.COMPLETE = _pseudo_keys(enabled=False)
    # Hard labels: a soft one is the model's own score, from which there is nothing to learn.
    cfg.METHOD.CALIBRATE.COMPLETE.FOREGROUND = 0.2
    cfg.METHOD.CALIBRATE.COMPLETE.SOFT = False

    cfg.SCHEDULE = CN()  # in epochs of the stage's own images
    cfg.SCHEDULE.FIRST = _stage_keys(epochs=50.0, drops=[40.0])
    cfg.SCHEDULE.TRAIN = _stage_keys(epochs=40.0, drops=[])
    cfg.SCHEDULE.CALIBRATE = _stage_keys(epochs=10.0, drops=[], lr_scale=0.1)

    cfg.SOLVER.BASE_LR = 2e-4
    cfg.SOLVER.BACKBONE_FACTOR = 0.1
    cfg.SOLVER.SLOW_FACTOR = 0.1
    cfg.SOLVER.SLOW_NAMES = ["sampling_offsets", "reference_points"]
    cfg.SOLVER.WEIGHT_DECAY = 1e-4
    cfg.SOLVER.CLIP = 0.1  # of the global gradient norm; 0 turns it off
    cfg.SOLVER.IMS_PER_BATCH = 32  # over all processes
    cfg.SOLVER.ACCUMULATE = 1  # parts in which each process computes its share of a step
    cfg.SOLVER.AMP.ENABLED = False
    cfg.SOLVER.AMP.DTYPE = "bfloat16"  # or "float16", with loss scaling
    cfg.SOLVER.CHECKPOINT_PERIOD = 0  # steps; 0 means every epoch

    plain = Augmentation()
    cfg.INPUT.FORMAT = plain.format
    cfg.INPUT.FLIP = plain.flip
    cfg.INPUT.MIN_SIZE_TRAIN = list(plain.short_sides)
    cfg.INPUT.MAX_SIZE_TRAIN = plain.max_side
    cfg.INPUT.MIN_SIZE_TEST = plain.test_short_side
    cfg.INPUT.MAX_SIZE_TEST = plain.test_max_side
    cfg.INPUT.CROP.PROBABILITY = plain.crop
    cfg.INPUT.CROP.MIN_SIZE = list(plain.crop_short_sides)
    cfg.INPUT.CROP.WINDOW = list(plain.crop_window)

    cfg.TEST.EVAL_PERIOD = 0  # steps; 0 means only at the end of each phase
    cfg.TEST.RESTRICT_IMAGES = False  # the released code's restricted image set
    cfg.TEST.JOINT_RESULTS = ""  # results.json of a joint run, for the gap to it

    cfg.DATALOADER.NUM_WORKERS = 2
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = False  # the paper keeps images without labels
    cfg.SEED = 0
    cfg.LOG_PERIOD = 20
    cfg.REPORT = True  # end a run with pictures, diagnostics and a page of it
    cfg.LOG_IMAGES = 3  # images of each stage shown in TensorBoard at every checkpoint; 0: none


def _pseudo_keys(enabled: bool) -> CN:
    keys = CN()
    keys.ENABLED = enabled
    keys.SELECT = "topk"  # "topk", "threshold", "curriculum", "all" or "pairs"
    keys.K = 10  # K
    keys.SCORE = 0.1  # p of "threshold", and where "curriculum" ends
    keys.SCORE_START = 0.5  # where "curriculum" starts
    keys.FOREGROUND = 0.3  # least score of a foreground query of a sigmoid head
    keys.IOU = 0.7  # λ
    keys.DROP_AT_IOU = False  # drop at IoU exactly λ too, as the released code does
    keys.SOFT = True  # the teacher's class distribution as label; else its best class
    keys.CACHE = False  # ask the teacher once per image and keep its answers with the run
    return keys


def _stage_keys(epochs: float, drops: list[float], lr_scale: float = 1.0) -> CN:
    keys = CN()
    keys.EPOCHS = epochs
    keys.DROPS = drops  # epochs after which the learning rate is divided by ten
    keys.LR_SCALE = lr_scale
    keys.MAX_STEPS = 0  # stop after so many steps at the latest; 0 means no limit
    return keys


def load_config(path: str, overrides: Sequence[str] = ()) -> CN:
    """Reads a YAML file (and its `_BASE_` files) and `KEY VALUE` overrides into a full config.

    Nothing in the file is executed. Unknown keys are errors that name the nearest known ones.
    """
    cfg = get_cfg()
    add_cldetr_config(cfg)
    try:
        content = CN.load_yaml_with_base(path, allow_unsafe=False)
    except (
        yaml.YAMLError,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise InputError(f"cannot read the config {path}: {error}") from error
    if not isinstance(content, Mapping):
        raise InputError(f"the config {path} holds no keys: write `KEY: value` lines")
    _merge(cfg, dict(leaves(content)), origin=path)
    if len(overrides) % 2:
        raise InputError(
            f"overrides are pairs, KEY VALUE; {overrides[-1]!r} has no partner "
            "(for KEY=VALUE use a LazyConfig)"
        )
    pairs = dict(zip(overrides[::2], overrides[1::2], strict=True))
    known = dict(leaves(cfg))
    values = {  # a text stays a text, even an empty one or one that looks like a number
        key: text if isinstance(known.get(key), str) else _parse(text)
        for key, text in pairs.items()
    }
    _merge(cfg, values, origin="the command line")
    return cfg


def suggest(word: str, known: Sequence[str]) -> str:
    """Says which known words look like an unknown one."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _merge(cfg: CN, values: Mapping[str, Any], origin: str) -> None:
    known = [key for key, _ in leaves(cfg)]
    problems = []
    for key, value in values.items():
        if key not in known:
            problems.append(f"unknown key {key}{suggest(key, known)}")
            continue
        *parents, leaf = key.split(".")
        node = cfg
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


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key with dots, value) for every value of a nested config."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _parse(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
