"""Rows of different numbers per image, side by side in one tensor.

`torch.nn.utils.rnn.pad_sequence` does the same, image by image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def row_places(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The image and the place within it of rows that lie one image after the other.

    Args:
        counts: how many rows each image has.
        device: where the results shall be.

    Returns:
        (N,) and (N,), N rows of all images.
    """
    sizes = torch.tensor(counts)
    images = torch.arange(len(counts)).repeat_interleave(sizes)
    starts = (sizes.cumsum(0) - sizes)[images]
    return images.to(device), (torch.arange(len(images)) - starts).to(device)


def pad_rows(rows: Tensor, images: Tensor, places: Tensor, counts: Sequence[int]) -> Tensor:
    """Puts rows (N, …) where `row_places` says, (B, most, …), and zeros elsewhere."""
    padded = rows.new_zeros(len(counts), max(counts, default=0), *rows.shape[1:])
    padded[images, places] = rows
    return padded
