"""Dropout that keeps little for the backward pass and, on a CPU, draws its mask quickly."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_STEPS = 1 << 16


def add_dropout(residual: Tensor, x: Tensor, p: float, training: bool) -> Tensor:
    """Computes residual + dropout(x); `x` must be a temporary, it is overwritten."""
    if not training or p == 0.0:
        return residual + x
    if x.dtype != residual.dtype:  # autocast
        return residual + F.dropout(x, p)
    return _AddDropout.apply(residual, x, p)


def draw_dropped(shape: torch.Size, p: float, device: torch.device) -> tuple[Tensor, float]:
    """Draws which elements are dropped.

    On a CPU PyTorch draws a double for each; 16 bits do as well and take a fraction of the time.

    Args:
        shape: of the result.
        p: the rate; on a CPU it is rounded to a multiple of 2^-16.
        device: where the result shall be.

    Returns:
        (…) bool, True where dropped, and 1 / (1 − p) for the rate as it was used.
    """
    if device.type != "cpu":
        dropped = torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(p)
        return dropped, 1.0 / (1.0 - p)
    level = round(p * _STEPS)
    count = shape.numel()
    words = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    dropped = words.view(torch.int16)[:count] < level - _STEPS // 2
    return dropped.view(shape), _STEPS / (_STEPS - level)


class _AddDropout(torch.autograd.Function):
    """Keeps the mask (a byte per element) for the backward pass and nothing else."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, p: float) -> Tensor:
        dropped, ctx.scale = draw_dropped(x.shape, p, x.device)
        ctx.save_for_backward(dropped)
        ctx.mark_dirty(x)
        return x.masked_fill_(dropped, 0.0).mul_(ctx.scale).add_(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (dropped,) = ctx.saved_tensors
        return grad, grad.masked_fill(dropped, 0.0).mul_(ctx.scale), None
