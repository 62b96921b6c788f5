"""Multi-scale deformable attention as a module: what surrounds the operator.

Shapes: N images, Q queries, S cells of all levels, C channels, M heads, L levels, P points.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cldetr.layers.ms_deform_attn import ms_deform_attn, sample_levels


class MSDeformAttn(nn.Module):
    """Attends to P points per head and level, at offsets that the query predicts."""

    def __init__(self, dim: int, *, heads: int, levels: int, points: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"the width ({dim}) must be a multiple of the heads ({heads})")
        self.heads = heads
        self.levels = levels
        self.points = points
        # Height and width of each level where they never change and the operator shall be written
        # out in PyTorch's own, as for an exported model; None: the operator.
        self.fixed_sizes: list[list[int]] | None = None
        self.sampling_offsets = nn.Linear(dim, heads * levels * points * 2)
        self.attention_weights = nn.Linear(dim, heads * levels * points)
        self.value_proj = nn.Linear(dim, dim)
        self.output_proj = nn.Linear(dim, dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Starts each head in its own direction, at points 1, 2 … cells away, equally weighted."""
        angles = torch.arange(self.heads, dtype=torch.float32) * (2 * math.pi / self.heads)
        rays = torch.stack([angles.cos(), angles.sin()], dim=-1)
        rays = rays / rays.abs().amax(dim=-1, keepdim=True)  # onto the square's border
        steps = torch.arange(1, self.points + 1, dtype=torch.float32)
        bias = rays[:, None, None, :] * steps[:, None]  # (M, 1, P, 2)
        self.sampling_offsets.bias.copy_(bias.expand(-1, self.levels, -1, -1).flatten())
        for constant in (self.sampling_offsets.weight, *self.attention_weights.parameters()):
            nn.init.zeros_(constant)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        tokens: Tensor,
        spatial_shapes: Tensor,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Samples the cells around the reference points.

        Args:
            query: (N, Q, C), with its position added.
            reference_points: (N, Q, L, 2), x and y in [0, 1] of each padded level, or (N, Q, L, 4)
                with width and height, which then scale the offsets. Float32.
            tokens: (N, S, C), the cells of all levels.
            spatial_shapes: (L, 2), height and width of each level, on the CPU.
            padding: (N, S), True where a cell is padding; None where no cell is.

        Returns:
            (N, Q, C).
        """
        value = self.value_proj(tokens)
        if padding is not None:
            value = value.masked_fill(padding[..., None], 0.0)
        value = value.unflatten(-1, (self.heads, -1))  # (N, S, M, D)
        locations = self._locations(query, reference_points, spatial_shapes)
        weights = F.softmax(self.attention_weights(query).unflatten(-1, (self.heads, -1)), dim=-1)
        weights = weights.unflatten(-1, (self.levels, self.points))
        if self.fixed_sizes is not None:
            return self.output_proj(sample_levels(value, self.fixed_sizes, locations, weights))
        return self.output_proj(ms_deform_attn(value, spatial_shapes, locations, weights))

    def _locations(self, query: Tensor, reference_points: Tensor, spatial_shapes: Tensor) -> Tensor:
        """Sampling locations, (N, Q, M, L, P, 2): reference points plus offsets.

        In float32, whatever autocast says: a location in bfloat16 is off by several cells.
        """
        layer = self.sampling_offsets
        shape = (self.heads, self.levels, self.points, 2)
        centres = reference_points[:, :, :, None, :2].expand(-1, -1, -1, self.points, -1)
        if reference_points.shape[-1] == 2:
            # Offsets count cells. Dividing the weights by the levels' sizes, and not the offsets,
            # spares a pass over what is among the encoder's largest tensors.
            cells = spatial_shapes.flip(-1).float()[:, None].expand(shape)
            unit = cells.reciprocal().flatten()  # (M·L·P·2,)
            unit = unit.to(query.device, non_blocking=True)
            offsets = F.linear(query, layer.weight * unit[:, None], layer.bias * unit).float()
        else:
            sizes = reference_points[:, :, None, :, None, 2:] * (0.5 / self.points)
            offsets = (layer(query).float().unflatten(-1, shape) * sizes).flatten(2)
        # Rows of L·P·2 numbers, which all heads share: long enough to add quickly.
        rows = offsets.unflatten(-1, (self.heads, -1)).add_(centres.flatten(2)[:, :, None])
        return rows.unflatten(-1, shape[1:])
