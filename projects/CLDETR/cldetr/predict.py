"""Prediction with a trained detector: an image in, named boxes out.

from cldetr.predict import Predictor

predictor = Predictor.from_checkpoint("output/shapes/phase2/calibrate/model.pth")
for found in predictor("photo.jpg"):
print(found.name, found.score, found.box)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from detectron2.data.detection_utils import convert_PIL_to_numpy
from PIL import Image, ImageOps
from torch import Tensor

from cldetr.data.mapper import Augmentation, read_image
from cldetr.engine.checkpoint import load_into, load_state
from cldetr.engine.from_lazy import recipe_from_lazy
from cldetr.engine.from_run import find_device, model_of_weights
from cldetr.engine.from_yaml import recipe_from_yaml
from cldetr.errors import InputError
from cldetr.grouping import Category
from cldetr.modeling.detector import Detector

Picture = str | os.PathLike[str] | Image.Image | np.ndarray


@dataclass(frozen=True)
class Detection:
    """One object that was found."""

    name: str
    category_id: int  # as in the annotation file that the detector was trained with
    label: int  # the detector's own number of the class
    score: float
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels of the image


class Predictor:
    """A detector with the names of its classes."""

    def __init__(
        self,
        detector: Detector,
        categories: Sequence[Category],
        augmentation: Augmentation,
        seen: Sequence[str] | None = None,
    ) -> None:
        """Takes a detector for prediction; puts it in evaluation mode.

        Args:
            detector: any of ours.
            categories: what its labels mean.
            augmentation: says the test size and the order of channels.
            seen: names of the classes that it has learnt; others are never predicted. None: all.
        """
        self.detector = detector.eval()
        self.categories = tuple(categories)
        self.augmentation = augmentation
        if len(self.categories) != detector.num_classes:
            raise InputError(
                f"the detector has {detector.num_classes} classes, "
                f"{len(self.categories)} categories are named"
            )
        if seen is not None:
            known = [category.name in seen for category in self.categories]
            self.detector.visible_classes = torch.tensor(known, device=detector.device)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        config_file: str | None = None,
        overrides: Sequence[str] = (),
        device: str = "auto",
    ) -> Predictor:
        """Loads a weights file of a run, or one that `cldetr convert` made.

        Args:
            path: `model.pth`, or a checkpoint of a stage that is still training.
            config_file: the config that it was trained with, needed only where neither the file
                nor its run directory says which model it is of.
            overrides: of the config.
            device: "cpu", "cuda" or "auto": a GPU where there is one.
        """
        state = load_state(path)
        meta = state.get("cldetr")
        if not isinstance(meta, Mapping) or not meta.get("categories"):
            raise InputError(
                f"{path} does not say which categories it detects: use a model.pth of a run, or "
                "one that `cldetr convert` made of a detector"
            )
        if config_file is not None:
            read = recipe_from_lazy if config_file.endswith(".py") else recipe_from_yaml
            recipe = read(config_file, overrides)
            model, augmentation = recipe.model, recipe.augmentation
        else:
            model, augmentation = model_of_weights(meta, path)
        categories = [Category(entry["id"], entry["name"]) for entry in meta["categories"]]
        detector = model.build(len(categories))
        load_into(detector, state["model"], str(path))
        return cls(detector.to(find_device(device)), categories, augmentation, meta.get("seen"))

    def __call__(self, image: Picture, score: float = 0.5) -> list[Detection]:
        """Finds objects, the most confident first.

        Args:
            image: a file (turned upright by its EXIF tag), a PIL image, or an RGB array (H, W, 3)
                of uint8.
            score: the least score of what is returned.
        """
        pixels = self.read(image)
        height, width = pixels.shape[:2]
        entry = {"image": self.prepare(pixels), "height": height, "width": width}
        with torch.no_grad():
            found = self.detector([entry])[0]["instances"].to("cpu")
        kept = found[found.scores >= score]
        return [
            Detection(
                self.categories[label].name,
                self.categories[label].id,
                label,
                float(score),
                tuple(corners),
            )
            for label, score, corners in zip(
                kept.pred_classes.tolist(),
                kept.scores.tolist(),
                kept.pred_boxes.tensor.tolist(),
                strict=True,
            )
        ]

    def read(self, image: Picture) -> np.ndarray:
        """The pixels of an image, upright, RGB, (H, W, 3) of uint8."""
        if isinstance(image, np.ndarray):
            if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
                raise InputError(
                    "an image is an array (height, width, 3) of uint8, "
                    f"not {image.shape} of {image.dtype}"
                )
            return image
        if isinstance(image, Image.Image):
            return convert_PIL_to_numpy(ImageOps.exif_transpose(image), "RGB")
        return read_image({"file_name": os.fspath(image)}, "RGB")

    def prepare(self, pixels: np.ndarray) -> Tensor:
        """Resizes an RGB image to the test size and orders its channels, (3, H, W)."""
        transform = self.augmentation.test_transform(*pixels.shape[:2])
        resized = transform.apply_image(pixels)
        if self.augmentation.format == "BGR":
            resized = resized[:, :, ::-1]
        return torch.from_numpy(np.ascontiguousarray(resized.transpose(2, 0, 1)))
