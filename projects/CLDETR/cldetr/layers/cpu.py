"""What makes a CPU fast, behind one seam: the same functions work on every device.

A stem's pooling, dropout, the feed-forward network of a transformer, Detectron2's ResNet with its
frozen normalization folded in, and the heap. What only a CPU gains from is done on a CPU only; the
rest also saves memory on a GPU.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, BottleneckBlock, ResNet
from torch import Tensor, nn

logger = logging.getLogger(__name__)

# Dropout rates are multiples of 1 / _LEVELS on a CPU.
_LEVELS = 1 << 16
# Rows of a feed-forward network that a CPU computes at a time, so that their hidden layer stays in
# its cache. Only in float32 and wider: the weights' gradients are summed over the parts.
_ROWS = 1024
# glibc's numbers of its settings, and their values in bytes.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_MAX_MMAP_THRESHOLD = 32 << 20  # glibc's limit: larger tensors are mapped and unmapped each
_KEPT = 1 << 30

# Weight and bias of each convolution, its normalization included.
Folded = dict[Conv2d, tuple[Tensor, Tensor]]


def stem_pool(x: Tensor) -> Tensor:
    """Max-pools 3 × 3 cells with stride 2, (N, C, H, W) → (N, C, ⌈H/2⌉, ⌈W/2⌉).

    PyTorch's CPU kernel is vectorised over channels if they are contiguous: converting to
    channels-last and back costs less than it gains, with the same bits. Only where gradients flow
    through maps of hundreds of pixels, as in an R-50 whose stem is not frozen, it loses a little.
    """
    if x.device.type != "cpu" or x.is_contiguous(memory_format=torch.channels_last):
        return F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
    return stem_pool(x.contiguous(memory_format=torch.channels_last)).contiguous()


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
        device: of the result.

    Returns:
        (…) bool, True where dropped, and 1 / (1 − p) for the rate as it was used.
    """
    if device.type != "cpu":
        dropped = torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(p)
        return dropped, 1.0 / (1.0 - p)
    level = round(p * _LEVELS)
    count = shape.numel()
    words = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    dropped = words.view(torch.int16)[:count] < level - _LEVELS // 2
    return dropped.view(shape), _LEVELS / (_LEVELS - level)


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


def feed_forward(
    x: Tensor, first: nn.Linear, second: nn.Linear, p: float, training: bool
) -> Tensor:
    """Computes second(dropout(relu(first(x)))), the widest part of a transformer, in little memory.

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
        grad_b1, grad_b2 = rows.new_zeros(len(w1)), grad_rows.sum(0)
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
        grad_x = grad_x.mul_(scale).view(*grad.shape[:-1], rows.shape[1])
        return grad_x, grad_w1, grad_b1, grad_w2, grad_b2, None, None


def _parts(rows: Tensor) -> Iterator[slice]:
    """Parts of the rows that are computed together; the last may be shorter."""
    small = rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)
    step = _ROWS if small else max(len(rows), 1)
    return (slice(start, start + step) for start in range(0, len(rows), step))


def can_fold(backbone: Any) -> bool:
    """Whether a backbone is a ResNet of the standard parts with frozen normalization."""
    norms = [layer.norm for layer in _convolutions(backbone)]
    return (
        type(backbone) is ResNet
        and type(backbone.stem) is BasicStem
        and all(
            type(block) in (BottleneckBlock, BasicBlock)
            for stage in backbone.stages
            for block in list(stage)
        )
        and all(isinstance(norm, FrozenBatchNorm2d) for norm in norms)
        and len({norm.eps for norm in norms}) == 1
    )


def fold_norms(resnet: ResNet) -> Folded:
    """Makes frozen normalization part of the convolutions, of a ResNet that `can_fold`.

    A frozen batch normalization is an affine map of each channel. As a layer of its own it costs
    two passes over every feature map forward and one backward; as part of the convolution's weight
    it costs next to nothing. It is done once for all image sizes of a batch.
    """
    layers = list(_convolutions(resnet))
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    norms = [layer.norm for layer in layers if layer.norm is not None]
    if norms:
        # All channels of all layers at once: on a GPU every small operation is a launch.
        buffers = ("weight", "bias", "running_mean", "running_var")
        gain, shift, mean, variance = (
            torch.cat([getattr(norm, name) for norm in norms]) for name in buffers
        )
        scale = gain * (variance + norms[0].eps).rsqrt()
        channels = [norm.num_features for norm in norms]
        biases = list((shift - mean * scale).split(channels))
        scales = scale.split(channels)
        weights = [w * scale.view(-1, 1, 1, 1) for w, scale in zip(weights, scales, strict=True)]
    device = weights[0].device.type
    if torch.is_autocast_enabled(device):  # it would convert them again for every image size
        half = torch.get_autocast_dtype(device)
        weights, biases = [w.to(half) for w in weights], [b.to(half) for b in biases]
    return dict(zip(layers, zip(weights, biases, strict=True), strict=True))


@torch.no_grad()
def fold_norms_(resnet: ResNet) -> None:
    """Folds the norms for good: for a model that is not trained any more, such as a teacher."""
    for layer, (weight, bias) in fold_norms(resnet).items():
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.bias = nn.Parameter(bias.clone(), requires_grad=False)
        layer.norm = None


def folded_features(resnet: ResNet, folded: Folded, x: Tensor) -> dict[str, Tensor]:
    """Computes what `resnet(x)` does, with the convolutions of `fold_norms`."""
    if x.device.type == "cpu" and not torch.is_grad_enabled():
        # Faster forward, though slower backward, with oneDNN.
        x = x.contiguous(memory_format=torch.channels_last)
    x = stem_pool(_conv(resnet.stem.conv1, folded, x).relu_())
    outputs = {"stem": x}
    for name, stage in zip(resnet.stage_names, resnet.stages, strict=True):
        for block in stage:
            x = _block(block, folded, x)
        outputs[name] = x
    return {name: outputs[name] for name in resnet.output_shape()}


def _convolutions(module: nn.Module) -> Iterator[Any]:
    return (layer for layer in module.modules() if isinstance(layer, Conv2d))


def _block(block: BottleneckBlock | BasicBlock, folded: Folded, x: Tensor) -> Tensor:
    out = _conv(block.conv1, folded, x).relu_()
    out = _conv(block.conv2, folded, out)
    if isinstance(block, BottleneckBlock):
        out = _conv(block.conv3, folded, out.relu_())
    out += x if block.shortcut is None else _conv(block.shortcut, folded, x)
    return out.relu_()


def _conv(layer: Conv2d, folded: Folded, x: Tensor) -> Tensor:
    weight, bias = folded[layer]
    stride = layer.stride
    if x.device.type == "cpu" and layer.kernel_size == (1, 1) and layer.padding == (0, 0):
        # oneDNN's backward of a strided 1 × 1 convolution takes up to three times as long.
        x, stride = x[..., :: stride[0], :: stride[1]], (1, 1)
    return F.conv2d(x, weight, bias, stride, layer.padding, layer.dilation, layer.groups)


def keep_freed_memory() -> bool:
    """Lets glibc keep up to 1 GB of freed memory for the next step; returns whether it could.

    glibc returns the end of its heap to the system as soon as some of it is free, in the middle of
    a step, and asks for it again a moment later, whereupon the system clears every page anew.
    Settings in the environment (MALLOC_…) and other C libraries are respected.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    done = bool(mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD) and mallopt(_TRIM_THRESHOLD, _KEPT))
    logger.debug("freed memory is %s", "kept" if done else "returned to the system")
    return done
