"""Rows of several images, a different number for each, as one padded tensor.

`torch.nn.utils.rnn.pad_sequence` does the same, image by image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def row_indices(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the image of each row and the row's index in it, for rows sorted by image.

    Args:
        counts: how many rows each image has.
        device: of the results.

    Returns:
        (N,) and (N,), N rows of all images.
    """
    sizes = torch.tensor(counts)
    images = torch.arange(len(counts)).repeat_interleave(sizes)
    starts = (sizes.cumsum(0) - sizes)[images]
    rows = torch.arange(len(images)) - starts
    return images.to(device, non_blocking=True), rows.to(device, non_blocking=True)


def pad_rows(rows: Tensor, images: Tensor, indices: Tensor, counts: Sequence[int]) -> Tensor:
    """Pads rows (N, …) with zeros to (B, max count, …); `row_indices` says which is whose."""
    padded = rows.new_zeros(len(counts), max(counts, default=0), *rows.shape[1:])
    padded[images, indices] = rows
    return padded
