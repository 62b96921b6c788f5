"""From an entry of a data set to a detector's input: decoded, augmented, with its targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.structures import Boxes, BoxMode, Instances
from PIL import Image, ImageOps

from cldetr.data.predictions import ImagePredictions
from cldetr.data.scan import check_file
from cldetr.errors import InputError
from cldetr.settings import build_settings

COCO_SHORT_SIDES = tuple(range(480, 801, 32))
_PIXEL_NOISE = 1e-3  # what rounding may move the border of an image by


@dataclass(frozen=True)
class Augmentation:
    """DETR's training augmentation, and the size that images are tested at.

    Each image is flipped with probability 0.5. Then it is resized so that its short side is one of
    `short_sides` and its long side at most `max_side`; with probability `crop` it is before that
    resized to one of `crop_short_sides` and cropped to a window whose sides are uniform in
    `crop_size`. Empty `short_sides` keep the size.
    """

    flip: Literal["horizontal", "vertical", "none"] = "horizontal"
    short_sides: tuple[int, ...] = COCO_SHORT_SIDES
    sampling: Literal["choice", "range"] = "choice"  # one of `short_sides`, or between two
    max_side: int = 1333
    crop: float = 0.5
    crop_short_sides: tuple[int, ...] = (400, 500, 600)
    crop_size: tuple[int, int] = (384, 600)
    test_short_side: int = 800  # 0 keeps the size
    test_max_side: int = 1333
    format: str = "RGB"

    def __post_init__(self) -> None:
        low, high = self.crop_size
        if not 0 < low <= high:
            raise InputError(f"INPUT.CROP.SIZE must be 0 < least ≤ largest, not {self.crop_size}")
        if self.sampling == "range" and len(self.short_sides) != 2:
            raise InputError(
                "INPUT.MIN_SIZE_TRAIN takes two sizes with MIN_SIZE_TRAIN_SAMPLING range"
            )

    @classmethod
    def from_config(cls, cfg: CfgNode) -> Augmentation:
        """Reads INPUT; a size of 0 keeps the images as they are."""
        crop = cfg.INPUT.CROP
        values = {
            "flip": cfg.INPUT.RANDOM_FLIP,
            "short_sides": [side for side in cfg.INPUT.MIN_SIZE_TRAIN if side],
            "sampling": cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING,
            "max_side": cfg.INPUT.MAX_SIZE_TRAIN,
            "crop": crop.PROBABILITY if crop.ENABLED else 0.0,
            "crop_short_sides": crop.MIN_SIZE,
            "crop_size": crop.SIZE,
            "test_short_side": cfg.INPUT.MIN_SIZE_TEST,
            "test_max_side": cfg.INPUT.MAX_SIZE_TEST,
            "format": cfg.INPUT.FORMAT,
        }
        return build_settings(cls, values, "INPUT")

    def draw(self, height: int, width: int, rng: np.random.Generator) -> T.TransformList:
        """Draws the transforms of one training image; all randomness comes from `rng`."""
        steps: list[T.Transform] = []
        if rng.random() < 0.5 and self.flip != "none":
            steps.append(
                T.HFlipTransform(width) if self.flip == "horizontal" else T.VFlipTransform(height)
            )
        size = (height, width)
        if rng.random() < self.crop and self.crop_short_sides:
            resize = _resize(size, int(rng.choice(self.crop_short_sides)))
            crop = _crop((resize.new_h, resize.new_w), self.crop_size, rng)
            steps += [resize, crop]
            size = (crop.h, crop.w)
        if self.short_sides:
            if self.sampling == "range":
                low, high = self.short_sides
                side = int(rng.integers(low, high, endpoint=True))
            else:
                side = int(rng.choice(self.short_sides))
            steps.append(_resize(size, side, self.max_side))
        return T.TransformList(steps)

    def deterministic(self) -> Augmentation:
        """The same without randomness: training images, with their targets, at test size."""
        return Augmentation(
            flip="none",
            short_sides=(self.test_short_side,) if self.test_short_side else (),
            max_side=self.test_max_side,
            crop=0.0,
            format=self.format,
        )

    def test_transform(self, height: int, width: int) -> T.TransformList:
        """The transform of a test image."""
        if not self.test_short_side:
            return T.TransformList([])
        return T.TransformList([_resize((height, width), self.test_short_side, self.test_max_side)])


class Mapper:
    """Turns an entry of a view into a training or test input of a Detectron2 model."""

    def __init__(self, augmentation: Augmentation, training: bool) -> None:
        self.augmentation = augmentation
        self.training = training

    def __call__(
        self, entry: Mapping[str, Any], rng: np.random.Generator | None = None
    ) -> dict[str, Any]:
        """Maps one entry.

        Args:
            entry: a dictionary in Detectron2's format.
            rng: the random generator, needed in training.
        """
        image = read_image(entry, self.augmentation.format)
        height, width = image.shape[:2]
        if self.training:
            assert rng is not None, "training images need a random generator"
            transforms = self.augmentation.draw(height, width, rng)
        else:
            transforms = self.augmentation.test_transform(height, width)
        image = transforms.apply_image(image)
        mapped = {
            key: value for key, value in entry.items() if key not in ("annotations", "predictions")
        }
        mapped["image"] = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        if self.training:
            mapped["instances"] = _instances(
                entry.get("annotations", ()), transforms, image.shape[:2]
            )
        if "predictions" in entry:
            mapped["predictions"] = _predictions(
                entry["predictions"], transforms, (height, width), image.shape[:2]
            )
        return mapped


def read_image(entry: Mapping[str, Any], format: str) -> np.ndarray:
    """Decodes an image, upright by its EXIF tag, and checks it against its annotation.

    A file that cannot be read stops the run: a substitute would silently change the data.
    """
    path = entry["file_name"]
    problem, _ = check_file(path)  # the scan may be off or long ago: nothing is decoded unchecked
    if problem is not None:
        raise InputError(f"cannot read image {path}: {problem}")
    try:
        with Image.open(path) as file:
            # Detectron2's `read_image` looks for an EXIF tag first and swallows what goes wrong in
            # that; of a PNG with damaged pixels it then takes what was decoded so far.
            file.load()
            image = convert_PIL_to_numpy(ImageOps.exif_transpose(file), format)
    except Exception as error:
        raise InputError(f"cannot read image {path}: {type(error).__name__}: {error}") from error
    found = image.shape[1], image.shape[0]
    stated = entry.get("width", found[0]), entry.get("height", found[1])
    if found != stated:
        raise InputError(
            f"image {path} is {found[0]}×{found[1]} but its annotation says "
            f"{stated[0]}×{stated[1]}: fix the annotation file"
        )
    return image


def _instances(
    annotations: list[dict[str, Any]], transforms: T.TransformList, size: tuple[int, int]
) -> Instances:
    """Transformed boxes and labels, without crowd regions and boxes that were cropped away."""
    kept = [obj for obj in annotations if not obj.get("iscrowd", 0)]
    boxes = np.array(
        [BoxMode.convert(obj["bbox"], obj["bbox_mode"], BoxMode.XYXY_ABS) for obj in kept],
        dtype=np.float64,
    ).reshape(-1, 4)
    moved, alive = _move(boxes, transforms, np.zeros(2), np.array(size[::-1]))
    labels = np.array([obj["category_id"] for obj in kept], dtype=np.int64)
    instances = Instances(size)
    instances.gt_boxes = moved
    instances.gt_classes = torch.from_numpy(labels[alive])
    return instances


def _predictions(
    stored: ImagePredictions,
    transforms: T.TransformList,
    before: tuple[int, int],
    after: tuple[int, int],
) -> Instances:
    """Stored predictions after the transforms of their image.

    As with annotations, boxes are clipped where the image was cropped, and empty ones dropped. At
    the borders of the uncropped image they are not clipped: a model may predict corners outside.

    Args:
        stored: in pixels of the image on disk.
        transforms: those of the image.
        before: height and width of the image on disk.
        after: height and width of the transformed image.
    """
    frame = np.array([[0.0, 0.0, before[1], before[0]]])
    frame = np.asarray(transforms.apply_box(frame), dtype=np.float64).reshape(4)
    size = np.array(after[::-1])
    low = np.where(frame[:2] < -_PIXEL_NOISE, 0.0, -np.inf)
    high = np.where(frame[2:] > size + _PIXEL_NOISE, size, np.inf)
    carried = Instances(after)
    carried.pred_boxes, alive = _move(stored.boxes.astype(np.float64), transforms, low, high)
    carried.scores = torch.from_numpy(stored.scores[alive])
    if stored.background is not None:
        carried.background = torch.from_numpy(stored.background[alive])
    return carried


def _move(
    boxes: np.ndarray, transforms: T.TransformList, low: np.ndarray, high: np.ndarray
) -> tuple[Boxes, np.ndarray]:
    """Transforms boxes (N, 4) and clips them; returns those with an area, and a mask of them."""
    boxes = np.asarray(transforms.apply_box(boxes), dtype=np.float64).reshape(-1, 4)
    boxes = boxes.clip(np.tile(low, 2), np.tile(high, 2))
    alive = np.asarray((boxes[:, 2:] > boxes[:, :2]).all(axis=1))
    return Boxes(torch.from_numpy(boxes[alive]).float()), alive


def _resize(size: tuple[int, int], short_side: int, max_side: int = 1 << 30) -> T.ResizeTransform:
    new = T.ResizeShortestEdge.get_output_shape(*size, short_side, max_side)
    return T.ResizeTransform(*size, *new)


def _crop(
    size: tuple[int, int], window: tuple[int, int], rng: np.random.Generator
) -> T.CropTransform:
    height, width = size
    low, high = window
    crop_width = int(rng.integers(min(width, low), min(width, high), endpoint=True))
    crop_height = int(rng.integers(min(height, low), min(height, high), endpoint=True))
    left = int(rng.integers(0, width - crop_width, endpoint=True))
    top = int(rng.integers(0, height - crop_height, endpoint=True))
    return T.CropTransform(left, top, crop_width, crop_height, width, height)
