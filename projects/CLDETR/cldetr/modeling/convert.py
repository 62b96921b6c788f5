"""Turning other implementations' checkpoints into ours: pure functions on dictionaries of tensors.

Ours bear the official names outside the backbone and Detectron2's names in it, so that little more
than the backbone is renamed and the class head's rows are gathered: official heads have a row per
raw category id, ours a row per category.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from detectron2.config import get_cfg
from detectron2.data.datasets.builtin_meta import COCO_CATEGORIES
from detectron2.modeling import META_ARCH_REGISTRY
from torch import Tensor

from cldetr.errors import InputError
from cldetr.modeling.config import add_model_config

KINDS = ("deformable_detr", "cl_detr", "detr", "up_detr", "backbone")

# The categories of COCO, as (id, name), ascending.
COCO = tuple((entry["id"], entry["name"]) for entry in COCO_CATEGORIES if entry["isthing"])

# Keys that mean nothing to a detector, with the reason that the report gives.
_USELESS = {
    r"\.total_(params|ops)$": "counters of a profiler",
    r"\.num_batches_tracked$": "counters of batch normalisation",
    r"^(patch2query|feature_align)\.": "pre-training alone",
    r"^(fc|projection_head|prototypes|stem\.fc)\b": "a classifier on the backbone",
}
_DEPTHS = {(2, 2, 2, 2): 18, (3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152}


@dataclass
class Converted:
    """A converted checkpoint and what there is to say about it."""

    kind: str
    model: dict[str, Tensor]
    categories: tuple[tuple[int, str], ...] | None  # of the class head's rows; None: no head
    settings: dict[str, Any]  # config keys of the detector that it fits
    dropped: dict[str, list[str]] = field(default_factory=dict)  # reason → keys of the source


def convert_checkpoint(
    file: Mapping[str, Any],
    kind: str = "auto",
    categories: Sequence[tuple[int, str]] = COCO,
) -> Converted:
    """Converts the content of a checkpoint file.

    Args:
        file: what the file holds.
        kind: one of `KINDS`, or "auto" to tell by the keys.
        categories: (id, name) of each class, in the order of our labels.

    Raises:
        InputError: if the file is of no known kind, or any weight of the detector would be missing
            or of another shape.
    """
    state = find_state(file)
    found = detect_kind(state)
    kind = found if kind == "auto" else kind
    if found != ("deformable_detr" if kind == "cl_detr" else kind):
        raise InputError(f"this is a checkpoint of kind {found}, not {kind}")
    converted = Converted(kind, {}, None, {})
    kept = _drop_useless(state, converted.dropped)
    if kind == "backbone":
        named = {rename_backbone(name): tensor for name, tensor in kept.items()}
        converted.settings = _backbone_settings(named)
    else:
        named = {
            rename_backbone(name.removeprefix("backbone.0.body."))
            if name.startswith("backbone.0.body.")
            else name: tensor
            for name, tensor in kept.items()
        }
        _drop_aliases(named, converted.dropped)
        converted.categories = _gather_classes(named, kind, categories, converted.dropped)
        converted.settings = _backbone_settings(named) | _detector_settings(named, len(categories))
    converted.model = _check_against_model(named, converted)
    return converted


def find_state(file: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights in a checkpoint file, without the prefixes that parallel training leaves."""
    content: Any = file
    for key in ("model", "state_dict"):
        if isinstance(content.get(key), Mapping):
            content = content[key]
    state = {}
    for name, value in content.items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, Tensor):
            state[re.sub(r"^(module\.)+", "", name)] = value
    if not state:
        raise InputError("the file holds no weights: no tensors under 'model' or at its top")
    return state


def detect_kind(state: Mapping[str, Tensor]) -> str:
    """Tells the kind of a checkpoint by its keys."""
    marks = {
        "transformer.level_embed": "deformable_detr",
        "patch2query.weight": "up_detr",
        "transformer.decoder.layers.0.multihead_attn.in_proj_weight": "detr",
        "layer1.0.conv1.weight": "backbone",
        "res2.0.conv1.weight": "backbone",
    }
    for key, kind in marks.items():
        if key in state:
            return kind
    some = ", ".join(sorted(state)[:4])
    raise InputError(
        f"the weights are of no kind that we know ({', '.join(KINDS)}); they begin with {some}"
    )


def rename_backbone(name: str) -> str:
    """Torchvision's name of a ResNet's weight → Detectron2's; Detectron2's stays as it is."""
    name = re.sub(r"^layer(\d)", lambda m: f"res{int(m[1]) + 1}", name)
    name = name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
    name = re.sub(r"\bbn(\d)\b", r"conv\1.norm", name)
    if not name.startswith(("res", "stem.")):
        name = f"stem.{name}"
    return f"backbone.{name}"


def gather_rows(tensor: Tensor, ids: Sequence[int], no_object: bool) -> Tensor:
    """The rows of a class head that belong to categories with `ids`, no-object's last.

    A head with more rows than the greatest id has one per raw id; a head with as many rows as there
    are categories has them in our order already.
    """
    rows = len(tensor) - int(no_object)
    if rows > max(ids):
        chosen = list(ids)
    elif rows == len(ids):
        chosen = list(range(rows))
    else:
        raise InputError(
            f"the class head has {rows} rows, which fits neither {len(ids)} categories nor their "
            f"ids, which reach {max(ids)}; give the annotation file it was trained on"
        )
    return tensor[[*chosen, rows] if no_object else chosen]


def _drop_useless(state: Mapping[str, Tensor], dropped: dict[str, list[str]]) -> dict[str, Tensor]:
    kept = {}
    for name, tensor in state.items():
        reasons = [why for pattern, why in _USELESS.items() if re.search(pattern, name)]
        if reasons:
            dropped.setdefault(reasons[0], []).append(name)
        else:
            kept[name] = tensor
    return kept


def _drop_aliases(named: dict[str, Tensor], dropped: dict[str, list[str]]) -> None:
    """Drops the heads' second names, which refining models have."""
    for name in [x for x in named if re.match(r"transformer\.decoder\.(class|bbox)_embed\.", x)]:
        twin = name.removeprefix("transformer.decoder.")
        if twin not in named or not torch.equal(named[name], named[twin]):
            raise InputError(f"{name} should be the same as {twin}, and is not")
        dropped.setdefault("second names of the heads", []).append(name)
        del named[name]


def _gather_classes(
    named: dict[str, Tensor],
    kind: str,
    categories: Sequence[tuple[int, str]],
    dropped: dict[str, list[str]],
) -> tuple[tuple[int, str], ...] | None:
    """Puts the class head's rows in the order of the categories; returns whose they are."""
    heads = [name for name in named if name.startswith("class_embed.")]
    if kind == "up_detr":
        # Pre-training tells patches from no patch; fine-tuning starts with a new class head.
        dropped["class head of the pre-training"] = heads
        for name in heads:
            del named[name]
        return None
    ids = [category for category, _ in categories]
    softmax = kind == "detr"
    two_stage = "transformer.pos_trans.weight" in named
    last = max(map(_head_number, heads), default=-1)
    for name in heads:
        rows = gather_rows(named[name], ids, no_object=softmax)
        if two_stage and _head_number(name) == last:
            rows[0] = named[name][0]  # the proposals' head: row 0 means any object
        named[name] = rows
    return tuple(categories)


def _head_number(name: str) -> int:
    """Which decoder layer a head belongs to; -1 where there is one for all."""
    found = re.match(r"class_embed\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _backbone_settings(named: Mapping[str, Tensor]) -> dict[str, Any]:
    blocks = tuple(
        len({x.split(".")[2] for x in named if x.startswith(f"backbone.res{stage}.")})
        for stage in (2, 3, 4, 5)
    )
    if blocks not in _DEPTHS:
        raise InputError(f"the backbone is no ResNet that we know: blocks per stage {blocks}")
    depth = _DEPTHS[blocks]
    if depth == 50 and "backbone.res2.0.conv3.weight" not in named:
        depth = 34
    settings: dict[str, Any] = {"RESNETS.DEPTH": depth}
    if depth < 50:
        settings["RESNETS.RES2_OUT_CHANNELS"] = 64
    return settings


def _detector_settings(named: Mapping[str, Tensor], num_classes: int) -> dict[str, Any]:
    """Config keys under MODEL that weights tell by their names and shapes."""

    def count(pattern: str) -> int:
        return len({m[1] for m in (re.match(pattern, name) for name in named) if m})

    def shape(name: str) -> torch.Size:
        if name not in named:
            raise InputError(f"{name} is missing: the checkpoint is not whole")
        return named[name].shape

    settings: dict[str, Any] = {
        "DETR.NUM_CLASSES": num_classes,
        "DETR.ENC_LAYERS": count(r"transformer\.encoder\.layers\.(\d+)\."),
        "DETR.DEC_LAYERS": count(r"transformer\.decoder\.layers\.(\d+)\."),
        "DETR.FFN_DIM": shape("transformer.encoder.layers.0.linear1.weight")[0],
    }
    if "transformer.level_embed" not in named:
        queries, dim = shape("query_embed.weight")
        return settings | {
            "META_ARCHITECTURE": "DETR",
            "RESNETS.OUT_FEATURES": ["res5"],
            "DETR.IN_FEATURES": ["res5"],
            "DETR.HIDDEN_DIM": dim,
            "DETR.NUM_QUERIES": queries,
            "DETR.PRE_NORM": "transformer.encoder.norm.weight" in named,
        }
    levels, dim = shape("transformer.level_embed")
    two_stage = "transformer.pos_trans.weight" in named
    projections = [shape(f"input_proj.{level}.0.weight") for level in range(levels)]
    features = ["res3", "res4", "res5"][-sum(x[-1] == 1 for x in projections) :]
    per_point = 8 * levels * 2  # heads · levels · (x, y)
    encoder = shape("transformer.encoder.layers.0.self_attn.sampling_offsets.weight")
    decoder = shape("transformer.decoder.layers.0.cross_attn.sampling_offsets.weight")
    return settings | {
        "META_ARCHITECTURE": "DeformableDETR",
        "RESNETS.OUT_FEATURES": features,
        "DETR.IN_FEATURES": features,
        "DETR.HIDDEN_DIM": dim,
        "DETR.LEVELS": levels,
        "DETR.ENC_POINTS": encoder[0] // per_point,
        "DETR.DEC_POINTS": decoder[0] // per_point,
        "DETR.NUM_QUERIES": 300 if two_stage else shape("query_embed.weight")[0],
        "DETR.TWO_STAGE": two_stage,
        "DETR.WITH_BOX_REFINE": two_stage or not _heads_shared(named),
    }


def _heads_shared(named: Mapping[str, Tensor]) -> bool:
    """Whether all layers have the same heads."""
    heads = [x for x in named if re.match(r"(class|bbox)_embed\.\d+\.", x)]
    firsts = [re.sub(r"\.\d+\.", ".0.", name, count=1) for name in heads]
    return all(
        first in named and torch.equal(named[name], named[first])
        for name, first in zip(heads, firsts, strict=True)
    )


def _check_against_model(named: Mapping[str, Tensor], converted: Converted) -> dict[str, Tensor]:
    """Holds converted weights against the detector that they are for.

    Returns:
        the weights that fit; names that the detector does not know are reported as dropped.
    """
    cfg = get_cfg()
    add_model_config(cfg)
    cfg.MODEL.BACKBONE.NAME = "build_resnet_backbone"
    # What torchvision's, DETR's and SwAV's weights were trained with. Where the stride is does not
    # show in any shape: with the other one the weights load and the features are wrong.
    cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False
    cfg.MODEL.RESNETS.OUT_FEATURES = cfg.MODEL.DETR.IN_FEATURES
    cfg.MODEL.DETR.NUM_CLASSES = 1  # a backbone does not tell
    cfg.MODEL.merge_from_list([word for pair in converted.settings.items() for word in pair])
    with torch.device("meta"):
        arch = converted.settings.get("META_ARCHITECTURE", "DeformableDETR")
        detector = META_ARCH_REGISTRY.get(arch)(cfg)
    wanted = {
        name: tensor
        for name, tensor in detector.state_dict().items()
        if name not in detector.optional_keys
    }
    if converted.kind == "backbone":
        wanted = {name: tensor for name, tensor in wanted.items() if name.startswith("backbone.")}
    problems = []
    for name, tensor in wanted.items():
        if name not in named:
            if converted.categories is not None or not name.startswith("class_embed."):
                problems.append(f"{name} is missing")
        elif named[name].shape != tensor.shape:
            found, expected = tuple(named[name].shape), tuple(tensor.shape)
            problems.append(f"{name} has shape {found}, expected {expected}")
    if problems:
        raise InputError.listing("the checkpoint does not fill the detector:", problems)
    unknown = [name for name in named if name not in wanted]
    if unknown:
        converted.dropped["unknown to the detector"] = unknown
    return {name: named[name].clone() for name in wanted if name in named}
