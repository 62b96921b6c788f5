"""A small residual network for training from scratch on a CPU: Detectron2's blocks, less width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, ResNet
from torch import Tensor, nn

from cldetr.layers.cpu import stem_pool


def make_small_resnet(
    channels: Sequence[int] = (32, 64, 96, 128),
    out_features: Sequence[str] = ("res3", "res4", "res5"),
    in_channels: int = 3,
) -> ResNet:
    """Builds a ResNet with one basic block per stage and group normalisation.

    Args:
        channels: of the stages res2 to res5, at strides 4 to 32, all different and multiples of
            16.
        out_features: stages whose outputs are returned.
        in_channels: of the image.
    """
    widths = [channels[0] // 2, *channels]  # the stem is half as wide as the first stage
    stem = _Stem(in_channels, widths[0], norm=_group_norm)
    stages = []
    for index, (before, after) in enumerate(pairwise(widths)):
        stride = 1 if index == 0 else 2
        if before == after:  # the block would have no convolution in its shortcut to do it
            raise ValueError(f"stages that halve the resolution change their width: {channels}")
        stages.append([BasicBlock(before, after, stride=stride, norm=_group_norm)])
    return ResNet(stem, stages, out_features=list(out_features))


@BACKBONE_REGISTRY.register()
def build_small_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ResNet:
    """Builds `make_small_resnet` from MODEL.SMALL_RESNET and MODEL.RESNETS.OUT_FEATURES."""
    channels = cfg.MODEL.SMALL_RESNET.CHANNELS
    return make_small_resnet(channels, cfg.MODEL.RESNETS.OUT_FEATURES, input_shape.channels)


class _Stem(BasicStem):
    """Detectron2's stem, pooled as a CPU does quickly."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) → (N, C', ⌈H/4⌉, ⌈W/4⌉)."""
        return stem_pool(F.relu_(self.conv1(x)))


def _group_norm(channels: int) -> nn.GroupNorm:
    # Batches are too small, and classes too unevenly spread over phases, for batch statistics.
    return nn.GroupNorm(8, channels)
