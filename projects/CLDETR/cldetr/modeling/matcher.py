"""One-to-one matching of predictions and labels (Eq. 2), for all layers and images at once.

Labels may ask for a least IoU (`Target.min_iou`): predictions below it are not matched with them,
nor are queries that may not predict their class (`DetrOutput.query_classes`). A label that no
prediction is left for stays unmatched. Of all matchings of the pairs that are
left, the one with the most pairs is found, and of those the one of least cost.

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

from cldetr.layers.boxes import box_cxcywh_to_xyxy, paired_overlap
from cldetr.layers.ragged import pad_rows, row_indices
from cldetr.modeling.classification import Classification
from cldetr.modeling.structures import DetrOutput, Target

_PRUNED = float(torch.finfo(torch.float32).max)  # the cost of a pair that may not be matched


@dataclass(frozen=True)
class Matches:
    """Matched pairs. Every layer has the same number: min(T, Q) summed over the images.

    Where some pairs may not be matched, `kept` tells those that may; the others are not matched.
    """

    images: Tensor  # (P,) which image
    queries: Tensor  # (L, P) which of its queries
    labels: Tensor  # (L, P) which label, counted over the labels of all images
    kept: Tensor | None = None  # (L, P) bool; None: all are
    shares: MatchedShares | None = None  # where `kept` is given

    def pairs(self, layer: int) -> tuple[Tensor, Tensor]:
        """Queries and labels that one layer matches, two of (P,)."""
        queries, labels = self.queries[layer], self.labels[layer]
        if self.kept is None:
            return queries, labels
        rows = self.kept[layer].nonzero()[:, 0]
        return queries[rows], labels[rows]


@dataclass(frozen=True)
class MatchedShares:
    """The share of labels that are matched in each layer, (L,); None without such labels."""

    truth: np.ndarray | None  # of ground truth
    pseudo: np.ndarray | None  # of pseudo-labels


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
        pruned = output.query_classes is not None or any(
            target.min_iou is not None for target in targets
        )
        cost = self._cost(output, targets, images.to(device, non_blocking=True), class_mask)
        if pruned:  # the kind of each label rides along: a copy of its own would be another wait
            kinds = _column(targets, "pseudo")[:, None, None].expand(-1, cost.shape[1], 1)
            cost = torch.cat([cost, kinds], dim=2)
        host = cost.cpu().numpy()  # (N, L, Q)
        _check_finite(host, images)
        is_pseudo, host = (host[:, 0, -1] > 0, host[..., :-1]) if pruned else (None, host)
        assign = _assign_kept if pruned else linear_sum_assignment
        layers = host.shape[1]
        blocks = np.split(host, np.cumsum(counts)[:-1])
        queries: list[list[np.ndarray]] = [[] for _ in range(layers)]
        labels: list[list[np.ndarray]] = [[] for _ in range(layers)]
        pairs = []
        start = 0
        for image, block in enumerate(blocks):  # (T, L, Q)
            for layer in range(layers):
                rows, columns = assign(block[:, layer])
                queries[layer].append(columns)
                labels[layer].append(rows + start)
            start += counts[image]
            pairs.append(np.full(min(block.shape[0], block.shape[2]), image))
        arrays = (
            np.concatenate(pairs),
            np.stack([np.concatenate(x) for x in queries]),
            np.stack([np.concatenate(x) for x in labels]),
        )

        def place(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        if is_pseudo is None:
            return Matches(place(arrays[0]), place(arrays[1]), place(arrays[2]))
        kept = host[arrays[2], np.arange(layers)[:, None], arrays[1]] < _PRUNED
        shares = _matched_shares(kept, arrays[2], is_pseudo)
        return Matches(place(arrays[0]), place(arrays[1]), place(arrays[2]), place(kept), shares)

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
        iou, giou = paired_overlap(corners, box_cxcywh_to_xyxy(wanted))
        prepared = self.classification.prepare(output.logits.float(), class_mask)
        if all(target.probs is None for target in targets):
            labels = torch.cat([target.labels for target in targets])
            # Gathered before the cost is taken: K classes would be K times the work.
            class_cost = self.classification.cost(prepared[:, images, :, labels])  # (N, L, Q)
        else:
            class_cost = self._soft_cost(prepared, targets, images)
        cost = self.class_cost * class_cost + self.box_cost * distance - self.giou_cost * giou
        if any(target.min_iou is not None for target in targets):
            floors = _column(targets, "min_iou")[:, None, None]
            cost = cost.masked_fill(iou < floors, _PRUNED)
        if output.query_classes is not None:
            labels = torch.cat([target.labels for target in targets])
            cost = cost.masked_fill(~output.query_classes.T[labels][:, None], _PRUNED)
        return cost

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


def _assign_kept(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The assignment (T, Q) with the fewest pruned pairs and, of those, the least cost.

    Every matching of kept pairs is part of a full one. A pruned pair costs more than any exchange
    of kept pairs can save, so that one pruned pair less always wins.
    """
    kept = cost < _PRUNED
    largest = np.abs(cost, where=kept, out=np.zeros(cost.shape)).max(initial=0.0)
    bound = 1.0 + (2 * len(cost) + 1) * largest
    return linear_sum_assignment(np.where(kept, cost.astype(np.float64), bound))


def _column(targets: Sequence[Target], name: str) -> Tensor:
    """An optional part of all labels, zero where a target has none, (N,) in float32."""
    parts = [getattr(target, name) for target in targets]
    given = zip(parts, targets, strict=True)
    return torch.cat(
        [torch.zeros_like(x.boxes[:, 0]) if part is None else part for part, x in given]
    ).float()


def _matched_shares(kept: np.ndarray, labels: np.ndarray, pseudo: np.ndarray) -> MatchedShares:
    def share(kind: np.ndarray) -> np.ndarray | None:
        return (kept & kind[labels]).sum(axis=1) / kind.sum() if kind.any() else None

    return MatchedShares(truth=share(~pseudo), pseudo=share(pseudo))


def _check_finite(cost: np.ndarray, images: Tensor) -> None:
    if np.isfinite(cost).all():
        return
    label, layer = np.argwhere(~np.isfinite(cost))[0][:2]
    raise NonFiniteCostError(
        f"the matching cost of image {int(images[label])} of the batch in layer {layer} is not "
        "finite: its predictions or its labels hold NaN or infinity"
    )
