"""Multi-scale deformable attention: every query samples a few points of every feature level.

One dispatcher op, `cldetr::ms_deform_attn`, and its backward. The compiled libraries bring kernels
for the CPU and for CUDA (`csrc/`); PyTorch's dispatcher takes the formulation with `grid_sample`
below where they are missing, which a log line tells.

Shapes: N images, S = Σ H·W cells of all levels, M heads, D channels per head, Q queries, L levels,
P points per head and level.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cldetr.layers.libraries import load_libraries

logger = logging.getLogger(__name__)

HALF_TYPES = (torch.float16, torch.bfloat16)


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Samples `value` bilinearly at the given points and sums the samples by their weights.

    Gradients flow to `value`, `sampling_locations` and `attention_weights`, once (no double
    backward). On the CPU two runs give the same bits, with any number of threads; on CUDA the sums
    in the gradient of `value` have no fixed order.

    Precision: locations and weights of a half precision `value` are taken in float32, and sums are
    in float32. Under autocast the CPU computes in float32 throughout, CUDA takes `value` in
    autocast's type and the rest in float32.

    Args:
        value: (N, S, M, D), the cells of all levels, row by row, one level after the other;
            float32, float64, float16 or bfloat16.
        spatial_shapes: (L, 2) int64, height and width of each level. Keep it on the CPU, also for
            CUDA inputs: the sizes are needed on the host, and a tensor on the GPU costs a
            synchronisation in every call.
        sampling_locations: (N, Q, M, L, P, 2), x and y, from 0 to 1 over each level, whose outer
            cells have their centres half a cell inside. Outside, the level is zero.
        attention_weights: (N, Q, M, L, P).

    Returns:
        (N, Q, M·D), the heads side by side, of `value`'s type.

    Raises:
        ValueError: Shapes, types or devices do not fit each other.
    """
    points = sampling_locations, attention_weights
    if value.dtype in HALF_TYPES:
        points = points[0].float(), points[1].float()
    return torch.ops.cldetr.ms_deform_attn(value, spatial_shapes, *points)


def ms_deform_attn_reference(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Computes `ms_deform_attn` with PyTorch alone, on any device, with PyTorch's own gradients."""
    sizes = _check_inputs(value, spatial_shapes, sampling_locations, attention_weights)
    return sample_levels(value, sizes, sampling_locations, attention_weights)


def sample_levels(
    value: Tensor,
    sizes: list[list[int]],
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Computes `ms_deform_attn` with PyTorch alone, of levels whose height and width are known."""
    images, _, heads, channels = value.shape
    queries = sampling_locations.shape[1]
    sampled = [  # L × (N·M, D, Q, P)
        F.grid_sample(plane, grid, align_corners=False)
        for plane, grid in _planes_and_grids(value, sizes, sampling_locations)
    ]
    if not sampled:
        return value.new_zeros(images, queries, heads * channels)
    weights = attention_weights.transpose(1, 2).flatten(0, 1).flatten(-2).unsqueeze(1)
    output = (torch.stack(sampled, dim=-2).flatten(-2) * weights).sum(-1)  # (N·M, D, Q)
    output = output.view(images, heads * channels, queries).transpose(1, 2).contiguous()
    return output.to(value.dtype)


def _planes_and_grids(
    value: Tensor, sizes: list[list[int]], sampling_locations: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each level as `grid_sample` wants it: (N·M, D, H, W) and (N·M, Q, P, 2)."""
    images, _, heads, channels = value.shape
    grids = 2 * sampling_locations - 1
    cells_by_level = value.to(grids.dtype).split([height * width for height, width in sizes], dim=1)
    for level, (cells, (height, width)) in enumerate(zip(cells_by_level, sizes, strict=True)):
        plane = cells.permute(0, 2, 3, 1).reshape(images * heads, channels, height, width)
        yield plane, grids[:, :, :, level].transpose(1, 2).flatten(0, 1)


def _reference_backward(
    grad_output: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of `ms_deform_attn` with PyTorch's operators.

    Spelt out, because autograd does not record inside a dispatcher kernel.
    """
    sizes = _check_inputs(value, spatial_shapes, sampling_locations, attention_weights)
    images, _, heads, channels = value.shape
    queries = sampling_locations.shape[1]
    grad = grad_output.to(sampling_locations.dtype).transpose(1, 2)  # (N, M·D, Q)
    grad = grad.reshape(images * heads, channels, queries, 1)
    grad_value = torch.zeros_like(value, memory_format=torch.contiguous_format)
    grad_locations = torch.zeros_like(sampling_locations, memory_format=torch.contiguous_format)
    grad_weights = torch.zeros_like(attention_weights, memory_format=torch.contiguous_format)
    if grad.numel() == 0 or attention_weights.numel() == 0:
        return grad_value, grad_locations, grad_weights
    first = 0
    for level, (plane, grid) in enumerate(_planes_and_grids(value, sizes, sampling_locations)):
        weights = attention_weights[:, :, :, level].transpose(1, 2).flatten(0, 1)  # (N·M, Q, P)
        sampled = F.grid_sample(plane, grid, align_corners=False)
        grad_plane, grad_grid = torch.ops.aten.grid_sampler_2d_backward(
            grad * weights.unsqueeze(1), plane, grid, 0, 0, False, (True, True)
        )
        cells = plane.shape[-2] * plane.shape[-1]
        grad_value[:, first : first + cells] = grad_plane.view(
            images, heads, channels, cells
        ).permute(0, 3, 1, 2)
        # The grid is twice the location, less one.
        grad_locations[:, :, :, level] = 2 * grad_grid.unflatten(0, (images, heads)).transpose(1, 2)
        grad_sampled = (sampled * grad).sum(1)  # (N·M, Q, P)
        grad_weights[:, :, :, level] = grad_sampled.unflatten(0, (images, heads)).transpose(1, 2)
        first += cells
    return grad_value, grad_locations, grad_weights


def _check_shapes(
    value: Tensor, spatial_shapes: Tensor, sampling_locations: Tensor, attention_weights: Tensor
) -> None:
    """Raises ValueError where shapes, types or devices do not fit; `csrc/checks.h` is its twin."""
    points = (sampling_locations, attention_weights)
    shapes, levels = [tuple(x.shape) for x in (value, *points)], spatial_shapes.shape[0]
    wanted = torch.float32 if value.dtype in HALF_TYPES else value.dtype
    # Each rule may rely on those before it.
    if value.dim() != 4:
        problem = f"value must be (N, S, M, D), got {shapes[0]}"
    elif spatial_shapes.dim() != 2 or spatial_shapes.shape[1] != 2:
        problem = f"spatial_shapes must be (L, 2), got {tuple(spatial_shapes.shape)}"
    elif spatial_shapes.dtype != torch.int64:
        problem = f"spatial_shapes must be int64, got {spatial_shapes.dtype}"
    elif len(shapes[1]) != 6 or shapes[1][5] != 2:
        problem = f"sampling_locations must be (N, Q, M, L, P, 2), got {shapes[1]}"
    elif (shapes[1][0], *shapes[1][2:4]) != (shapes[0][0], shapes[0][2], levels):
        problem = f"sampling_locations {shapes[1]} do not fit value {shapes[0]} and {levels} levels"
    elif shapes[2] != shapes[1][:5]:
        problem = f"attention_weights {shapes[2]} do not fit sampling_locations {shapes[1]}"
    elif value.dtype not in (torch.float32, torch.float64, *HALF_TYPES):
        problem = f"value must be float32, float64, float16 or bfloat16, got {value.dtype}"
    elif any(x.dtype != wanted for x in points):
        problem = f"for a value of {value.dtype}, locations and weights must be {wanted}"
    elif any(x.device != value.device for x in points):
        problem = "value, sampling_locations and attention_weights must be on one device"
    elif spatial_shapes.device.type != "cpu" and spatial_shapes.device != value.device:
        problem = f"spatial_shapes must be on the CPU or with value, got {spatial_shapes.device}"
    else:
        return
    raise ValueError(problem)


def _check_inputs(
    value: Tensor, spatial_shapes: Tensor, sampling_locations: Tensor, attention_weights: Tensor
) -> list[list[int]]:
    """Checks everything and returns height and width of each level."""
    _check_shapes(value, spatial_shapes, sampling_locations, attention_weights)
    sizes: list[list[int]] = spatial_shapes.tolist()
    for level, (height, width) in enumerate(sizes):
        if height < 1 or width < 1:
            raise ValueError(f"level {level} has no valid size: {height} x {width}")
    cells = sum(height * width for height, width in sizes)
    if cells != value.shape[1]:
        raise ValueError(f"value has {value.shape[1]} cells, spatial_shapes make {cells}")
    return sizes


@functools.cache
def _tell_reference_is_used(device: str) -> None:
    backend = load_libraries().get(device)
    reason = backend.reason if backend else f"there is no kernel for {device}"
    logger.warning("ms_deform_attn on %s runs its slower PyTorch formulation: %s", device, reason)


def _forward_without_library(value: Tensor, *others: Tensor) -> Tensor:
    _tell_reference_is_used(value.device.type)
    return ms_deform_attn_reference(value, *others)


def _fake_forward(
    value: Tensor, spatial_shapes: Tensor, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    _check_shapes(value, spatial_shapes, sampling_locations, attention_weights)
    images, _, heads, channels = value.shape
    return value.new_empty(images, sampling_locations.shape[1], heads * channels)


def _fake_backward(
    grad_output: Tensor, value: Tensor, spatial_shapes: Tensor, *points: Tensor
) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (value, *points))


def _save_for_backward(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _autograd_backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
    grad_value, grad_locations, grad_weights = torch.ops.cldetr.ms_deform_attn_backward(
        grad_output, *ctx.saved_tensors
    )
    return grad_value, None, grad_locations, grad_weights


def _refuse_double_backward(ctx, *grads: Tensor) -> None:  # type: ignore[no-untyped-def]
    raise NotImplementedError("ms_deform_attn has no second derivatives")


def _autocast(device: str, value: Tensor, spatial_shapes: Tensor, *points: Tensor) -> Tensor:
    """Applies the autocast rule that `ms_deform_attn` tells; float64 stays what it is."""
    if value.dtype != torch.float64:
        # Sampling in half precision is a gain on CUDA, where it halves the memory traffic.
        value = value.to(torch.get_autocast_dtype(device) if device == "cuda" else torch.float32)
        points = tuple(tensor.float() for tensor in points)
    with torch.autocast(device, enabled=False):
        return torch.ops.cldetr.ms_deform_attn(value, spatial_shapes, *points)


# Declared here rather than in C++, so that the op exists, with gradients, shapes and the autocast
# rule, whether or not anything was built. A kernel registered for a device comes before the
# composite one.
_library = torch.library.Library("cldetr", "FRAGMENT")
_INPUTS = "Tensor value, Tensor spatial_shapes, Tensor sampling_locations, Tensor attention_weights"
_TAGS = (torch.Tag.pt2_compliant_tag,)
_library.define(f"ms_deform_attn({_INPUTS}) -> Tensor", tags=_TAGS)
_library.define(
    f"ms_deform_attn_backward(Tensor grad_output, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_library.impl("ms_deform_attn", _forward_without_library, "CompositeExplicitAutograd")
_library.impl("ms_deform_attn_backward", _reference_backward, "CompositeExplicitAutograd")
torch.library.register_fake("cldetr::ms_deform_attn", _fake_forward, lib=_library)
torch.library.register_fake("cldetr::ms_deform_attn_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "cldetr::ms_deform_attn",
    _autograd_backward,
    setup_context=_save_for_backward,
    lib=_library,
)
torch.library.register_autograd(
    "cldetr::ms_deform_attn_backward", _refuse_double_backward, lib=_library
)
_library.impl("ms_deform_attn", functools.partial(_autocast, "cpu"), "AutocastCPU")
_library.impl("ms_deform_attn", functools.partial(_autocast, "cuda"), "AutocastCUDA")
load_libraries()
