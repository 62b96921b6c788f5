"""What passes between detector, method and criterion, and nothing else does.

Shape shorthand: L decoder layers, B images, Q queries, K classes (labels), T targets of one image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    labels: Tensor  # (T,) int64
    boxes: Tensor  # (T, 4) cxcywh in [0, 1] of the unpadded image
    probs: Tensor | None = None  # (T, K) or (T, K + 1)

    def __len__(self) -> int:
        return len(self.labels)

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
        labels = self.labels.to(device, non_blocking=free)
        boxes = self.boxes.to(device, non_blocking=free)
        probs = None if self.probs is None else self.probs.to(device, non_blocking=free)
        return Target(labels, boxes, probs)


@dataclass
class DetrOutput:
    """The predictions of all decoder layers, the last one being the detector's answer."""

    logits: Tensor  # (L, B, Q, K), or (L, B, Q, K + 1) for a softmax head
    boxes: Tensor  # (L, B, Q, 4) cxcywh in [0, 1] of the unpadded image
    # Two-stage only: the encoder's proposals, (1, B, S, ·), matched to class-agnostic targets.
    proposals: DetrOutput | None = None
    # (B, Q, D) states of the last decoder layer: what herding calls an object's feature.
    features: Tensor | None = None


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
