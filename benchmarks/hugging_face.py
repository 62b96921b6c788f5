"""The independent implementation we compare with: Hugging Face transformers' models, our weights.

Used by the benchmarks and by the parity tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from cldetr.modeling.detector import Detector
from cldetr.modeling.huggingface_names import translate, twin

__all__ = ["inputs", "translate", "twin", "weighted_losses"]


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
