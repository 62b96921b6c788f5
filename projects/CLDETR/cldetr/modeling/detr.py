"""DETR (Carion et al., ECCV 2020) as a Detectron2 meta-architecture; UP-DETR is the same model.

UP-DETR (Dai et al., CVPR 2021) fine-tunes a plain DETR with normalisation before each sub-layer,
from weights that it pre-trained without labels.

Shape shorthand: L decoder layers, B images, Q queries, K classes.
"""

from __future__ import annotations

from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY
from torch import Tensor, nn

from cldetr.modeling.blocks import MLP
from cldetr.modeling.classification import SoftmaxCE, mask_logits
from cldetr.modeling.detector import Detector, shared_arguments, transformer_arguments
from cldetr.modeling.detr_transformer import DetrTransformer
from cldetr.modeling.structures import DetrOutput, ImageBatch


@META_ARCH_REGISTRY.register()
class DETR(Detector):
    """DETR: a softmax head over the classes and no-object, which is the last output."""

    @configurable
    def __init__(
        self, *, transformer: DetrTransformer, num_queries: int = 100, **shared: Any
    ) -> None:
        """Sets up the detector.

        Args:
            transformer: encoder and decoder.
            num_queries: Q.
            shared: what `Detector` takes; one feature of the backbone is used.
        """
        super().__init__(**shared)
        if len(self.in_features) != 1:
            raise ValueError(
                f"DETR uses one feature of the backbone, not {', '.join(self.in_features)}"
            )
        self.transformer = transformer
        self.num_queries = num_queries
        feature = self.backbone.output_shape()[self.in_features[0]]
        self.stride = feature.stride
        self.input_proj = nn.Conv2d(feature.channels, transformer.dim, kernel_size=1)
        self.query_embed = nn.Embedding(num_queries, transformer.dim)
        self.class_embed = nn.Linear(transformer.dim, self.num_classes + 1)
        self.bbox_embed = MLP(transformer.dim, transformer.dim, 4, layers=3)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Reads MODEL.DETR; its keys are explained in `modeling.config`."""
        detr = cfg.MODEL.DETR
        transformer = DetrTransformer(
            pre_norm=detr.PRE_NORM,
            **transformer_arguments(cfg),
        )
        return {
            "transformer": transformer,
            "num_queries": detr.NUM_QUERIES,
            **shared_arguments(cfg, SoftmaxCE(detr.LOSS.NO_OBJECT_WEIGHT)),
        }

    def predict(self, images: ImageBatch) -> DetrOutput:
        """Predicts logits and boxes with all decoder layers."""
        levels = self._levels(images, self._project, [self.stride])
        states = self.transformer(levels, self.query_embed.weight)
        boxes = self.bbox_embed(states).float().sigmoid()
        return DetrOutput(self.class_embed(states), boxes, features=states[-1])

    def classify(self, states: Tensor) -> Tensor:
        """Class logits of states of the last decoder layer."""
        return self.class_embed(states)

    def scores(self, logits: Tensor) -> Tensor:
        """Class probabilities of logits, (…, K), zero for classes that are not visible."""
        return self._probabilities(logits)[..., :-1]

    def background(self, logits: Tensor) -> Tensor:
        """p(φ) of logits, (…)."""
        return self._probabilities(logits)[..., -1]

    def _probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(mask_logits(logits, self.visible_classes), dim=-1)

    def _project(self, features: list[Tensor]) -> list[Tensor]:
        return [self.input_proj(features[0])]
