"""The set criterion L_DETR (Eq. 1): match, then teach classes and boxes, in every layer.

Shape shorthand as in `matcher`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage, has_event_storage
from torch import Tensor, nn

from cldetr.layers.boxes import box_cxcywh_to_xyxy, paired_giou
from cldetr.modeling.classification import Classification
from cldetr.modeling.matcher import Matcher, Matches
from cldetr.modeling.structures import DetrOutput, Target


class SetCriterion(nn.Module):
    """Losses of all decoder layers, already weighted, by name."""

    def __init__(
        self,
        *,
        matcher: Matcher,
        class_weight: float = 2.0,
        box_weight: float = 5.0,
        giou_weight: float = 2.0,
        aux_loss: bool = True,
    ) -> None:
        """Sets up the criterion.

        Args:
            matcher: pairs predictions with labels; holds the kind of head.
            class_weight: weight of the classification loss.
            box_weight: γ_2, weight of the L1 loss of boxes (cxcywh, normalised).
            giou_weight: γ_1, weight of the generalised IoU loss.
            aux_loss: teach every decoder layer, not the last one alone.
        """
        super().__init__()
        self.matcher = matcher
        self.class_weight = class_weight
        self.box_weight = box_weight
        self.giou_weight = giou_weight
        self.aux_loss = aux_loss
        self._num_boxes: Tensor | None = None

    @property
    def classification(self) -> Classification:
        """The kind of head."""
        return self.matcher.classification

    def forward(
        self, output: DetrOutput, targets: Sequence[Target], class_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Computes the losses of a batch.

        Args:
            output: predictions of all layers.
            targets: labels of each image.
            class_mask: (K,) bool, the classes that take part in the classification loss, or
                (B, 1, K), those of each image; the head's rows of the others get no gradient. None:
                all do.

        Returns:
            `loss_cls`, `loss_bbox` and `loss_giou` of the last layer, the same with `_0`, `_1` …
            for the earlier ones and with `_enc` for the proposals of a two-stage model.
        """
        if len(targets) != output.logits.shape[1]:
            raise ValueError(f"{len(targets)} targets for {output.logits.shape[1]} images")
        with torch.autocast(output.logits.device.type, enabled=False):
            num_boxes = self.normaliser(targets, output.logits.device)
            last = len(output.logits) - 1
            first = 0 if self.aux_loss else last
            suffixes = [f"_{layer}" for layer in range(first, last)] + [""]
            layers = output.from_layer(first)
            losses = self._losses(layers, targets, num_boxes, class_mask, suffixes)
            if output.proposals is not None:
                # Proposals are told from background only: every object is of "class" 0.
                anything = [Target(torch.zeros_like(x.labels), x.boxes) for x in targets]
                losses |= self._losses(output.proposals, anything, num_boxes, None, ["_enc"])
        return losses

    @contextmanager
    def normalised_by(self, num_boxes: Tensor) -> Iterator[None]:
        """Divides the losses by a given number of boxes, such as a part's share of a whole step."""
        self._num_boxes = num_boxes
        try:
            yield
        finally:
            self._num_boxes = None

    def normaliser(self, targets: Sequence[Target], device: torch.device) -> Tensor:
        """The mean number of boxes per process, at least 1; a collective call if none is given.

        Labels with weights count by them.
        """
        if self._num_boxes is not None:
            return self._num_boxes
        total = torch.full((), float(sum(map(len, targets))), device=device)
        weights = [target.weights for target in targets if target.weights is not None]
        if weights:
            total = torch.cat(weights).sum()
        if comm.get_world_size() > 1:
            torch.distributed.all_reduce(total)
        return (total / comm.get_world_size()).clamp(min=1)

    def _losses(
        self,
        output: DetrOutput,
        targets: Sequence[Target],
        num_boxes: Tensor,
        class_mask: Tensor | None,
        suffixes: Sequence[str],
    ) -> dict[str, Tensor]:
        matches = self.matcher(output, targets, class_mask)
        _log_shares(matches, suffixes)
        logits = output.logits.float()
        labels = self._label_map(logits, targets, matches)
        weights = _label_weights(targets, matches)
        of_queries = None if weights is None else _query_weights(weights, matches, logits)
        taught = class_mask
        if output.query_classes is not None:  # each query learns the classes of its own group
            taught = output.query_classes if taught is None else output.query_classes & taught
        class_loss = self.classification.loss(logits, labels, num_boxes, taught, of_queries)
        boxes = output.boxes.float()
        box_loss, giou_loss = _box_losses(boxes, targets, matches, num_boxes, weights)
        losses = {}
        for layer, suffix in enumerate(suffixes):
            losses[f"loss_cls{suffix}"] = self.class_weight * class_loss[layer]
            losses[f"loss_bbox{suffix}"] = self.box_weight * box_loss[layer]
            losses[f"loss_giou{suffix}"] = self.giou_weight * giou_loss[layer]
        return losses

    def _label_map(self, logits: Tensor, targets: Sequence[Target], matches: Matches) -> Tensor:
        """The label distribution of every query, y padded with background, (L, B, Q, C)."""
        rows = torch.cat([target.distribution(logits.shape[-1]) for target in targets])  # (N, C)
        background = self.classification.background(logits)
        labels = background.expand(logits.shape).clone()
        layers = torch.arange(len(logits), device=logits.device)[:, None]
        wanted = rows[matches.labels]
        if matches.kept is not None:
            wanted = torch.where(matches.kept[..., None], wanted, background)
        labels[layers, matches.images, matches.queries] = wanted
        return labels


def _label_weights(targets: Sequence[Target], matches: Matches) -> Tensor | None:
    """The factors of the matched labels, (L, P); None where no label has one."""
    weights = [target.weights for target in targets if target.weights is not None]
    return torch.cat(weights)[matches.labels] if weights else None


def _query_weights(weights: Tensor, matches: Matches, logits: Tensor) -> Tensor:
    """The factor of every query, (L, B, Q): its label's, 1 for background."""
    if matches.kept is not None:
        weights = torch.where(matches.kept, weights, 1.0)
    layers = torch.arange(len(logits), device=logits.device)[:, None]
    factors = torch.ones_like(logits[..., 0])
    factors[layers, matches.images, matches.queries] = weights
    return factors


def _box_losses(
    boxes: Tensor,
    targets: Sequence[Target],
    matches: Matches,
    num_boxes: Tensor,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """L_box of each layer: L1 and 1 − GIoU of matched boxes, summed, by the number of boxes.

    Without any label both are zero and yet depend on the predictions, so that a backward pass
    reaches every parameter.
    """
    layers = torch.arange(len(boxes), device=boxes.device)[:, None]
    predicted = boxes[layers, matches.images, matches.queries]  # (L, P, 4)
    wanted = torch.cat([target.boxes for target in targets]).float()[matches.labels]
    distance = (predicted - wanted).abs()  # (L, P, 4)
    distinct = 1 - paired_giou(box_cxcywh_to_xyxy(predicted), box_cxcywh_to_xyxy(wanted))
    for factor in (matches.kept, weights):
        if factor is not None:
            distance, distinct = distance * factor[..., None], distinct * factor
    return distance.flatten(1).sum(1) / num_boxes, distinct.sum(1) / num_boxes


def _log_shares(matches: Matches, suffixes: Sequence[str]) -> None:
    """Logs which share of the labels each layer matches, where labels ask for a least IoU."""
    if matches.shares is None or not has_event_storage():
        return
    kinds = {"new": matches.shares.truth, "pseudo": matches.shares.pseudo}
    for kind, shares in kinds.items():
        if shares is not None:
            for suffix, share in zip(suffixes, shares.tolist(), strict=True):
                get_event_storage().put_scalar(f"matched/{kind}{suffix}", share)
