"""Quality-guided matching: which predictions are near enough to a label to be matched with it.

This is Q-MCMF (AAAI 2026). A Hungarian matcher gives every label a query even where none is near,
and a query that lies on background is taught as an object. Here a label takes only predictions that
overlap it enough, and stays unmatched where there is none (`cldetr.modeling.matcher`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cldetr.errors import InputError
from cldetr.modeling.structures import Target


@dataclass(frozen=True)
class MatcherRule:
    """The least IoU of a prediction and the label that it is matched with, from phase 2 on.

    Attributes:
        pseudo_iou: α, for pseudo-labels.
        new_iou: β, for ground truth. On a small or weak detector few queries reach 0.5 on objects
            of new classes: take less, or a ramp; the log has the share that is matched.
        ramp: share of the stage in which both rise linearly from zero; 0 for none.
    """

    pseudo_iou: float = 0.7
    new_iou: float = 0.5
    ramp: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0.0 <= value <= 1.0:
                raise InputError(
                    f"METHOD.MATCHER.{field.name.upper()} must lie in [0, 1], not {value}"
                )


def set_min_iou(targets: Sequence[Target], rule: MatcherRule, progress: float) -> list[Target]:
    """Adds the rule's least IoUs to the labels of a batch.

    Args:
        targets: merged labels; without a flag `pseudo` all are ground truth.
        rule: the floors.
        progress: how much of the stage is done, in [0, 1].
    """
    factor = min(progress / rule.ramp, 1.0) if rule.ramp else 1.0
    pseudo, new = factor * rule.pseudo_iou, factor * rule.new_iou
    made = []
    for target in targets:
        floors = torch.full_like(target.boxes[:, 0], new)
        if target.pseudo is not None:
            floors = floors.masked_fill(target.pseudo, pseudo)
        made.append(dataclasses.replace(target, min_iou=floors))
    return made
