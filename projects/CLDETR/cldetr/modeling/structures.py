"""What passes between detector, method and criterion, and nothing else does.

Shape shorthand: L decoder layers, B images, Q queries, K classes (labels), T targets of one image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

    def to(self, device: torch.device) -> Target:
        """Copies the target to `device`."""
        probs = None if self.probs is None else self.probs.to(device)
        return Target(self.labels.to(device), self.boxes.to(device), probs)


@dataclass
class DetrOutput:
    """The predictions of all decoder layers, the last one being the detector's answer."""

    logits: Tensor  # (L, B, Q, K), or (L, B, Q, K + 1) for a softmax head
    boxes: Tensor  # (L, B, Q, 4) cxcywh in [0, 1] of the unpadded image
    # Two-stage only: the encoder's proposals, (1, B, S, ·), matched to class-agnostic targets.
    proposals: DetrOutput | None = None
    # (B, Q, D) states of the last decoder layer: what herding calls an object's feature.
    features: Tensor | None = None
