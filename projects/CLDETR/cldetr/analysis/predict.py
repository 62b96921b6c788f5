"""Prediction with a trained detector: images in, named boxes out.

Weights know their model and their classes:

    from cldetr.analysis import Predictor

    predictor = Predictor.from_checkpoint("output/shapes/phase2/calibrate/model.pth")
    for found in predictor("photo.jpg"):
        print(found.name, found.score, found.box)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import numpy as np
import torch
from detectron2.data.detection_utils import convert_PIL_to_numpy
from PIL import Image, ImageOps
from torch import Tensor

from cldetr.config import load_config
from cldetr.data.mapper import Augmentation, read_image
from cldetr.engine.checkpoint import load_state
from cldetr.engine.restore import build_detector, config_of_weights, final_weights, find_device
from cldetr.errors import InputError
from cldetr.grouping import Category
from cldetr.modeling.detector import Detector

logger = logging.getLogger(__name__)

Picture = str | os.PathLike[str] | Image.Image | np.ndarray


@dataclass(frozen=True)
class Detection:
    """One object that was found."""

    name: str
    category_id: int  # as in the annotation file that the detector was trained with
    label: int  # the detector's own index of the class
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
        short_sides: Sequence[int] | None = None,
    ) -> None:
        """Takes a detector for prediction; puts it in evaluation mode.

        Args:
            detector: any of ours.
            categories: what its labels mean.
            augmentation: says the test size and the order of channels.
            seen: names of the classes that it has learnt; others are never predicted. None: those
                that its weights say.
            short_sides: the smallest and the largest short side that it was trained on. Without a
                test size, images outside of them are resized to the nearer one. None: never.
        """
        self.detector = detector.eval()
        self.categories = tuple(categories)
        self.augmentation = augmentation
        own_size = augmentation.test_short_side or detector.resizes
        self.short_sides = None if own_size else short_sides
        self._told = False
        if len(self.categories) != detector.num_classes:
            raise InputError(
                f"the detector has {detector.num_classes} classes, but "
                f"{len(self.categories)} categories are given"
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
        short_side: int | None = None,
    ) -> Predictor:
        """Loads a weights file of a run, or one that `cldetr convert` made.

        Args:
            path: `model.pth`, a checkpoint of a stage that is still training, or a run directory:
                then the weights of its last finished phase.
            config_file: the config that it was trained with, needed only where the file does not
                say which model it is of.
            overrides: of the config.
            device: "cpu", "cuda" or "auto": a GPU where there is one.
            short_side: resize images to this short side; 0 keeps their size. None: as in training.
        """
        if (Path(path) / "config.yaml").is_file():
            path = _newest_weights(Path(path))
            logger.info("weights: %s", path)
        state = load_state(path)
        meta = state.get("cldetr")
        if not isinstance(meta, Mapping) or not meta.get("categories"):
            raise InputError(
                f"{path} does not say which categories it detects: use a model.pth of a run, or "
                "one that `cldetr convert` made of a detector"
            )
        if config_file is not None:
            cfg = load_config(config_file, overrides)
        else:
            cfg = config_of_weights(meta, path)
        detector = build_detector(cfg, state, str(path), find_device(device))
        categories = [Category(entry["id"], entry["name"]) for entry in meta["categories"]]
        augmentation = Augmentation.from_config(cfg)
        sides = augmentation.short_sides or meta.get("short_sides")
        if short_side is not None:
            augmentation, sides = replace(augmentation, test_short_side=short_side), None
        return cls(detector, categories, augmentation, meta.get("seen"), sides)

    @overload
    def __call__(self, images: Picture, score: float = 0.5) -> list[Detection]: ...

    @overload
    def __call__(
        self, images: list[Picture] | tuple[Picture, ...], score: float = 0.5
    ) -> list[list[Detection]]: ...

    def __call__(
        self, images: Picture | list[Picture] | tuple[Picture, ...], score: float = 0.5
    ) -> list[Detection] | list[list[Detection]]:
        """Finds objects, the most confident first.

        Args:
            images: a file (turned upright by its EXIF tag), a PIL image, or an RGB array (H, W, 3)
                of uint8; or a list of such images, of any sizes, for a list of results.
            score: the least score of what is returned.
        """
        if isinstance(images, (list, tuple)):
            return [self(image, score) for image in images]
        pixels = self.read(images)
        height, width = pixels.shape[:2]
        entry = {"image": self.prepare(pixels), "height": height, "width": width}
        with torch.no_grad():
            found = self.detector([entry])[0]["instances"].to("cpu")
        kept = found[found.scores >= score]
        labels, boxes = kept.pred_classes.tolist(), kept.pred_boxes.tensor.tolist()
        return [
            Detection(
                self.categories[label].name, self.categories[label].id, label, score, tuple(box)
            )
            for label, score, box in zip(labels, kept.scores.tolist(), boxes, strict=True)
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
        """Resizes an RGB image as in training and orders its channels, (3, H, W)."""
        augmentation, short = self.augmentation, min(pixels.shape[:2])
        if self.short_sides:
            side = int(np.clip(short, min(self.short_sides), max(self.short_sides)))
            if side != short:
                augmentation = replace(augmentation, test_short_side=side)
                self._tell_once(short, side)
        resized = augmentation.test_transform(*pixels.shape[:2]).apply_image(pixels)
        if self.augmentation.format == "BGR":
            resized = resized[:, :, ::-1]
        return torch.from_numpy(np.ascontiguousarray(resized.transpose(2, 0, 1)))

    def _tell_once(self, short: int, side: int) -> None:
        if not self._told:
            logger.warning(
                "images of other sizes than those trained on are resized, such as this one with a "
                "short side of %d to %d pixels (to keep sizes: short_side=0, or --short-side 0)",
                short,
                side,
            )
        self._told = True


def _newest_weights(run: Path) -> Path:
    """The weights that the last finished phase of a run ended with."""
    phases = range(len(list(run.glob("phase*"))), 0, -1)
    found = next(filter(None, (final_weights(run, phase) for phase in phases)), None)
    if found is None:
        raise InputError(f"no phase of {run} is finished yet: continue the run with --resume")
    return found
