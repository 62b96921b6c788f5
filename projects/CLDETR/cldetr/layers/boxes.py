"""Boxes as tensors: conversions, overlap and generalised overlap.

Boxes are (…, 4), either `cxcywh` (centre and size) or `xyxy` (two corners), in any unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Keeps 0 / 0 out of the overlap of empty boxes. The area of one pixel of a 1333 × 1333 image is
# 6e-7 in normalised units, so that no real box comes near.
_LEAST_AREA = 1e-9


def box_cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Converts centre and size to corners."""
    centre, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([centre - 0.5 * size, centre + 0.5 * size], dim=-1)


def box_xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """Converts corners to centre and size."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat([(low + high) * 0.5, high - low], dim=-1)


def box_iou(boxes1: Tensor, boxes2: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the overlap of all pairs of boxes in corner form.

    Args:
        boxes1: (…, N, 4).
        boxes2: (…, M, 4).

    Returns:
        intersection over union (…, N, M) and union (…, N, M).
    """
    return _iou(boxes1[..., :, None, :], boxes2[..., None, :, :])


def paired_giou(boxes1: Tensor, boxes2: Tensor) -> Tensor:
    """Computes the generalised IoU of boxes in corner form, one to one, with broadcasting.

    All pairs of (N, 4) and (M, 4) are `paired_giou(boxes1[:, None], boxes2)`.

    Returns:
        (…), in [-1, 1].
    """
    return paired_overlap(boxes1, boxes2)[1]


def paired_overlap(boxes1: Tensor, boxes2: Tensor) -> tuple[Tensor, Tensor]:
    """Computes IoU and generalised IoU of boxes in corner form, one to one, with broadcasting."""
    iou, union = _iou(boxes1, boxes2)
    low = torch.minimum(boxes1[..., :2], boxes2[..., :2])
    high = torch.maximum(boxes1[..., 2:], boxes2[..., 2:])
    hull = _area(low, high).clamp(min=_LEAST_AREA)
    return iou, iou - (hull - union) / hull


def _iou(boxes1: Tensor, boxes2: Tensor) -> tuple[Tensor, Tensor]:
    low = torch.maximum(boxes1[..., :2], boxes2[..., :2])
    high = torch.minimum(boxes1[..., 2:], boxes2[..., 2:])
    intersection = _area(low, high)
    areas = _area(boxes1[..., :2], boxes1[..., 2:]) + _area(boxes2[..., :2], boxes2[..., 2:])
    union = areas - intersection
    return intersection / union.clamp(min=_LEAST_AREA), union


def _area(low: Tensor, high: Tensor) -> Tensor:
    width, height = (high - low).clamp(min=0).unbind(-1)
    return width * height
