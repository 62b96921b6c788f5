"""A trained detector as a folder of Hugging Face transformers, or as an ONNX file.

Both are of the same model: that of transformers, which for our own Deformable DETR and DETR has our
weights under its names. The results are compared with the detector before anything is written.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cldetr.analysis.predict import Predictor
from cldetr.errors import InputError
from cldetr.files import atomic_path
from cldetr.modeling.huggingface_files import library
from cldetr.modeling.huggingface_names import image_processor, to_hugging_face
from cldetr.modeling.huggingface_operator import rebound
from cldetr.modeling.structures import ImageBatch

_EQUAL = 1e-3  # of a logit or a relative coordinate: more is no rounding


def export_folder(predictor: Predictor, folder: str | os.PathLike[str]) -> float:
    """Writes what `AutoModelForObjectDetection` and `AutoImageProcessor` load from a folder.

    Its `id2label` has the classes that the detector has seen, in the order of its labels.

    Returns:
        the largest difference of a logit or a box that was found on random images.
    """
    if Path(folder).exists() and any(Path(folder).iterdir()):
        raise InputError(f"{folder} is not empty: give a new folder")
    transformers = library()
    model, processor = _convert(predictor)
    with atomic_path(folder, folder=True) as partial:
        model.save_pretrained(partial)
        processor.save_pretrained(partial)
        loaded = transformers.AutoModelForObjectDetection.from_pretrained(
            partial, local_files_only=True
        ).eval()
        transformers.AutoImageProcessor.from_pretrained(partial, local_files_only=True)
        return _compare(predictor, lambda x: tuple(_Raw(loaded)(x)), _sizes(processor))


def export_onnx(
    predictor: Predictor,
    path: str | os.PathLike[str],
    size: tuple[int, int] | None = None,
) -> float:
    """Writes an ONNX file from normalised images (1, 3, H, W) to logits and relative boxes.

    It is run with onnxruntime and compared with the detector, on two image sizes where it takes
    more than one.

    Args:
        predictor: with the detector.
        path: of the file.
        size: height and width of the images; None for the one size of the image processor, and for
            any size where the processor has not one.

    Returns:
        the largest difference of a logit or a box that was found.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 (torch.onnx needs it)
    except ImportError as error:
        raise InputError(
            f"export to ONNX needs further packages ({error}): pip install 'cldetr[onnx]'"
        ) from None
    model, processor = _convert(predictor)
    sizes = _sizes(processor) if size is None else [size] * 2
    fixed = sizes[0] == sizes[1]
    for module in model.modules():  # a check that ONNX has no operator for
        if type(module).__name__.endswith("MultiscaleDeformableAttention"):
            part: Any = module
            part.forward = rebound(module, torch_compilable_check=lambda *_: None)
    images = torch.randn(1, 3, *sizes[0])
    dynamic = torch.export.Dim.DYNAMIC
    shapes = None if fixed else {"pixel_values": {2: dynamic, 3: dynamic}}
    try:
        with torch.no_grad():
            program: Any = torch.onnx.export(
                _Raw(model).eval(),
                (images,),
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=["pixel_values"],
                output_names=["logits", "pred_boxes"],
                verbose=False,
            )
    except Exception as error:  # torch.export and onnxscript raise errors of many kinds
        raise InputError(
            f"{model.config.model_type} cannot be exported to ONNX with this torch "
            f"({type(error).__name__}: {_reason(error)}): use --format huggingface"
        ) from error
    with atomic_path(path) as partial:
        about = {"id2label": model.config.id2label, "processor": processor.to_dict()}
        program.model.metadata_props["cldetr"] = json.dumps(about, default=str)
        program.save(str(partial))
        try:
            session = onnxruntime.InferenceSession(str(partial), providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has no class for its errors
            raise InputError(
                f"onnxruntime does not load the ONNX file of this {model.config.model_type} "
                f"({_reason(error)}): use --format huggingface"
            ) from error

        def run(pixels: Tensor) -> tuple[Tensor, ...]:
            try:
                found = session.run(None, {"pixel_values": pixels.numpy()})
            except Exception as error:  # onnxruntime has no class for its errors
                raise InputError(
                    f"the ONNX file of {model.config.model_type} takes the size alone that it was "
                    "made with: give it, --size HEIGHT WIDTH"
                ) from error
            return tuple(torch.from_numpy(x) for x in found)

        return _compare(predictor, run, sizes)


class _Raw(nn.Module):
    """A model of transformers, tensors in and tensors out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """(1, 3, H, W) → logits (1, Q, C) and boxes (1, Q, 4) as cxcywh in [0, 1]."""
        found = self.model(pixel_values=pixel_values)
        return found.logits, found.pred_boxes


def _convert(predictor: Predictor) -> tuple[Any, Any]:
    detector, size = predictor.detector, predictor.augmentation
    rows = detector.visible_classes.nonzero().flatten().tolist()
    labels = [predictor.categories[row].name for row in rows]
    if not labels:
        raise InputError("the detector has not seen any class: there is nothing to export")
    if detector.query_groups > 1:
        raise InputError(
            "transformers' Deformable DETR has no groups of queries (MODEL.DETR.QUERY_GROUPS): "
            "export with --format pt2"
        )
    model = to_hugging_face(detector, labels)
    return model, image_processor(detector, size.test_short_side, size.test_max_side)


def _sizes(processor: Any) -> list[tuple[int, int]]:
    """Two sizes of images to compare on: the processor's where it has but one."""
    size = processor.size if processor.do_resize else None
    if size is not None and getattr(size, "height", None):
        return [(size.height, size.width)] * 2
    return [(128, 192), (160, 96)]


def _compare(predictor: Predictor, run: Any, sizes: Sequence[tuple[int, int]]) -> float:
    """The largest difference of two models on random images; raises where it is no rounding."""
    detector = copy.deepcopy(predictor.detector).cpu().eval()
    rows = detector.visible_classes.nonzero().flatten()
    generator, apart = torch.Generator().manual_seed(0), 0.0
    for height, width in sizes:
        pixels = torch.randn(1, 3, height, width, generator=generator)
        ours = pixels.flip(1) if detector.input_format == "BGR" else pixels
        with torch.no_grad():
            expected = detector.predict(ImageBatch(ours, [(height, width)]))
            logits, boxes = run(pixels)
        extra = torch.arange(detector.num_classes, expected.logits.shape[-1])
        wanted = expected.logits[-1][0][:, torch.cat([rows, extra])]
        # Where an encoder ranks the queries, equal scores may have changed ranks.
        pairs = (
            torch.cat([logits[0], boxes[0]], dim=1),
            torch.cat([wanted, expected.boxes[-1][0]], dim=1),
        )
        distances = torch.cdist(*pairs, p=float("inf"))
        apart = max(apart, float(distances.amin(0).max()), float(distances.amin(1).max()))
    if not apart <= _EQUAL:
        raise InputError(
            f"the exported detector differs from the original by {apart:.2g}: nothing was written"
        )
    return apart


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no reason given"
