"""Our multi-scale deformable attention in place of that of Hugging Face's models."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cldetr.layers.ms_deform_attn import ms_deform_attn


def use_our_operator(model: nn.Module) -> int:
    """Puts our multi-scale deformable attention in place of a model's; returns in how many layers.

    Sampling at whole cells (`decoder_method` "discrete") is another operation and stays.
    """
    replaced = 0
    for module in list(model.modules()):
        part: Any = module
        kind = type(module).__name__
        if kind.endswith("MultiscaleDeformableAttention"):
            if hasattr(part, "attn"):
                part.attn = _Operator()
            elif hasattr(part, "ms_deformable_attn_core"):
                if part.decoder_method != "default":
                    continue
                part.ms_deformable_attn_core = _sample_uneven
            elif getattr(part, "method", "") == "default":
                part.forward = rebound(part, multi_scale_deformable_attention_v2=_sample_uneven)
            else:
                continue
            replaced += 1
    return replaced


class _Operator(nn.Module):
    """`ms_deform_attn` with the arguments of transformers' module."""

    def forward(
        self,
        value: Tensor,
        spatial_shapes: Tensor,
        shapes_list: Sequence[tuple[int, int]],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        """Samples as `ms_deform_attn` does; (N, Q, M·D)."""
        return ms_deform_attn(value, _sizes(shapes_list), sampling_locations, attention_weights)


def _sample_uneven(
    value: Tensor,
    shapes_list: Sequence[tuple[int, int]],
    sampling_locations: Tensor,
    attention_weights: Tensor,
    points: Sequence[int],
    method: str = "default",
) -> Tensor:
    """`ms_deform_attn` of levels with different numbers of points, (N, Q, M, ΣP, 2).

    Levels with fewer points than others get points of no weight.
    """
    most = max(points)
    if all(number == most for number in points):
        locations = sampling_locations.unflatten(3, (len(points), most))
        weights = attention_weights.unflatten(3, (len(points), most))
    else:
        locations = torch.stack(
            [
                nn.functional.pad(x, (0, 0, 0, most - x.shape[3]))
                for x in sampling_locations.split(list(points), dim=3)
            ],
            dim=3,
        )
        weights = torch.stack(
            [
                nn.functional.pad(x, (0, most - x.shape[3]))
                for x in attention_weights.split(list(points), dim=3)
            ],
            dim=3,
        )
    return ms_deform_attn(value, _sizes(shapes_list), locations, weights)


def _sizes(shapes_list: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor([[int(height), int(width)] for height, width in shapes_list])


def rebound(module: Any, **names: Any) -> Any:
    """A module's forward method with other meanings of global names; the class stays as it is."""
    function = type(module).forward
    own = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(own, module)
