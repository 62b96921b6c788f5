"""The independent implementation we compare with: Hugging Face transformers' models, our weights.

Used by the benchmarks and by the parity tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from detectron2.modeling.backbone import ResNet
from torch import Tensor, nn
from transformers import (
    DeformableDetrConfig,
    DeformableDetrForObjectDetection,
    DetrConfig,
    DetrForObjectDetection,
    ResNetConfig,
)

from cldetr.modeling import DETR, DeformableDETR
from cldetr.modeling.detector import Detector

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


def twin(model: Detector) -> nn.Module:
    """Builds Hugging Face's model with the structure, weights and dropout of ours."""
    theirs: nn.Module
    settings = _transformer_settings(model)
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
        theirs = DeformableDetrForObjectDetection(DeformableDetrConfig(**settings))
        _untie_heads(theirs, model)
    else:
        # With auxiliary losses their decoder passes normalised states on to the next layer, unlike
        # DETR, so that the last layer alone is comparable.
        settings["auxiliary_loss"] = False
        theirs = DetrForObjectDetection(DetrConfig(**settings))
    state = {k: v for k, v in model.state_dict().items() if k not in model.optional_keys}
    state = translate(model, state)
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    if unexpected or any(not re.search(r"decoder\.(bbox|class)_embed", x) for x in missing):
        raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    # They freeze the whole of a ResNet that is not timm's (its stages are named otherwise than they
    # look for); the stem and the first stage are meant.
    for name, parameter in theirs.named_parameters():
        if ".backbone." in name:
            parameter.requires_grad_(bool(re.search(r"stages\.[123]\.", name)))
    return theirs


def _transformer_settings(model: Detector) -> dict[str, Any]:
    transformer: Any = model.transformer
    encoder, decoder = transformer.encoder.layers, transformer.decoder.layers
    dropout = encoder[0].dropout
    heads = decoder[0].self_attn.num_heads
    return {
        "backbone_config": _resnet_config(model.backbone, model.in_features),
        "d_model": transformer.dim,
        "num_queries": model.num_queries,
        "num_labels": model.num_classes,
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


def _resnet_config(backbone: ResNet, in_features: tuple[str, ...]) -> ResNetConfig:
    stages = [backbone.get_submodule(name) for name in backbone.stage_names]
    settings: dict[str, Any] = {
        "embedding_size": backbone.stem.conv1.out_channels,
        "hidden_sizes": [stage[-1].out_channels for stage in stages],
        "depths": [len(stage) for stage in stages],
        "layer_type": "bottleneck",
        "out_features": [f"stage{int(name[3:]) - 1}" for name in in_features],
    }
    return ResNetConfig(**settings)


def inputs(batch_tensor: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Our image tensor and padding mask as their arguments (their mask is 1 at pixels)."""
    return {"pixel_values": batch_tensor, "pixel_mask": (~mask).to(torch.int64)}


def weighted_losses(model: Detector, loss_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their losses under our names, with our weights."""
    criterion = model.criterion
    weights = {
        "loss_ce": ("loss_cls", criterion.class_weight),
        "loss_bbox": ("loss_bbox", criterion.box_weight),
        "loss_giou": ("loss_giou", criterion.giou_weight),
    }
    losses = {}
    for key, value in loss_dict.items():
        kind, number = re.match(r"(\D+?)(_\d+)?$", key).groups("")  # type: ignore[union-attr]
        if kind in weights:
            name, weight = weights[kind]
            losses[name + number] = weight * value
    return losses
