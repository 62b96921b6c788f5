"""Multi-scale deformable attention: every query samples a few points of every feature level.

Shapes: N images, S = Σ H·W cells of all levels, M heads, D channels per head, Q queries, L levels,
P points per head and level.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Samples `value` bilinearly at the given points and sums the samples by their weights.

    Args:
        value: (N, S, M, D), the cells of all levels, row by row, one level after the other.
        spatial_shapes: (L, 2) int64, height and width of each level.
        sampling_locations: (N, Q, M, L, P, 2), x and y in [0, 1] of each level; outside is zero.
        attention_weights: (N, Q, M, L, P).

    Returns:
        (N, Q, M·D), the heads side by side.
    """
    return ms_deform_attn_reference(value, spatial_shapes, sampling_locations, attention_weights)


def ms_deform_attn_reference(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Computes `ms_deform_attn` with PyTorch alone, one `grid_sample` per level."""
    images, _, heads, channels = value.shape
    queries, levels, points = attention_weights.shape[1], *attention_weights.shape[3:]
    sizes: list[list[int]] = spatial_shapes.tolist()
    grids = 2 * sampling_locations - 1  # grid_sample's corners are -1 and 1
    sampled = []
    cells_by_level = value.split([height * width for height, width in sizes], dim=1)
    for level, (cells, (height, width)) in enumerate(zip(cells_by_level, sizes, strict=True)):
        # (N, H·W, M, D) → (N·M, D, H, W) and (N, Q, M, P, 2) → (N·M, Q, P, 2)
        plane = cells.permute(0, 2, 3, 1).reshape(images * heads, channels, height, width)
        grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
        sampled.append(F.grid_sample(plane, grid, align_corners=False))  # (N·M, D, Q, P)
    weights = attention_weights.transpose(1, 2).reshape(images * heads, 1, queries, levels * points)
    output = (torch.stack(sampled, dim=-2).flatten(-2) * weights).sum(-1)  # (N·M, D, Q)
    return output.view(images, heads * channels, queries).transpose(1, 2).contiguous()
