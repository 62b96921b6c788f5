"""Fills in what a config leaves to a trained detector, to the data and to the machine.

A value of −1 means "from the data": MODEL.DETR.NUM_QUERIES (`model.num_queries` of a LazyConfig),
MODEL.DETR.QUERY_GROUPS, INPUT.MIN_SIZE_TRAIN and MIN_SIZE_TEST, SOLVER.IMS_PER_BATCH and
ACCUMULATE. What was chosen is logged and stands in RUN/config.yaml.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode

from cldetr.config import is_set, merge_keys
from cldetr.data.memory import exemplar_references
from cldetr.engine.checkpoint import load_state
from cldetr.engine.initial_weights import describe_architecture, stored_query_groups
from cldetr.engine.restore import config_of_weights, final_weights, usable_device
from cldetr.engine.rundata import RunData
from cldetr.errors import InputError
from cldetr.modeling.huggingface_files import folder_of
from cldetr.scenario import Scenario
from cldetr.settings import leaves

logger = logging.getLogger(__name__)

FROM_DATA = -1
_PIXELS = 800 * 1333 * 2  # that a step computes at a time, where ACCUMULATE follows from the data
_SHORT = 800 / 1333  # the usual limits of an image's sides
# Keys of the trainer's own that a detector's file does not decide.
_NOT_OF_DETECTOR = (
    *("MODEL.WEIGHTS", "MODEL.DETECTOR", "MODEL.DEVICE"),
    *("MODEL.DETR.NUM_CLASSES", "MODEL.DETR.QUERY_GROUPS"),
)
_SOLVER = ("BASE_LR", "BACKBONE_MULTIPLIER", "LR_MULTIPLIERS", "WEIGHT_DECAY", "CLIP_GRADIENTS.")


def resolve(cfg: CfgNode) -> tuple[CfgNode, RunData]:
    """Reads the data of a run; returns its config with everything filled in, and the data."""
    own = cfg.clone()
    own.defrost()
    detector = _take_detector(own)
    data = RunData(own)
    stated = own.MODEL.DETR.NUM_CLASSES
    num_classes = len(data.scenario.categories)
    if stated not in (0, num_classes):
        raise InputError(
            f"MODEL.DETR.NUM_CLASSES is {stated}, the data set has {num_classes} categories: "
            "remove the key, it follows from the data"
        )
    own.MODEL.DETR.NUM_CLASSES = num_classes
    _choose_query_groups(own, data.scenario, detector)
    describe_architecture(own)
    _follow_data(own, data, detector)
    if filled := filled_in(cfg, own):
        logger.info("settings from the detector and the data: %s", ", ".join(filled))
    own.MODEL.DEVICE = usable_device(own.MODEL.DEVICE)
    own.freeze()
    return own, data


def filled_in(before: CfgNode, after: CfgNode) -> list[str]:
    """The keys, with their values, that `resolve` chose."""
    stated = dict(leaves(before))
    skipped = (
        "MODEL.DETR.NUM_CLASSES",
        "MODEL.DETR.QUERY_GROUPS",
        "MODEL.DEVICE",
        "MODEL.DETECTOR",
        "MODEL.HUGGINGFACE.CONFIG",
    )
    return [
        f"{key} {value}"
        for key, value in leaves(after)
        if key not in skipped and stated.get(key) != value
    ]


def _take_detector(cfg: CfgNode) -> CfgNode | None:
    """Fills in what MODEL.DETECTOR says about itself; returns the config that it was trained with.

    A run directory stands for the weights that it ended with, and in the protocol "extend" for its
    exemplars, too. Keys that are left at their defaults take the detector's values: those of the
    model, and in the protocol "extend" those of the images and of the optimizer.
    """
    if not cfg.MODEL.DETECTOR:
        return None
    extends = cfg.SCENARIO.PROTOCOL == "extend"
    root = Path(cfg.MODEL.DETECTOR)
    of_hugging_face = folder_of(cfg.MODEL.DETECTOR) is not None
    if root.is_dir() and not of_hugging_face:
        phase, cfg.MODEL.DETECTOR = _last_weights(root)
        folder = root / f"phase{phase}" / "select"
        if extends and not cfg.DATASETS.EXEMPLARS and folder.is_dir():
            cfg.DATASETS.EXEMPLARS = tuple(exemplar_references(folder))
            logger.info("exemplars of %s: %d data sets", root, len(cfg.DATASETS.EXEMPLARS))
    if not Path(cfg.MODEL.DETECTOR).is_file() and not of_hugging_face:
        return None  # it is told where it is loaded; a plan may be made before it is trained
    meta = load_state(cfg.MODEL.DETECTOR).get("cldetr")
    if not isinstance(meta, dict) or not {"config", "settings"} & {*meta}:
        return None
    stored = config_of_weights(meta, cfg.MODEL.DETECTOR)
    more = ("INPUT.", *(f"SOLVER.{key}" for key in _SOLVER)) if extends else ()
    sizes = ("INPUT.",) if of_hugging_face else ()  # 0: those of its image processor
    prefixes = ("MODEL.", "LAZY.model", *more, *sizes)
    given = dict(leaves(cfg))
    taken = {
        key: value
        for key, value in leaves(stored)
        if key.startswith(prefixes) and key not in _NOT_OF_DETECTOR
        if key not in given or (not is_set(key, given[key]) and is_set(key, value))
    }
    merge_keys(cfg, taken, cfg.MODEL.DETECTOR)
    return stored


def _last_weights(root: Path) -> tuple[int, str]:
    """The last phase of a run that is finished, and its weights."""
    phases = sorted(int(path.name[5:]) for path in root.glob("phase*") if path.name[5:].isdigit())
    for phase in reversed(phases):
        path = final_weights(root, phase)
        if path is not None and (root / f"phase{phase}" / "evaluate" / "stage.json").is_file():
            return phase, str(path)
    raise InputError(
        f"{root} holds no finished phase of a run: give a finished run, or a weights file"
    )


def _choose_query_groups(cfg: CfgNode, scenario: Scenario, detector: CfgNode | None) -> None:
    """Gives the classes of each phase a group of queries, after those of a detector to extend."""
    detr = cfg.MODEL.DETR
    given, stored = list(detr.QUERY_GROUPS), {}
    if cfg.SCENARIO.PROTOCOL == "extend" and detector is not None and given in ([], [FROM_DATA]):
        stored = stored_query_groups(cfg.MODEL.DETECTOR)
    if stored or given == [FROM_DATA]:
        last = max(stored.values(), default=0)
        detr.QUERY_GROUPS = [0] * len(scenario.categories)
        for phase in scenario.phases:
            for label in phase.classes:
                name = scenario.categories[label].name
                first = phase.index == 1
                detr.QUERY_GROUPS[label] = stored.get(name, 0) if first else last + phase.index - 1
    if min(detr.QUERY_GROUPS, default=0) < 0:
        raise InputError(
            f"MODEL.DETR.QUERY_GROUPS is {given}: give a group from 0 on for each class, or [-1] "
            "for a group for each phase"
        )
    if detr.QUERY_GROUPS and detr.TWO_STAGE:
        raise InputError(
            "MODEL.DETR.QUERY_GROUPS needs queries that are learnt, but those of two stages come "
            "from the image: set MODEL.DETR.TWO_STAGE False, or QUERY_GROUPS []"
        )


def _follow_data(cfg: CfgNode, data: RunData, detector: CfgNode | None) -> None:
    """Chooses the values that follow from the data."""
    sources = [*data.train.values(), *data.test.values()]
    objects = max(int(np.diff(source.starts).max(initial=0)) for source in sources)
    # Twice as many: pseudo-labels come on top, and queries must be left for background.
    queries = max(math.ceil(2 * objects / 10) * 10, 20)
    for node, key in ((cfg.MODEL.DETR, "NUM_QUERIES"), (cfg.LAZY.get("model", {}), "num_queries")):
        if node.get(key) == FROM_DATA:
            node[key] = queries
    heights = np.concatenate([source.heights for source in data.train.values()])
    widths = np.concatenate([source.widths for source in data.train.values()])
    sides = np.sort(np.stack([heights, widths]), axis=0)  # (2, I), the short one first
    short, long = np.median(sides, axis=1)
    image = cfg.INPUT
    if image.MIN_SIZE_TEST == FROM_DATA:
        limit = image.MAX_SIZE_TEST
        image.MIN_SIZE_TEST = round(short * min(1, limit / long, _SHORT * limit / short))
    if FROM_DATA in image.MIN_SIZE_TRAIN:
        limit = image.MAX_SIZE_TRAIN
        full = round(short * min(1, limit / long, _SHORT * limit / short))
        # DETR's 480 to 800, in proportion; small images are small enough.
        scales = np.linspace(0.6, 1, 11) if full >= 320 else [1]
        image.MIN_SIZE_TRAIN = [round(full * scale) for scale in scales]
        image.CROP.ENABLED = image.CROP.ENABLED and full >= 320
        image.CROP.SIZE = [round(0.48 * full), round(0.75 * full)]
        image.CROP.MIN_SIZE = [round(full * share) for share in (0.5, 0.625, 0.75)]
    solver = cfg.SOLVER
    images = min(len(phase.image_ids) for phase in data.scenario.phases if phase.image_ids)
    if solver.IMS_PER_BATCH == FROM_DATA:
        solver.IMS_PER_BATCH = 16 if images >= 800 else 8 if images >= 100 else 4
        if detector is not None and solver.BASE_LR == detector.SOLVER.BASE_LR:
            # Adam's learning rate goes with the square root of the batch.
            solver.BASE_LR *= math.sqrt(solver.IMS_PER_BATCH / detector.SOLVER.IMS_PER_BATCH)
    if solver.ACCUMULATE == FROM_DATA:
        side = max([*image.MIN_SIZE_TRAIN, 0]) or short
        pixels = side * min(side * long / short, image.MAX_SIZE_TRAIN)
        at_once = max(int(_PIXELS // pixels), 1)
        solver.ACCUMULATE = -(-solver.IMS_PER_BATCH // at_once)
