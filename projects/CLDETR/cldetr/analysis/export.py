"""A trained detector as one file that PyTorch runs without this package (`torch.export`).

The file takes one image of a fixed size and returns boxes, scores and labels. Multi-scale
deformable attention is written out in PyTorch's own operators in it.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cldetr.analysis.predict import Predictor
from cldetr.errors import InputError
from cldetr.files import atomic_path
from cldetr.layers.boxes import box_cxcywh_to_xyxy
from cldetr.layers.deform_attn import MSDeformAttn
from cldetr.modeling.detector import Detector
from cldetr.modeling.structures import ImageBatch

ABOUT = "cldetr.json"  # extra file in the archive: the classes and the size of the input


class FixedSizeDetector(nn.Module):
    """A detector for images of one size, tensors in and tensors out."""

    classes: Tensor

    def __init__(self, detector: Detector, height: int, width: int) -> None:
        super().__init__()
        self.detector = detector.eval()
        self.size = (height, width)
        multiple = max(detector.backbone.size_divisibility, 1)
        self.padding = (0, -width % multiple, 0, -height % multiple)
        self.register_buffer("classes", detector.visible_classes.nonzero().flatten())

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Detects on pixels (3, H, W) in 0-255, in the channel order of training.

        Returns:
            boxes (N, 4) as left, top, right, bottom in pixels, scores (N,) falling, labels (N,).
        """
        detector, (height, width) = self.detector, self.size
        pixels = (image.float() - detector.pixel_mean) / detector.pixel_std
        batch = ImageBatch(F.pad(pixels[None], self.padding), [self.size])
        output = detector.predict(batch)
        scores = detector.scores(output.logits[-1])[0][:, self.classes]
        corners = box_cxcywh_to_xyxy(output.boxes[-1])[0]
        corners = corners * corners.new_tensor([width, height, width, height])
        score, query, column = detector._best(scores)
        return corners[query], score, self.classes[column]


def export_detector(
    predictor: Predictor, height: int, width: int, path: str | os.PathLike[str]
) -> float:
    """Writes a detector for images of one size, `.pt2`, after it proved equal on random images.

    Returns:
        the largest difference of a score or, in units of the image, of a box that was found.
    """
    if min(height, width) < 32:
        raise InputError(f"{height}×{width} is too small: images have at least 32 pixels a side")
    # Without gradients: the file then runs inside and outside of torch.no_grad() alike.
    detector = copy.deepcopy(predictor.detector).cpu().requires_grad_(False)
    original = FixedSizeDetector(copy.deepcopy(detector), height, width)
    written_out = FixedSizeDetector(detector, height, width)
    generator = torch.Generator().manual_seed(0)
    images = [
        torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)
        for _ in range(3)
    ]
    about = {
        "classes": [category.name for category in predictor.categories],
        "category_ids": [category.id for category in predictor.categories],
        "height": height,
        "width": width,
        "format": predictor.augmentation.format,
    }
    with torch.no_grad():
        _fix_sizes(written_out, images[0])
        program = torch.export.export(written_out, (images[0],), strict=False)
        with atomic_path(path) as partial:
            with open(partial, "wb") as stream:
                torch.export.save(program, stream, extra_files={ABOUT: json.dumps(about)})
            with open(partial, "rb") as stream:
                loaded = torch.export.load(stream).module()
            return max(_difference(loaded(x), original(x), height, width) for x in images)


def _fix_sizes(model: FixedSizeDetector, image: Tensor) -> None:
    """Tells every deformable attention the sizes of its levels, as one image has them."""

    def fix(attention: Any, arguments: Any) -> None:
        attention.fixed_sizes = arguments[3].tolist()

    attentions = [module for module in model.modules() if isinstance(module, MSDeformAttn)]
    handles = [attention.register_forward_pre_hook(fix) for attention in attentions]
    model(image)
    for handle in handles:
        handle.remove()


def _difference(
    found: Sequence[Tensor], expected: Sequence[Tensor], height: int, width: int
) -> float:
    """The largest difference of two results; raises where it is more than rounding."""
    scale = torch.tensor([width, height, width, height])
    apart = float((found[1] - expected[1]).abs().max())
    # Scores that are equal but for rounding may have changed ranks: each box is compared with those
    # of its class with such a score.
    for box, score, label in zip(*found, strict=True):
        near = (expected[2] == label) & ((expected[1] - score).abs() <= 1e-4)
        distances = ((expected[0] - box) / scale).abs().amax(dim=1)[near]
        apart = max(apart, float(distances.min()) if len(distances) else float("inf"))
    if not apart <= 1e-3:
        raise InputError(
            f"the exported detector differs from the original by {apart:.2g}: nothing was written"
        )
    return apart
