"""Linear, ReLU, dropout, linear: the transformers' widest part, made to need little memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cldetr.layers.dropout import draw_dropped

# Rows that a CPU takes at a time, so that their hidden layer stays in its cache. Only in float32
# and wider: the weights' gradients are summed over the parts.
_ROWS = 1024


def feed_forward(
    x: Tensor, first: nn.Linear, second: nn.Linear, p: float, training: bool
) -> Tensor:
    """Computes second(dropout(relu(first(x)))).

    For the backward pass one hidden tensor is kept and not three: where it is zero the gradient is
    zero, whether ReLU or dropout made it so, and elsewhere it is scaled by 1 / (1 − p).

    Args:
        x: (…, C).
        first: C → hidden.
        second: hidden → C'.
        p: dropout rate.
        training: whether dropout acts.
    """
    tensors = [x, first.weight, first.bias, second.weight, second.bias]
    device = x.device.type
    if torch.is_autocast_enabled(device):
        tensors = [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
    return _FeedForward.apply(*tensors, p if training else 0.0, torch.is_grad_enabled())


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, p: float, keep: bool
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        hidden = []
        result = x.new_empty(*x.shape[:-1], len(b2))
        result_rows = result.view(-1, len(b2))
        scale = 1.0
        for part in _parts(rows):
            h = torch.addmm(b1, rows[part], w1.t()).relu_()
            if p > 0.0:
                dropped, scale = draw_dropped(h.shape, p, h.device)
                h.masked_fill_(dropped, 0.0)
            torch.addmm(b2, h, w2.t(), alpha=scale, out=result_rows[part])
            if keep:
                hidden.append(h)
        ctx.save_for_backward(rows, w1, w2, *hidden)
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, w1, w2, *hidden = ctx.saved_tensors
        scale = ctx.scale
        grad_rows = grad.reshape(-1, grad.shape[-1])
        grad_x = torch.empty_like(rows)
        grad_w1, grad_w2 = torch.zeros_like(w1), torch.zeros_like(w2)
        grad_b1 = rows.new_zeros(len(w1))
        buffer: Tensor | None = None
        for part, h in zip(_parts(rows), hidden, strict=True):
            g = grad_rows[part]
            buffer = torch.empty_like(h) if buffer is None else buffer[: len(h)]
            grad_h = torch.mm(g, w2, out=buffer)
            torch.ops.aten.threshold_backward.grad_input(grad_h, h, 0, grad_input=grad_h)
            grad_w2.addmm_(g.t(), h, alpha=scale)
            grad_w1.addmm_(grad_h.t(), rows[part], alpha=scale)
            grad_b1.add_(grad_h.sum(0), alpha=scale)
            torch.mm(grad_h, w1, out=grad_x[part])
        grad_x.mul_(scale)
        return (
            grad_x.view(*grad.shape[:-1], rows.shape[1]),
            grad_w1,
            grad_b1,
            grad_w2,
            grad_rows.sum(0),
            None,
            None,
        )


def _parts(rows: Tensor) -> Iterator[slice]:
    """Parts of the rows that are taken together; the last may be shorter."""
    small = rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)
    step = _ROWS if small else max(len(rows), 1)
    return (slice(start, start + step) for start in range(0, len(rows), step))
