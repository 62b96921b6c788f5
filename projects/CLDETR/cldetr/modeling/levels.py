"""Feature maps of several resolutions and where the images lie in them.

Shape shorthand: B images, L levels, S cells of all levels, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cldetr.modeling.structures import ImageBatch, padding_mask

# From normalised images (B, 3, H, W) to one map per level, (B, C, H_l, W_l).
Extractor = Callable[[Tensor], list[Tensor]]


@dataclass
class Levels:
    """One map per level; each image covers the top left `extents` of it, the rest is padding."""

    maps: list[Tensor]  # L × (B, C, H_l, W_l)
    extents: list[list[tuple[int, int]]]  # L × B × (height, width) in cells

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Height and width of each level."""
        return [(x.shape[-2], x.shape[-1]) for x in self.maps]

    @property
    def padded(self) -> bool:
        """Whether any cell of any level is padding."""
        return any(
            extent != shape
            for shape, extents in zip(self.shapes, self.extents, strict=True)
            for extent in extents
        )

    def valid(self) -> Tensor:
        """Width and height in cells of each image in each level, (B, L, 2) in float32."""
        extents = torch.tensor(self.extents, dtype=torch.float32)  # (L, B, 2) height, width
        return extents.transpose(0, 1).flip(-1).to(self.maps[0].device, non_blocking=True)

    def padding(self) -> Tensor | None:
        """(B, S), True at padding; None if there is none."""
        if not self.padded:
            return None
        device = self.maps[0].device
        masks = [
            padding_mask(extents, shape, device).flatten(1)
            for shape, extents in zip(self.shapes, self.extents, strict=True)
        ]
        return torch.cat(masks, dim=1)


def extract_levels(
    images: ImageBatch, extract: Extractor, strides: Sequence[int], divisibility: int = 0
) -> Levels:
    """Extracts every image's features as if it were alone in its batch.

    Padding is zero in the image only: after the first bias or normalisation it no longer is, and
    convolutions carry it over the image's border; group normalisation counts it in its statistics.
    An image would then be seen otherwise alone (evaluation) than in a batch (training, a teacher on
    the student's batch). Images of different sizes therefore pass one size after the other, each
    without its padding, which also saves the work of convolving it, and only the maps are padded.
    Images of one size pass together.

    Args:
        images: the batch.
        extract: computes the maps.
        strides: image pixels per cell of each level.
        divisibility: sizes that `extract` takes are multiples of this, if not 0.
    """
    extents = [
        [(math.ceil(height / stride), math.ceil(width / stride)) for height, width in images.sizes]
        for stride in strides
    ]
    by_size: dict[tuple[int, int], list[int]] = {}
    for index, size in enumerate(images.sizes):
        by_size.setdefault(size, []).append(index)
    groups = []
    for (height, width), members in by_size.items():
        height, width = _round_up(height, divisibility), _round_up(width, divisibility)
        tensor = images.tensor[..., :height, :width]
        if len(by_size) > 1:  # a list as index would make a GPU's host wait
            tensor = torch.stack([tensor[index] for index in members])
        groups.append(extract(tensor))
    order = [index for members in by_size.values() for index in members]
    return Levels([_pad_and_join(list(maps), order) for maps in zip(*groups, strict=True)], extents)


def extract_levels_with_padding(images: ImageBatch, extract: Extractor) -> Levels:
    """Extracts the features of a padded batch whole, as the official implementations do.

    Padding leaks over the borders (see `extract_levels`), and a cell counts as padding by nearest
    interpolation of the pixel mask, which is no exact rule where the padded size is no multiple of
    the stride. For comparison with those implementations.
    """
    maps = extract(images.tensor)
    height, width = images.tensor.shape[-2:]
    extents = [
        [
            (_nearest(h, height, x.shape[-2]), _nearest(w, width, x.shape[-1]))
            for h, w in images.sizes
        ]
        for x in maps
    ]
    return Levels(maps, extents)


def _pad_and_join(maps: list[Tensor], order: list[int]) -> Tensor:
    """Pads maps to their largest size and puts their images in the order of the batch."""
    if len(maps) == 1:
        return maps[0]
    height = max(x.shape[-2] for x in maps)
    width = max(x.shape[-1] for x in maps)
    joined = torch.cat([F.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2])) for x in maps])
    if order == sorted(order):
        return joined
    inverse = torch.tensor(order).argsort().to(joined.device, non_blocking=True)
    return joined.index_select(0, inverse)


def _round_up(length: int, multiple: int) -> int:
    return length if multiple <= 1 else math.ceil(length / multiple) * multiple


def _nearest(length: int, padded: int, cells: int) -> int:
    """How many of `cells` fall into the first `length` of `padded` pixels."""
    if length == padded:
        return cells
    inside = (torch.arange(padded) < length).float()
    return int(F.interpolate(inside[None, None], size=cells).sum())
