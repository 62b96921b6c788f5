"""What passes between detector, method and criterion, and nothing else does.

Shape shorthand: L decoder layers, B images, Q queries, K classes (labels), T targets of one image.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass
class ImageBatch:
    """Images in one tensor: normalised, then padded with zeros at the bottom and the right."""

    tensor: Tensor  # (B, 3, H, W)
    sizes: list[tuple[int, int]]  # height and width of each image without its padding

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def mask(self) -> Tensor:
        """(B, H, W), True at padding."""
        return padding_mask(self.sizes, self.tensor.shape[-2:], self.tensor.device)


@dataclass
class Target:
    """The labels of one image: ground truth, pseudo-labels, or both merged.

    `probs` holds the class distribution p_i of Eq. 1: a one-hot row for ground truth, the teacher's
    distribution for a soft pseudo-label. None means that every row is one-hot at `labels`. For a
    sigmoid head it has K columns; for a softmax head K + 1, the last being no-object.

    `pseudo` tells pseudo-labels from ground truth; None means that all labels are ground truth.
    `min_iou` is the least IoU at which a prediction may be matched with a label; None means that
    any prediction may.
    `weights` are factors on the losses of the queries that the labels are matched to; None: all 1.

    Every tensor has a row for each label; `target[rows]`, `split` and `cat` treat them alike.
    """

    labels: Tensor  # (T,) int64
    boxes: Tensor  # (T, 4) cxcywh in [0, 1] of the unpadded image
    probs: Tensor | None = None  # (T, K) or (T, K + 1)
    pseudo: Tensor | None = None  # (T,) bool
    min_iou: Tensor | None = None  # (T,) float32
    weights: Tensor | None = None  # (T,)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor | slice) -> Target:
        """The labels of some rows: indices, a mask or a slice."""
        return self._each(lambda tensor: tensor[rows])

    def split(self, sizes: Sequence[int]) -> list[Target]:
        """Divides the labels into targets of these sizes, as `Tensor.split` does."""
        ends = itertools.accumulate(sizes)
        return [self[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    @staticmethod
    def cat(targets: Sequence[Target]) -> Target:
        """The labels of several targets, one after the other; all have the same optional parts."""
        parts = zip(*(target._tensors() for target in targets), strict=True)
        together: list[Any] = [None if part[0] is None else torch.cat(part) for part in parts]
        return Target(*together)

    def distribution(self, width: int) -> Tensor:
        """The class distributions p_i as `width` columns, (T, width) in float32."""
        if self.probs is None:
            rows = torch.zeros(len(self), width, device=self.labels.device)
            return rows.scatter_(1, self.labels[:, None], 1.0)
        if self.probs.shape[1] != width:
            raise ValueError(
                f"soft labels have {self.probs.shape[1]} columns, the class head has {width}"
            )
        return self.probs.float()

    def to(self, device: torch.device) -> Target:
        """Copies the target to `device`; only from a GPU the host waits for the numbers."""
        free = device.type != "cpu"
        return self._each(lambda tensor: tensor.to(device, non_blocking=free))

    def _tensors(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]

    def _each(self, function: Callable[[Tensor], Tensor]) -> Target:
        changed: list[Any] = [None if x is None else function(x) for x in self._tensors()]
        return Target(*changed)


@dataclass
class DetrOutput:
    """The predictions of all decoder layers, the last one being the detector's answer."""

    logits: Tensor  # (L, B, Q, K), or (L, B, Q, K + 1) for a softmax head
    boxes: Tensor  # (L, B, Q, 4) cxcywh in [0, 1] of the unpadded image
    # Two-stage only: the encoder's proposals, (1, B, S, ·), matched to class-agnostic targets.
    proposals: DetrOutput | None = None
    # (B, Q, D) states of the last decoder layer: what herding calls an object's feature.
    features: Tensor | None = None
    # (Q, K) bool, the classes that each query may predict; None: all of them.
    query_classes: Tensor | None = None

    def from_layer(self, first: int) -> DetrOutput:
        """The logits and boxes of some decoder layers: −1 for the last one alone."""
        return DetrOutput(self.logits[first:], self.boxes[first:], query_classes=self.query_classes)


def padding_mask(
    sizes: Sequence[tuple[int, int]], shape: Sequence[int], device: torch.device
) -> Tensor:
    """Marks what lies outside the top left `sizes` (height, width) of maps of one `shape`.

    Returns:
        (B, H, W) bool, True outside.
    """
    height, width = shape
    extents = torch.tensor(sizes).view(-1, 2, 1, 1).to(device, non_blocking=True)
    rows = torch.arange(height, device=device)[:, None] >= extents[:, 0]  # (B, H, 1)
    columns = torch.arange(width, device=device) >= extents[:, 1]  # (B, 1, W)
    return rows | columns
