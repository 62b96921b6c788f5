"""Initial weights: a backbone's, or those of a detector that already works."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.utils.file_io import PathManager
from torch import Tensor
from torchvision.models import get_weight

from cldetr.engine.checkpoint import load_into, load_state
from cldetr.engine.restore import config_of_weights
from cldetr.errors import InputError
from cldetr.files import sha256_file, sha256_json
from cldetr.modeling.detector import Detector
from cldetr.modeling.huggingface_files import describe_source, folder_of, weight_files
from cldetr.scenario import Category, Scenario

logger = logging.getLogger(__name__)

_TORCHVISION = "torchvision://"
_QUERIES = "query_embed.weight"
_UP_DETR = (
    "get up-detr-pre-training-60ep-imagenet.pth from https://github.com/dddzg/up-detr, then "
    "`cldetr convert up-detr-pre-training-60ep-imagenet.pth {}`"
)


def check_weights(weights: str) -> None:
    """Refuses a file that is not there, before anything is trained.

    Args:
        weights: a value of MODEL.WEIGHTS; addresses such as detectron2://… are not looked up.
    """
    if not weights or "://" in weights or Path(weights).is_file():
        return
    fix = _UP_DETR.format(weights) if "up_detr" in Path(weights).name else "set MODEL.WEIGHTS"
    raise InputError(f"there are no weights at {weights}: {fix}")


def initialise(detector: Detector, weights: str) -> None:
    """Loads initial weights of the first phase: a backbone, or a detector.

    The rows of the class head start at random where the detector has another number of classes.

    Args:
        detector: freshly built.
        weights: a file of ours, a converted one, or a backbone in Detectron2's naming (the model
            zoo's `detectron2://ImageNetPretrained/torchvision/R-50.pkl`) or, for a backbone of
            torchvision, in its naming: a file, or `torchvision://` and the name of the weights,
            such as MobileNet_V3_Large_Weights.IMAGENET1K_V2. Empty: from scratch.
    """
    if not weights:
        detector.load_pretrained()
        return
    check_weights(weights)
    try:
        if weights.startswith(_TORCHVISION):
            state = get_weight(weights.removeprefix(_TORCHVISION)).get_state_dict(check_hash=True)
        else:
            state = load_state(PathManager.get_local_path(weights))
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"cannot get the weights {weights}: {error}") from error
    found, own = _tensors(state, detector), detector.state_dict()
    if any(key in found and not key.startswith("backbone.") for key in own):
        head = {key: own[key] for key in detector.class_parameters()}
        if not any(key in found for key in head):  # UP-DETR's pre-training
            found |= head
            logger.info("%s has no class head: it starts at random", weights)
        elif any(len(found[key]) != len(head[key]) for key in head if key in found):
            found |= _fresh_head(detector, found)
            logger.info("%s detects other classes: their rows start at random", weights)
        load_into(detector, found | _fit_queries(detector, found, state, weights), weights)
        logger.info("started from the detector %s", weights)
        return
    own = detector.backbone.state_dict()
    if not own:
        raise InputError(
            f"{weights} does not hold the weights of a {type(detector).__name__}: give a model.pth "
            "of a run with it, or none"
        )
    found = {key.removeprefix("backbone."): value for key, value in found.items()}
    load_into(detector.backbone, {key: found[key] for key in own if key in found}, weights)
    unused = sorted(key for key in found if key not in own)
    logger.info(
        "started from the backbone %s%s", weights, f"; unused: {', '.join(unused)}" * bool(unused)
    )


def _fresh_head(detector: Detector, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A class head as initialised, but for the rows that stand for no class in particular."""
    own, head = detector.state_dict(), {}
    for key in detector.class_parameters():
        head[key] = own[key].clone()
        if key in found and found[key].shape[1:] == head[key].shape[1:]:
            background = len(head[key]) - detector.num_classes  # rows beyond the classes
            if background:
                head[key][-background:] = found[key][-background:]
            if key in detector.proposal_parameters():  # its row 0 means any object
                head[key][0] = found[key][0]
    return head


def _fit_queries(
    detector: Detector, found: Mapping[str, Tensor], state: Mapping[str, Any], path: str
) -> dict[str, Tensor]:
    """The queries of the groups that a file and a detector share; others start with their phase.

    Nothing where both have as many groups, and where the queries do not fit: `load_into` says so.
    """
    own, queries = detector.state_dict().get(_QUERIES), found.get(_QUERIES)
    groups = max(_groups_in_file(state, path), default=0) + 1
    if own is None or queries is None or groups == detector.query_groups:
        return {}
    sizes = len(queries) // groups, len(own) // detector.query_groups
    if sizes[0] != sizes[1]:
        raise InputError(
            f"{path} has groups of {sizes[0]} queries, here they have {sizes[1]}: set "
            f"MODEL.DETR.NUM_QUERIES {sizes[0]}"
        )
    if queries.shape[1:] != own.shape[1:]:
        return {}
    fitted, count = own.clone(), min(len(own), len(queries))
    fitted[:count] = queries[:count]
    return {_QUERIES: fitted}


def _groups_in_file(state: Mapping[str, Any], path: str) -> list[int]:
    """MODEL.DETR.QUERY_GROUPS of the config in a weights file; empty where it has none."""
    meta = state.get("cldetr")
    if not isinstance(meta, Mapping) or not {"config", "settings"} & {*meta}:
        return []
    return list(config_of_weights(meta, path).MODEL.DETR.QUERY_GROUPS)


def describe_architecture(cfg: CfgNode) -> None:
    """Fills in MODEL.HUGGINGFACE.CONFIG, so that a run's weights do not need the folder."""
    keys = cfg.MODEL.HUGGINGFACE
    if cfg.MODEL.META_ARCHITECTURE == "HuggingFaceDetector" and not keys.CONFIG:
        keys.CONFIG = describe_source(keys.NAME or cfg.MODEL.DETECTOR)


def digest_of(path: str) -> str:
    """The SHA-256 of a weights file, or of the weights in a folder of Hugging Face's."""
    folder = folder_of(path)
    if folder is None:
        return sha256_file(path)
    return sha256_json([sha256_file(file) for file in weight_files(folder)])


def known_categories(path: str) -> list[Category]:
    """The categories that a trained detector detects, in the order of its labels."""
    state = load_state(path)
    rows = {category.name: category for category in _categories(state, path)}
    known = [name for name in rows if name in state["cldetr"].get("seen", rows)]
    return [rows[name] for name in known]


def stored_query_groups(path: str) -> dict[str, int]:
    """The group of queries of each category that a trained detector knows; empty for one group."""
    state = load_state(path)
    groups = _groups_in_file(state, path)
    if not groups:
        return {}
    names = [category.name for category in _categories(state, path)]
    known = state["cldetr"].get("seen", names)
    return {name: group for name, group in zip(names, groups, strict=True) if name in known}


def trained_sides(path: str) -> tuple[int, ...]:
    """The smallest and the largest short side that a detector was trained on, as its file says."""
    return tuple(load_state(path)["cldetr"].get("short_sides", ()))


def _categories(state: Mapping[str, Any], path: str) -> list[Category]:
    """The categories of the class head's rows; a file that does not name them is refused."""
    meta = state.get("cldetr")
    found = meta.get("categories") if isinstance(meta, Mapping) else None
    if not found:
        raise InputError(
            f"{path} does not say which categories it detects: make it with `cldetr convert … "
            "--categories ANNOTATIONS.json`, or use a model.pth of a run"
        )
    return [Category(int(category["id"]), str(category["name"])) for category in found]


def load_trained_detector(detector: Detector, path: str, scenario: Scenario) -> None:
    """Loads a trained detector as the result of the first phase.

    Its file says which categories it knows (files of ours and converted ones do). They must be the
    first phase's, by name. The rows of the class head go where the scenario has their categories;
    rows of categories that the file does not have stay as initialised.
    """
    state = load_state(path)
    rows = [category.name for category in _categories(state, path)]
    known = list(state["cldetr"].get("seen", rows))
    wanted = [scenario.categories[label].name for label in scenario.phases[0].classes]
    problems = [f"does not know {name!r}" for name in wanted if name not in known]
    problems += [f"knows {name!r}, not of phase 1" for name in known if name not in wanted]
    if problems:
        raise InputError.listing(
            f"{path} is not a detector of the first phase's classes (to add categories to it, use "
            "`cldetr add` or SCENARIO.PROTOCOL extend; which classes a converted checkpoint knows "
            "is said by `cldetr convert … --seen`):",
            problems,
        )
    names = [category.name for category in scenario.categories]
    pairs = [(names.index(name), row) for row, name in enumerate(rows) if name in names]
    labels, sources = (torch.tensor(column) for column in zip(*pairs, strict=True))
    found, current = _tensors(state, detector), detector.state_dict()
    fitted = dict(found)
    for key in detector.class_parameters():
        value = current[key]
        if key in found:
            if len(found[key]) - len(rows) != len(value) - len(scenario.categories):
                raise InputError(
                    f"{path}: {key} has {len(found[key])} rows for {len(rows)} categories; "
                    "it is another kind of detector"
                )
            if found[key].shape[1:] != value.shape[1:]:
                continue  # `load_into` says so
            fitted[key] = value.clone()
            fitted[key][labels] = found[key][sources].to(value)
            fitted[key][len(scenario.categories) :] = found[key][len(rows) :].to(value)
            if key in detector.proposal_parameters():  # its row 0 means any object
                fitted[key][0] = found[key][0].to(value[0])
    stored = stored_query_groups(path)
    moved = [
        f"{name!r}: group {stored.get(name, 0)} there, {group} here"
        for name in wanted
        if (group := detector.query_group(names.index(name))) != stored.get(name, 0)
    ]
    if moved:
        raise InputError.listing(
            f"other queries predict the classes of {path} than here (set MODEL.DETR.QUERY_GROUPS; "
            "to add classes to it, use `cldetr add`):",
            moved,
        )
    load_into(detector, fitted | _fit_queries(detector, found, state, path), path)
    logger.info("phase 1 is the trained detector %s (%d categories)", path, len(wanted))


def _tensors(state: Mapping[str, Any], detector: Detector) -> dict[str, Tensor]:
    """The weights in a checkpoint's dictionary as tensors, without the mask of the seen classes."""
    weights = state.get("model", state)
    return {
        key: torch.as_tensor(value)
        for key, value in weights.items()
        if isinstance(value, Tensor) or hasattr(value, "__array__")
        if key not in detector.optional_keys
    }
