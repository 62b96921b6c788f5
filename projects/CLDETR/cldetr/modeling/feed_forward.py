"""Small feed-forward parts that transformers and heads share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU in between."""

    def __init__(self, dim: int, hidden: int, out: int, layers: int) -> None:
        super().__init__()
        widths = [dim, *[hidden] * (layers - 1), out]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    @property
    def last(self) -> nn.Linear:
        """The layer that says the result."""
        layer = self.layers[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """(…, dim) → (…, out)."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.last(x)


def relu_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Computes dropout(relu(x)) in place, keeping one tensor for the backward pass and not three.

    Where the result is zero the gradient is zero, whether ReLU or dropout made it so; elsewhere it
    is scaled by 1 / (1 − p). Neither ReLU's output nor the dropout mask needs to be kept. In the
    encoder's feed-forward networks these would be its largest tensors.
    """
    if not training or p == 0.0:
        return F.relu_(x)
    return _ReluDropout.apply(x, p)


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        F.dropout(x.relu_(), p, training=True, inplace=True)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.scale = 1.0 / (1.0 - p)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, result, 0).mul_(ctx.scale), None
