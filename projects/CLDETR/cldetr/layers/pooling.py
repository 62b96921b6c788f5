"""The pooling of a residual network's stem, the way that a CPU does quickly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def stem_pool(x: Tensor) -> Tensor:
    """The maximum of 3 × 3 cells, every other one, (N, C, H, W) → (N, C, ⌈H/2⌉, ⌈W/2⌉).

    PyTorch's CPU kernel is vectorised over channels, which must lie side by side for that: putting
    them there and back costs less than it gains, with the same bits. Not so where gradients flow
    through maps of hundreds of pixels: an R-50 whose stem is not frozen loses a little.
    """
    if x.device.type != "cpu" or x.is_contiguous(memory_format=torch.channels_last):
        return _pool(x)
    return _pool(x.contiguous(memory_format=torch.channels_last)).contiguous()


def _pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
