"""Detectron2's ResNet with its frozen normalisation folded into the convolutions.

A frozen batch normalisation is an affine map of each channel. As a layer of its own it costs two
passes over every feature map forward and one backward; as part of the convolution's weight it costs
next to nothing. The modules, their parameters and their names stay Detectron2's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, BottleneckBlock, ResNet
from torch import Tensor

from cldetr.layers.pooling import stem_pool

_BLOCKS = (BottleneckBlock, BasicBlock)


def can_fold(backbone: Any) -> bool:
    """Whether a backbone is a ResNet of the standard parts with frozen normalisation."""
    return (
        type(backbone) is ResNet
        and type(backbone.stem) is BasicStem
        and all(type(block) in _BLOCKS for stage in backbone.stages for block in list(stage))
        and all(
            isinstance(layer.norm, FrozenBatchNorm2d)
            for layer in backbone.modules()
            if isinstance(layer, Conv2d)
        )
    )


def folded_features(resnet: ResNet, x: Tensor) -> dict[str, Tensor]:
    """Computes what `resnet(x)` does, for a ResNet that `can_fold`."""
    if x.device.type == "cpu" and not torch.is_grad_enabled():
        # Faster forward, though slower backward, with oneDNN.
        x = x.contiguous(memory_format=torch.channels_last)
    x = stem_pool(_conv(resnet.stem.conv1, x).relu_())
    outputs = {"stem": x}
    for name, stage in zip(resnet.stage_names, resnet.stages, strict=True):
        for block in stage:
            x = _block(block, x)
        outputs[name] = x
    return {name: outputs[name] for name in resnet.output_shape()}


def _block(block: BottleneckBlock | BasicBlock, x: Tensor) -> Tensor:
    out = _conv(block.conv1, x).relu_()
    out = _conv(block.conv2, out)
    if isinstance(block, BottleneckBlock):
        out = _conv(block.conv3, out.relu_())
    out += x if block.shortcut is None else _conv(block.shortcut, x)
    return out.relu_()


def _conv(layer: Conv2d, x: Tensor) -> Tensor:
    norm = layer.norm
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    bias = norm.bias - norm.running_mean * scale
    weight = layer.weight * scale.view(-1, 1, 1, 1)
    stride = layer.stride
    if layer.kernel_size == (1, 1) and layer.padding == (0, 0):
        # oneDNN's backward of a strided 1 × 1 convolution takes up to three times as long.
        x, stride = x[..., :: stride[0], :: stride[1]], (1, 1)
    return F.conv2d(x, weight, bias, stride, layer.padding, layer.dilation, layer.groups)
