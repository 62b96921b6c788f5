"""Sine embeddings of positions, as DETR and Deformable DETR use them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sine_embedding(position: Tensor, dim: int, temperature: float = 10000.0) -> Tensor:
    """Embeds scalars as `dim` sines and cosines, interleaved, of falling frequency.

    Args:
        position: (…), angles.
        dim: an even number.
        temperature: the ratio of the highest frequency to the lowest one, nearly.

    Returns:
        (…, dim) in float32.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=position.device) / dim
    angles = position.float()[..., None] / temperature**exponents  # (…, dim / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def sine_position_map(
    valid: Tensor, shape: tuple[int, int], dim: int, offset: float = -0.5
) -> Tensor:
    """Embeds the position of every cell of a feature map within its image.

    The image covers the top left `valid` cells of the map; the rest is padding, where the result is
    finite and without meaning. Rows and columns are embedded apart, on H + W numbers and not H·W.

    Args:
        valid: (B, 2), width and height of each image in cells.
        shape: height H and width W of the map.
        dim: channels, half of them for y (first) and half for x.
        offset: -0.5 puts positions at cell centres (Deformable DETR); 0 at their ends (DETR).

    Returns:
        (B, H, W, dim).
    """
    height, width = shape
    x = _axis_embedding(valid[:, 0], width, dim // 2, offset)  # (B, W, dim / 2)
    y = _axis_embedding(valid[:, 1], height, dim // 2, offset)  # (B, H, dim / 2)
    x = x[:, None].expand(-1, height, -1, -1)
    y = y[:, :, None].expand(-1, -1, width, -1)
    return torch.cat([y, x], dim=-1)


def _axis_embedding(valid: Tensor, cells: int, dim: int, offset: float) -> Tensor:
    count = torch.arange(1, cells + 1, device=valid.device, dtype=torch.float32)
    last = valid.float()[:, None]  # (B, 1)
    position = (torch.minimum(count, last) + offset) / (last + 1e-6) * (2 * math.pi)  # (B, cells)
    return sine_embedding(position, dim)
