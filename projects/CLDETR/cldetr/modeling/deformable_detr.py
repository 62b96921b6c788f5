"""Deformable DETR (Zhu et al., ICLR 2021) as a Detectron2 meta-architecture.

Parameters bear the names of the official implementation, those of the backbone Detectron2's.

Shape shorthand: L decoder layers, B images, Q queries, C channels, K classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY
from torch import Tensor, nn

from cldetr.modeling.blocks import MLP
from cldetr.modeling.classification import SigmoidFocal
from cldetr.modeling.deformable_transformer import DeformableTransformer, shift_reference
from cldetr.modeling.detector import Detector, shared_arguments, transformer_arguments
from cldetr.modeling.structures import DetrOutput, ImageBatch

_EXCLUDED = -1e4  # the logit of a class that a query may not predict: a score of 0


@META_ARCH_REGISTRY.register()
class DeformableDETR(Detector):
    """Deformable DETR with, as options, box refinement, two stages and groups of queries."""

    query_classes: Tensor | None  # (Q, K) bool, where there are groups of queries

    @configurable
    def __init__(
        self,
        *,
        transformer: DeformableTransformer,
        num_queries: int = 300,
        query_groups: Sequence[int] = (),
        box_refine: bool = False,
        **shared: Any,
    ) -> None:
        """Sets up the detector.

        Args:
            transformer: encoder and decoder; says the number of levels and whether two-stage.
            num_queries: Q, or the queries of each group.
            query_groups: for each class the group of queries that predict it, from 0; the queries
                of a group see neither those of the others nor their classes. Empty: one group.
            box_refine: each decoder layer refines the boxes of the one before, with heads of its
                own. Without it all layers share one pair of heads.
            shared: what `Detector` takes.
        """
        super().__init__(**shared)
        if transformer.two_stage and not box_refine:
            raise ValueError("a two-stage Deformable DETR refines boxes: set box refinement, too")
        if transformer.levels < len(self.in_features):
            raise ValueError(
                f"{transformer.levels} levels are fewer than the {len(self.in_features)} features "
                f"of the backbone that are asked for: {', '.join(self.in_features)}"
            )
        groups = max(query_groups, default=0) + 1
        if groups != transformer.query_groups:
            raise ValueError(
                f"{groups} groups of queries, but the transformer has {transformer.query_groups}"
            )
        if transformer.two_stage and groups > 1:
            raise ValueError("a detector of two stages takes its queries from the image: one group")
        if query_groups and len(query_groups) != self.num_classes:
            raise ValueError(
                f"MODEL.DETR.QUERY_GROUPS has {len(query_groups)} entries, one for each of the "
                f"{self.num_classes} classes is needed"
            )
        self.transformer = transformer
        num_queries *= groups
        self.num_queries = num_queries
        self.fixed_queries = not transformer.two_stage
        self.box_refine = box_refine
        outputs = self.backbone.output_shape()
        self.strides = [outputs[name].stride for name in self.in_features]
        channels = [outputs[name].channels for name in self.in_features]
        self.input_proj = nn.ModuleList(
            _projection(width, transformer.dim, kernel=1) for width in channels
        )
        width = channels[-1]  # the first level beyond the backbone's comes from its raw output
        while len(self.input_proj) < transformer.levels:
            self.input_proj.append(_projection(width, transformer.dim, kernel=3))
            self.strides.append(self.strides[-1] * 2)
            width = transformer.dim
        if not transformer.two_stage:
            self.query_embed = nn.Embedding(num_queries, 2 * transformer.dim)
        self.class_embed, self.bbox_embed = self._heads()
        self.query_groups = groups
        allowed = None
        if groups > 1:
            of_query = torch.arange(groups).repeat_interleave(num_queries // groups)
            allowed = of_query[:, None] == torch.tensor(query_groups)
        self.register_buffer("query_classes", allowed, persistent=False)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Reads MODEL.DETR; its keys are explained in `modeling.config`."""
        detr = cfg.MODEL.DETR
        transformer = DeformableTransformer(
            levels=detr.LEVELS,
            encoder_points=detr.ENC_POINTS,
            decoder_points=detr.DEC_POINTS,
            two_stage=detr.TWO_STAGE,
            query_groups=max(detr.QUERY_GROUPS, default=0) + 1,
            **transformer_arguments(cfg),
        )
        focal = SigmoidFocal(detr.LOSS.FOCAL_ALPHA, detr.LOSS.FOCAL_GAMMA)
        return {
            "transformer": transformer,
            "num_queries": detr.NUM_QUERIES,
            "query_groups": detr.QUERY_GROUPS,
            "box_refine": detr.WITH_BOX_REFINE,
            **shared_arguments(cfg, focal),
        }

    def predict(self, images: ImageBatch) -> DetrOutput:
        """Predicts logits and boxes with all decoder layers."""
        levels = self._levels(images, self._project, self.strides)
        transformer = self.transformer
        encoded = transformer.encode(levels)
        proposals = None
        if transformer.two_stage:
            proposed = transformer.propose(
                encoded, self.class_embed[-1], self.bbox_embed[-1], self.num_queries
            )
            proposals = DetrOutput(proposed.logits[None], proposed.boxes[None])
            query_pos, states = proposed.query_pos, proposed.states
            reference = proposed.reference
        else:
            queries = self.query_embed.weight.expand(len(images), -1, -1)
            query_pos, states = queries.split(transformer.dim, dim=-1)
            reference = transformer.reference_points(query_pos).float().sigmoid()
        refine = self.bbox_embed if self.box_refine else None
        decoded = transformer.decode(encoded, states, query_pos, reference, refine)
        if decoded.boxes is None:
            logits = self.class_embed[0](decoded.states)
            boxes = shift_reference(self.bbox_embed[0](decoded.states), reference)
        else:
            # A two-stage model has one head more, for the proposals.
            heads = zip(self.class_embed, decoded.states, strict=False)
            logits = torch.stack([head(states) for head, states in heads])
            boxes = decoded.boxes
        if self.query_classes is not None:
            logits = logits.masked_fill(~self.query_classes, _EXCLUDED)
        return DetrOutput(
            logits, boxes, proposals, features=decoded.states[-1], query_classes=self.query_classes
        )

    def query_group(self, label: int) -> int:
        """The group of queries that predicts a class."""
        if self.query_classes is None:
            return 0
        first = int(self.query_classes[:, label].nonzero()[0])
        return first * self.query_groups // self.num_queries

    @torch.no_grad()
    def start_classes(self, classes: Sequence[int]) -> None:
        """Lets the group of queries of new classes start as a copy of the group before it."""
        if self.query_classes is None or not classes:
            return
        size = self.num_queries // self.query_groups
        known = torch.ones_like(self.visible_classes)
        known[list(classes)] = False
        groups = self.query_classes.unflatten(0, (-1, size))[:, 0]  # (groups, K)
        new = (~(groups & known).any(dim=1)).nonzero()[:, 0].tolist()
        for start in (group * size for group in new if group > 0):
            weight = self.query_embed.weight
            weight[start : start + size] = weight[start - size : start]

    def classify(self, states: Tensor) -> Tensor:
        """Class logits of states of the last decoder layer."""
        return self.class_embed[len(self.transformer.decoder.layers) - 1](states)

    def scores(self, logits: Tensor) -> Tensor:
        """Class probabilities of logits, (…, K): independent sigmoids."""
        scores = logits.sigmoid()
        return scores * self.visible_classes.to(scores)

    def proposal_parameters(self) -> list[str]:
        """Those of a two-stage detector's proposals, whose row 0 means any object."""
        return self.class_parameters()[-2:] if self.transformer.two_stage else []

    def background(self, logits: Tensor) -> None:
        """A sigmoid head has no background class."""
        return None

    def _project(self, features: list[Tensor]) -> list[Tensor]:
        """Feature maps of all levels, projected to the transformer's width."""
        maps = [
            project(x) for project, x in zip(self.input_proj, features, strict=False)
        ]  # zip stops at the levels that have a feature of the backbone
        source = features[-1]
        for project in self.input_proj[len(features) :]:
            source = project(source)
            maps.append(source)
        return maps

    def _heads(self) -> tuple[nn.ModuleList, nn.ModuleList]:
        """Class and box heads, one pair per layer: copies with refinement, else all the same."""
        dim = self.transformer.dim
        layers = len(self.transformer.decoder.layers)
        class_head = nn.Linear(dim, self.num_classes)
        nn.init.constant_(class_head.bias, -math.log(99))  # every class starts at p = 0.01
        box_head = MLP(dim, dim, 4, layers=3)
        nn.init.zeros_(box_head.last.weight)
        nn.init.zeros_(box_head.last.bias)
        if not self.box_refine:
            box_head.last.bias.data[2:] = -2.0  # boxes start at an eighth of the image
            return nn.ModuleList([class_head] * layers), nn.ModuleList([box_head] * layers)
        count = layers + int(self.transformer.two_stage)
        class_heads = nn.ModuleList(copy.deepcopy(class_head) for _ in range(count))
        box_heads = [copy.deepcopy(box_head) for _ in range(count)]
        if not self.transformer.two_stage:
            box_heads[0].last.bias.data[2:] = -2.0  # later layers and proposals have a size
        return class_heads, nn.ModuleList(box_heads)


def _projection(channels: int, dim: int, kernel: int) -> nn.Sequential:
    """To the transformer's width: 1×1, or 3×3 at half the resolution; then group normalisation."""
    stride = 1 if kernel == 1 else 2
    conv = nn.Conv2d(channels, dim, kernel, stride=stride, padding=kernel // 2)
    nn.init.xavier_uniform_(conv.weight)
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return nn.Sequential(conv, nn.GroupNorm(math.gcd(32, dim // 2), dim))
