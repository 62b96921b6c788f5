"""Any of torchvision's classification networks as a Detectron2 backbone, with its weights."""

from __future__ import annotations

import difflib
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import torch
import torchvision.models
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from torch import Tensor, nn
from torchvision.models import get_model, list_models

from cldetr.errors import InputError


class TorchvisionBackbone(Backbone):
    """The convolutions of a torchvision network; its outputs are named by their strides.

    `stride8` is the last map with a cell for every 8 × 8 pixels, and so on. Parameters keep
    torchvision's names, so its weight files load as they are.
    """

    def __init__(
        self,
        name: str,
        out_features: Sequence[str] = ("stride8", "stride16", "stride32"),
        *,
        norm: str = "FrozenBN",
        freeze_at: int = 0,
    ) -> None:
        """Builds the network without weights.

        Args:
            name: torchvision's, such as `mobilenet_v3_large`, `resnet18` or `convnext_tiny`.
            out_features: the outputs that are returned, finest first.
            norm: "FrozenBN" keeps pre-trained batch norms as they are; "BN" trains them, for
                training from scratch with batches that are large enough.
            freeze_at: parts up to stride 2^freeze_at are not trained; 0: all are.
        """
        super().__init__()
        if norm not in ("FrozenBN", "BN"):
            raise InputError(f"MODEL.TORCHVISION.NORM takes FrozenBN or BN, not {norm!r}")
        for child, module in _convolutions(name):
            self.add_module(child, module)
        shapes = self._trace(name)
        unknown = [feature for feature in out_features if feature not in shapes]
        if unknown:
            raise InputError(
                f"{name} has no {', '.join(unknown)}: choose MODEL.DETR.IN_FEATURES among "
                f"{', '.join(shapes)}"
            )
        self._shapes = {feature: shapes[feature][1] for feature in out_features}
        self._ends = {shapes[feature][0]: feature for feature in out_features}
        for index, module in enumerate(self._steps()):
            if index > max(self._ends):
                module.requires_grad_(False)  # nothing uses it
        if freeze_at:
            frozen = [end for end, shape in shapes.values() if shape.stride <= 2**freeze_at]
            for module in self._steps()[: max(frozen, default=-1) + 1]:
                module.requires_grad_(False)
        if norm == "FrozenBN":
            FrozenBatchNorm2d.convert_frozen_batchnorm(self)
            _fold_norms(self)

    @property
    def size_divisibility(self) -> int:
        """Image sizes are padded to multiples of this: some networks drop what is left over."""
        return max(shape.stride for shape in self._shapes.values())

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Images (B, 3, H, W) to maps by the names of the outputs."""
        maps = {}
        if image.device.type == "cpu":  # oneDNN's depthwise convolutions are faster so
            image = image.contiguous(memory_format=torch.channels_last)
        for index, module in enumerate(self._steps()[: max(self._ends) + 1]):
            image = module(image)
            if index in self._ends:
                maps[self._ends[index]] = image
        return {name: maps[name] for name in self._shapes}

    def output_shape(self) -> dict[str, ShapeSpec]:
        """Channels and stride of each output."""
        return dict(self._shapes)

    def _steps(self) -> list[nn.Module]:
        """The modules that follow one another, the long sequences among them in their parts."""
        steps = []
        for child, module in self.named_children():
            steps += list(module.children()) if child in _SEQUENCES else [module]
        return steps

    @torch.no_grad()
    def _trace(self, name: str) -> dict[str, tuple[int, ShapeSpec]]:
        """The index of the last step of each stride, with the shape of its output."""
        size, found = 128, {}
        image = torch.zeros(1, 3, size, size)
        self.eval()
        for index, module in enumerate(self._steps()):
            image = module(image)
            if image.dim() != 4 or image.shape[2] != image.shape[3]:
                raise InputError(
                    f"torchvision's {name} has no feature maps of several resolutions: choose a "
                    "convolutional network such as mobilenet_v3_large, resnet18 or convnext_tiny"
                )
            stride = size // image.shape[3]
            found[f"stride{stride}"] = (index, ShapeSpec(channels=image.shape[1], stride=stride))
        self.train()
        return found


class _FoldedSequential(nn.Sequential):
    """Children one after the other, frozen norms computed as part of the convolutions before them.

    A frozen batch norm is an affine map of each channel: in the convolution's weights it costs next
    to nothing, as a layer of its own a pass over every map, forward and backward.
    """

    def forward(self, x: Tensor) -> Tensor:
        """What nn.Sequential computes, but for rounding."""
        children = [*self]
        for child, following in itertools.zip_longest(children, children[1:]):
            if isinstance(child, nn.Conv2d) and isinstance(following, FrozenBatchNorm2d):
                scale = following.weight * (following.running_var + following.eps).rsqrt()
                shift = following.bias - following.running_mean * scale
                if child.bias is not None:
                    shift = shift + child.bias * scale
                x = child._conv_forward(x, child.weight * scale[:, None, None, None], shift)
            elif not isinstance(child, FrozenBatchNorm2d):
                x = child(x)
        return x


def _fold_norms(module: nn.Module) -> None:
    """Lets sequences compute frozen norms with the convolutions before them; keeps all names."""
    for name, child in module.named_children():
        _fold_norms(child)
        kinds = [type(part) for part in child.children()]
        norms = [index for index, kind in enumerate(kinds) if kind is FrozenBatchNorm2d]
        if (
            type(child).forward is nn.Sequential.forward
            and norms
            and all(index and kinds[index - 1] is nn.Conv2d for index in norms)
        ):
            module.add_module(name, _FoldedSequential(OrderedDict(child.named_children())))


# Children that are one long sequence, and those with which something else than maps begins.
_SEQUENCES = ("features", "layers", "trunk_output")
_CLASSIFIER = ("avgpool", "classifier", "fc", "head", "heads", "encoder")


def _convolutions(name: str) -> list[tuple[str, nn.Module]]:
    """The network's children up to its classifier."""
    names = list_models(module=torchvision.models)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"do you mean {', '.join(near)}?" if near else f"choose among {', '.join(names)}"
        raise InputError(f"torchvision has no network {name!r} (MODEL.TORCHVISION.NAME): {hint}")
    children = list(get_model(name, weights=None).named_children())
    return list(itertools.takewhile(lambda child: child[0] not in _CLASSIFIER, children))


@BACKBONE_REGISTRY.register()
def build_torchvision_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> TorchvisionBackbone:
    """Builds MODEL.TORCHVISION.NAME with the outputs that MODEL.DETR.IN_FEATURES names."""
    return TorchvisionBackbone(
        cfg.MODEL.TORCHVISION.NAME,
        cfg.MODEL.DETR.IN_FEATURES,
        norm=cfg.MODEL.TORCHVISION.NORM,
        freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
    )
