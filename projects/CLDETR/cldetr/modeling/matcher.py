"""One-to-one matching of predictions and labels (Eq. 2), for all layers and images at once.

Shape shorthand: L decoder layers, B images, Q queries, C outputs of the class head, T labels of one
image, N labels of all images, P matched pairs of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from cldetr.layers.boxes import box_cxcywh_to_xyxy, paired_giou
from cldetr.layers.ragged import pad_rows, row_indices
from cldetr.modeling.classification import Classification
from cldetr.modeling.structures import DetrOutput, Target


@dataclass(frozen=True)
class Matches:
    """Matched pairs. Every layer has the same number: min(T, Q) summed over the images."""

    images: Tensor  # (P,) which image
    queries: Tensor  # (L, P) which of its queries
    labels: Tensor  # (L, P) which label, counted over the labels of all images


class NonFiniteCostError(FloatingPointError):
    """Predictions or labels held NaN or infinity, so that there is no best matching."""


@dataclass(frozen=True)
class Matcher:
    """The Hungarian matcher: weights of the class, L1 and generalised IoU costs."""

    classification: Classification
    class_cost: float = 2.0
    box_cost: float = 5.0
    giou_cost: float = 2.0

    @torch.no_grad()
    def __call__(
        self, output: DetrOutput, targets: Sequence[Target], class_mask: Tensor | None = None
    ) -> Matches:
        """Matches every layer of every image, at least total cost.

        Only costs of predictions and labels of the same image are computed, for all layers
        together, and they go to the host in one transfer.
        """
        device = output.logits.device
        counts = [len(target) for target in targets]
        images, _ = row_indices(counts, torch.device("cpu"))
        on_device = images.to(device, non_blocking=True)
        host = self._cost(output, targets, on_device, class_mask).cpu().numpy()  # (N, L, Q)
        _check_finite(host, images)
        layers = host.shape[1]
        blocks = np.split(host, np.cumsum(counts)[:-1])
        queries: list[list[np.ndarray]] = [[] for _ in range(layers)]
        labels: list[list[np.ndarray]] = [[] for _ in range(layers)]
        pairs = []
        start = 0
        for image, block in enumerate(blocks):  # (T, L, Q)
            for layer in range(layers):
                rows, columns = linear_sum_assignment(block[:, layer])
                queries[layer].append(columns)
                labels[layer].append(rows + start)
            start += counts[image]
            pairs.append(np.full(min(block.shape[0], block.shape[2]), image))
        arrays = (
            np.concatenate(pairs),
            np.stack([np.concatenate(x) for x in queries]),
            np.stack([np.concatenate(x) for x in labels]),
        )
        return Matches(*(torch.from_numpy(x).to(device, non_blocking=True) for x in arrays))

    def _cost(
        self,
        output: DetrOutput,
        targets: Sequence[Target],
        images: Tensor,
        class_mask: Tensor | None,
    ) -> Tensor:
        """The cost of each label with each query of its own image, (N, L, Q)."""
        boxes = output.boxes.float()
        wanted = torch.cat([target.boxes for target in targets]).float()[:, None, None]
        distance = (_per_label(boxes, images) - wanted).abs().sum(-1)
        corners = _per_label(box_cxcywh_to_xyxy(boxes), images)
        giou = paired_giou(corners, box_cxcywh_to_xyxy(wanted))
        prepared = self.classification.prepare(output.logits.float(), class_mask)
        if all(target.probs is None for target in targets):
            labels = torch.cat([target.labels for target in targets])
            # Gathered before the cost is taken: K classes would be K times the work.
            class_cost = self.classification.cost(prepared[:, images, :, labels])  # (N, L, Q)
        else:
            class_cost = self._soft_cost(prepared, targets, images)
        return self.class_cost * class_cost + self.box_cost * distance - self.giou_cost * giou

    def _soft_cost(self, prepared: Tensor, targets: Sequence[Target], images: Tensor) -> Tensor:
        """⟨cost, p_i⟩ for labels that are distributions (Eq. 2), (N, L, Q)."""
        cost = self.classification.cost(prepared).transpose(0, 1)  # (B, L, Q, C)
        rows = torch.cat([target.distribution(cost.shape[-1]) for target in targets])
        counts = [len(target) for target in targets]
        _, indices = row_indices(counts, images.device)
        labels = pad_rows(rows, images, indices, counts)  # (B, T, C): one product of all images
        products = labels @ cost.flatten(1, 2).transpose(1, 2)  # (B, T, L·Q)
        return products[images, indices].unflatten(1, cost.shape[1:3])


def _per_label(boxes: Tensor, images: Tensor) -> Tensor:
    """The boxes (L, B, Q, 4) that each label meets, those of its image, as (N, L, Q, 4).

    Coordinates lie apart in memory: what follows works on one at a time, over long runs.
    """
    planes = boxes.permute(3, 1, 0, 2).contiguous()  # (4, B, L, Q)
    return planes[:, images].permute(1, 2, 3, 0)


def _check_finite(cost: np.ndarray, images: Tensor) -> None:
    if np.isfinite(cost).all():
        return
    label, layer = np.argwhere(~np.isfinite(cost))[0][:2]
    raise NonFiniteCostError(
        f"the matching cost of image {int(images[label])} of the batch in layer {layer} is not "
        "finite: its predictions or its labels hold NaN or infinity"
    )
