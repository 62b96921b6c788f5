"""How predicted classes are matched with labels and taught: one object per kind of head.

Both take a label as a distribution over the head's outputs, so that ground truth (one-hot) and a
teacher's soft pseudo-label (Sec. 3.3 of the paper) go the same way.

Shape shorthand: L decoder layers, B images, Q queries, C outputs of the head: K classes for a
sigmoid head, K + 1 for a softmax head, whose last is no-object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Classification(Protocol):
    """What the matcher and the criterion ask of a kind of head."""

    def prepare(self, logits: Tensor, class_mask: Tensor | None) -> Tensor:
        """Does what needs all outputs of a query at once, before `cost`. (…, C) → (…, C)."""
        ...

    def cost(self, prepared: Tensor) -> Tensor:
        """Class-wise matching cost of prepared outputs, element by element."""
        ...

    def background(self, logits: Tensor) -> Tensor:
        """The label of a query that is matched to nothing, (C,)."""
        ...

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        num_boxes: Tensor,
        class_mask: Tensor | None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """The loss of each layer, (L,), of logits against label distributions, (L, B, Q, C).

        Args:
            logits: predictions of all layers.
            labels: the label distribution of every query.
            num_boxes: the normaliser.
            class_mask: classes that take part, (K,), (Q, K), (B, 1, K) or (B, Q, K); None: all do.
            weights: (L, B, Q) factors on the loss of every query; None: all are 1.
        """
        ...


@dataclass(frozen=True)
class SigmoidFocal:
    """Independent sigmoids with the focal loss: Deformable DETR."""

    alpha: float = 0.25
    gamma: float = 2.0

    def prepare(self, logits: Tensor, class_mask: Tensor | None) -> Tensor:
        """Nothing to do: each output stands for itself."""
        return logits

    def cost(self, prepared: Tensor) -> Tensor:
        """The focal loss of saying yes less that of saying no."""
        prob = prepared.sigmoid()
        yes = self.alpha * (1 - prob) ** self.gamma * -(prob + 1e-8).log()
        no = (1 - self.alpha) * prob**self.gamma * -(1 - prob + 1e-8).log()
        return yes - no

    def background(self, logits: Tensor) -> Tensor:
        """No class at all."""
        return logits.new_zeros(logits.shape[-1])

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        num_boxes: Tensor,
        class_mask: Tensor | None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Focal loss summed over images, queries and classes, by the number of boxes.

        With a label t in [0, 1] and p = σ(logit): BCE(p, t) · |t − p|^γ · (αt + (1−α)(1−t)). It is
        the usual focal loss for t ∈ {0, 1}, and least at p = t in between.
        """
        weight = self.alpha * labels + (1 - self.alpha) * (1 - labels)
        if class_mask is not None:
            weight = weight * class_mask
        if weights is not None:
            weight = weight * weights[..., None]
        distance = (labels - logits.sigmoid()).abs() ** self.gamma
        entropy = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (entropy * distance * weight).flatten(1).sum(1) / num_boxes


@dataclass(frozen=True)
class SoftmaxCE:
    """Softmax over the classes and no-object with cross-entropy: DETR and UP-DETR."""

    no_object_weight: float = 0.1

    def prepare(self, logits: Tensor, class_mask: Tensor | None) -> Tensor:
        """Log-probabilities over the classes that take part and no-object."""
        return F.log_softmax(mask_logits(logits, class_mask), dim=-1)

    def cost(self, prepared: Tensor) -> Tensor:
        """−p: with a label p_i the cost is −⟨p̂, p_i⟩ (Eq. 2)."""
        return -prepared.exp()

    def background(self, logits: Tensor) -> Tensor:
        """No-object for sure."""
        row = logits.new_zeros(logits.shape[-1])
        row[-1] = 1.0
        return row

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        num_boxes: Tensor,
        class_mask: Tensor | None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Weighted mean of ⟨−log p̂, p_i⟩ (Eq. 1), no-object weighing `no_object_weight`."""
        weight = torch.ones_like(logits[0, 0, 0])
        weight[-1] = self.no_object_weight
        weighted = labels * (weight if weights is None else weight * weights[..., None])
        entropy = -(weighted * self.prepare(logits, class_mask))
        return entropy.flatten(1).sum(1) / weighted.flatten(1).sum(1)


def mask_logits(logits: Tensor, class_mask: Tensor | None) -> Tensor:
    """Gives classes outside `class_mask` (…, K) probability zero; no-object always takes part."""
    if class_mask is None:
        return logits
    keep = F.pad(class_mask, (0, 1), value=True)
    # The least finite number and not -inf: a label's zero times -inf would be NaN.
    return logits.masked_fill(~keep, torch.finfo(logits.dtype).min)
