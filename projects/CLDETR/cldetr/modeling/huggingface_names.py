"""Our detectors as models of Hugging Face transformers: names, settings and image processors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling.backbone import ResNet
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, BottleneckBlock
from torch import Tensor, nn

from cldetr.errors import InputError
from cldetr.modeling.deformable_detr import DeformableDETR
from cldetr.modeling.detector import Detector
from cldetr.modeling.detr import DETR
from cldetr.modeling.huggingface import HuggingFaceDetector
from cldetr.modeling.huggingface_files import (
    build_from_config,
    library,
    plain_settings,
    with_labels,
)

# Ours → theirs, in order; every rule that matches is applied.
_Rules = list[tuple[str, str | Callable[[re.Match[str]], str]]]
_BACKBONE: _Rules = [
    (r"^backbone\.", "model.backbone.model."),
    (r"model\.stem\.conv1", "model.embedder.embedder"),
    (r"\.res(\d)\.(\d+)\.", lambda m: f".encoder.stages.{int(m[1]) - 2}.layers.{m[2]}."),
    (r"\.conv(\d)\.", lambda m: f".layer.{int(m[1]) - 1}."),
    (r"\.(weight)$", r".convolution.\1"),
    (r"\.norm\.convolution\.", ".normalization."),
    (r"\.norm\.", ".normalization."),
]
_SHARED: _Rules = [
    (r"^transformer\.", "model."),
    (r"^(input_proj|query_embed)\.", r"model.\1."),
    (r"query_embed", "query_position_embeddings"),
    (r"\.linear(\d)\.", r".mlp.fc\1."),
    (r"\.out_proj\.", ".o_proj."),
    (r"(encoder.*)\.norm1\.", r"\1.self_attn_layer_norm."),
    (r"(encoder.*)\.norm2\.", r"\1.final_layer_norm."),
    (r"(decoder.*)\.norm3\.", r"\1.final_layer_norm."),
]
_DEFORMABLE: _Rules = [
    *_SHARED,
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"(decoder.*)\.norm2\.", r"\1.self_attn_layer_norm."),
    (r"(decoder.*)\.norm1\.", r"\1.encoder_attn_layer_norm."),
]
_DETR: _Rules = [
    *_SHARED,
    (r"\.multihead_attn\.", ".encoder_attn."),
    (r"(decoder.*)\.norm1\.", r"\1.self_attn_layer_norm."),
    (r"(decoder.*)\.norm2\.", r"\1.encoder_attn_layer_norm."),
    (r"decoder\.norm\.", "decoder.layernorm."),
    (r"input_proj\.", "input_projection."),
    (r"^class_embed", "class_labels_classifier"),
    (r"^bbox_embed", "bbox_predictor"),
]


def to_hugging_face(detector: Detector, labels: Sequence[str]) -> Any:
    """A model of transformers that predicts what a detector does, with its visible classes alone.

    Args:
        detector: a `HuggingFaceDetector`, or a `DeformableDETR` or `DETR` on one of Detectron2's
            ResNets.
        labels: names of the visible classes, in the order of their rows.
    """
    state = visible_state(detector)
    if isinstance(detector, HuggingFaceDetector):
        config = type(detector.model.config)(**plain_settings(detector.model.config))
        model: Any = build_from_config(with_labels(config, labels), tied={})
        model.load_state_dict({k.removeprefix("model."): v for k, v in state.items()})
        return _as_trained(model)
    check_convertible(detector)
    if detector.input_format == "BGR":  # image processors have no such order
        state["backbone.stem.conv1.weight"] = state["backbone.stem.conv1.weight"].flip(1)
    shared = twin(detector, state, len(labels))
    config = with_labels(shared.config, labels)
    model = build_from_config(config, tied={})
    model.load_state_dict(shared.state_dict())
    return _as_trained(model)


def _as_trained(model: Any) -> Any:
    """A model none of whose weights are one, for a file that has them all.

    Where weights are equal, transformers makes them one when it loads them; where they differ, it
    does not.
    """
    if hasattr(model.config, "tie_word_embeddings"):
        model.config.tie_word_embeddings = True
    return model.eval()


def visible_state(detector: Detector) -> dict[str, Tensor]:
    """The weights of a detector with the rows of its visible classes and of no-object."""
    classes = detector.visible_classes.nonzero().flatten()
    extra = torch.arange(detector.num_classes, detector.num_classes + 1, device=classes.device)
    state = {k: v for k, v in detector.state_dict().items() if k not in detector.optional_keys}
    proposals = detector.proposal_parameters()
    for key in detector.class_parameters():
        value = state[key]
        rows = torch.cat([classes, extra[: len(value) - detector.num_classes]])
        state[key] = value[rows]
        if key in proposals:  # row 0 means any object
            state[key][0] = value[0]
    return {key: value.cpu().clone() for key, value in state.items()}


def check_convertible(detector: Detector) -> None:
    """Refuses a detector of ours that transformers has no model for."""
    if not isinstance(detector, (DeformableDETR, DETR)):
        raise InputError(
            f"transformers has no model for {type(detector).__name__}: it has one for "
            "DeformableDETR, DETR and HuggingFaceDetector"
        )
    backbone = detector.backbone
    norms = [type(x.norm) for x in backbone.modules() if getattr(x, "norm", None) is not None]
    plain = (
        isinstance(backbone, ResNet)
        and type(backbone.stem) is BasicStem
        and all(type(x) in (BasicBlock, BottleneckBlock) for y in backbone.stages for x in y)
        and all(norm is FrozenBatchNorm2d for norm in norms)
        and not any(getattr(x, "stride_in_1x1", False) for x in backbone.modules())
        and all(
            x.conv1.stride == (1, 1)
            for y in backbone.stages
            for x in y
            if type(x) is BottleneckBlock
        )
    )
    if not plain:
        raise InputError(
            "transformers has no model for this backbone: it has Detectron2's ResNets with frozen "
            "batch normalisation and the stride in the 3×3 convolution "
            "(configs/detector/deformable_detr_r50.yaml)"
        )
    encoder: Any = detector.transformer.encoder
    if getattr(encoder.layers[0], "pre_norm", False):
        raise InputError("transformers' DETR has no normalisation before each sub-layer (UP-DETR)")


def image_processor(detector: Detector, short_side: int, max_side: int) -> Any:
    """The image processor that prepares images as `Predictor` does.

    Args:
        detector: whose normalisation it has.
        short_side: of images; 0 keeps their sizes.
        max_side: of images.
    """
    if isinstance(detector, HuggingFaceDetector):
        processor = detector.processor
        if not detector.resizes:
            processor = type(processor)(
                **{**processor.to_dict(), "size": _size(short_side, max_side)}
            )
        return processor
    transformers = library()
    kind = "DetrImageProcessor" if isinstance(detector, DETR) else "DeformableDetrImageProcessor"
    step = -1 if detector.input_format == "BGR" else 1
    return getattr(transformers, kind)(
        do_resize=bool(short_side),
        size=_size(short_side or 800, max_side),
        image_mean=(detector.pixel_mean.flatten() / 255).tolist()[::step],
        image_std=(detector.pixel_std.flatten() / 255).tolist()[::step],
    )


def _size(short_side: int, max_side: int) -> dict[str, int]:
    return {"shortest_edge": short_side, "longest_edge": max_side}


def translate(model: Detector, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames parameters of our model (or their gradients) to Hugging Face's names."""
    translated = {}
    transformer_rules = _DETR if isinstance(model, DETR) else _DEFORMABLE
    for name, tensor in tensors.items():
        rules = _BACKBONE if name.startswith("backbone.") else transformer_rules
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        if "in_proj_" in name:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                translated[name.replace("in_proj_", f"{letter}_proj.")] = part
        else:
            translated[name] = tensor
    return translated


def twin(
    model: Any, state: Mapping[str, Tensor] | None = None, num_classes: int | None = None
) -> Any:
    """Builds Hugging Face's model with the structure, weights and dropout of ours.

    Args:
        model: a `DeformableDETR` or `DETR`.
        state: other weights than the model's own.
        num_classes: how many classes these have.
    """
    transformers = library()
    settings = _transformer_settings(model) | {"num_labels": num_classes or model.num_classes}
    theirs: Any
    if isinstance(model, DeformableDETR):
        encoder: Any = model.transformer.encoder.layers
        decoder: Any = model.transformer.decoder.layers
        settings |= {
            "two_stage_num_proposals": model.num_queries,
            "num_feature_levels": model.transformer.levels,
            "encoder_n_points": encoder[0].self_attn.points,
            "decoder_n_points": decoder[0].cross_attn.points,
            "with_box_refine": model.box_refine,
            "two_stage": model.transformer.two_stage,
            "class_cost": 2,
            "tie_word_embeddings": False,
        }
        config = transformers.DeformableDetrConfig(**settings)
        theirs = transformers.DeformableDetrForObjectDetection(config)
        _untie_heads(theirs, model)
    else:
        # With auxiliary losses their decoder passes normalised states on to the next layer, unlike
        # DETR, so that the last layer alone is comparable.
        settings["auxiliary_loss"] = False
        theirs = transformers.DetrForObjectDetection(transformers.DetrConfig(**settings))
    own = model.state_dict() if state is None else state
    weights = translate(model, {k: v for k, v in own.items() if k not in model.optional_keys})
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    if unexpected or any(not re.search(r"decoder\.(bbox|class)_embed", x) for x in missing):
        raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    # They freeze the whole of a ResNet that is not timm's (its stages are named otherwise than they
    # look for); the stem and the first stage are meant.
    for name, parameter in theirs.named_parameters():
        if ".backbone." in name:
            parameter.requires_grad_(bool(re.search(r"stages\.[123]\.", name)))
    return theirs


def _transformer_settings(model: Any) -> dict[str, Any]:
    transformer = model.transformer
    encoder, decoder = transformer.encoder.layers, transformer.decoder.layers
    dropout = encoder[0].dropout
    heads = decoder[0].self_attn.num_heads
    return {
        "backbone_config": _resnet_config(model.backbone, model.in_features),
        "d_model": transformer.dim,
        "num_queries": model.num_queries,
        "encoder_layers": len(encoder),
        "decoder_layers": len(decoder),
        "encoder_ffn_dim": encoder[0].linear1.out_features,
        "decoder_ffn_dim": decoder[0].linear1.out_features,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
        "auxiliary_loss": True,
    }


def _untie_heads(theirs: Any, model: DeformableDETR) -> None:
    """Shares heads exactly where our model does."""
    for name in ("class_embed", "bbox_embed"):
        heads = getattr(theirs, name)
        if not model.box_refine:
            setattr(theirs, name, nn.ModuleList([heads[0]] * len(heads)))
            continue
        copies = nn.ModuleList(_fresh_copy(head) for head in heads)
        setattr(theirs, name, copies)
        if name == "bbox_embed" or model.transformer.two_stage:
            setattr(theirs.model.decoder, name, copies)


def _fresh_copy(module: Any) -> nn.Module:
    """A module of the same shape whose parameters are its own."""
    if isinstance(module, nn.Linear):
        return nn.Linear(module.in_features, module.out_features)
    first = module.layers[0]
    return type(module)(first.in_features, first.out_features, 4, module.num_layers)


def _resnet_config(backbone: ResNet, in_features: Sequence[str]) -> Any:
    stages = [backbone.get_submodule(name) for name in backbone.stage_names]
    basic = type(stages[0][0]) is BasicBlock
    settings: dict[str, Any] = {
        "embedding_size": backbone.stem.conv1.out_channels,
        "hidden_sizes": [stage[-1].out_channels for stage in stages],
        "depths": [len(stage) for stage in stages],
        "layer_type": "basic" if basic else "bottleneck",
        "out_features": [f"stage{int(name[3:]) - 1}" for name in in_features],
    }
    return library().ResNetConfig(**settings)
