"""`shapes`: the embedded data set, a COCO-format data set that a small detector learns on a CPU.

Each image shows 1 to 6 flat silhouettes on a textured background. What an object *is* follows from
its silhouette alone: colour, size, rotation and position are independent of the category.
Categories follow a long tail, p(rank) ∝ rank^−tail, in both splits. Other looks show the same
scenes as another kind of picture, for domain-incremental learning.

Every image has its own random generator, seeded by (seed, split, index): image 17 depends neither
on how many images there are nor on what was drawn before it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from cldetr.data.silhouettes import SILHOUETTES, Mask, draw_silhouette
from cldetr.data.textures import LOOKS, draw_background, draw_fill, pick_colour
from cldetr.errors import InputError
from cldetr.files import sha256_file, sha256_json, write_json

logger = logging.getLogger(__name__)

# Part of the marker: raise it whenever the same options give other images or boxes.
GENERATOR_VERSION = 1

SPLITS = ("train", "val")
MARKER = "shapes.json"  # written last: what was generated, and that it is complete

_LARGEST = 1 / 2  # an object's longer side, as a share of the image's side
_MAX_HIDDEN = 0.3  # share of an object that others may cover, and that may cover others
_MAX_TRIES = 40


@dataclass(frozen=True)
class ShapesOptions:
    """What determines the data set, bit by bit."""

    train_images: int = 2000
    val_images: int = 400
    size: int = 96  # px, width and height
    categories: int = 10
    most_objects: int = 6  # per image
    tail: float = 0.7  # 0: all categories alike; larger: longer tail
    seed: int = 0
    look: str = "painted"  # a word of `LOOKS`: the same scenes as another kind of picture
    smallest: float = 1 / 6  # an object's longer side at least, as a share of the image's side

    def check(self) -> None:
        """Raises `InputError` with every option that is out of range."""
        ranges = {
            "categories": (2, len(SILHOUETTES)),
            "size": (48, 1024),
            "most_objects": (1, 60),
            "tail": (0, 4),
            "seed": (0, sys.maxsize),
            "smallest": (0.03, _LARGEST),
        }
        problems = [
            f"{key} is {getattr(self, key)}: choose {low} to {high}"
            for key, (low, high) in ranges.items()
            if not low <= getattr(self, key) <= high
        ]
        if self.look not in LOOKS:
            problems.append(f"look is {self.look!r}: choose {', '.join(LOOKS)}")
        for split, count in zip(SPLITS, (self.train_images, self.val_images), strict=True):
            if count < self.categories:
                problems.append(
                    f"{split} has {count} images: give {self.categories} or more, so that each "
                    "category occurs"
                )
        if problems:
            raise InputError.listing("these options give no data set:", problems)

    def images(self, split: str) -> int:
        """Number of images of a split."""
        return self.train_images if split == "train" else self.val_images

    def record(self) -> dict[str, Any]:
        """The options as files state them.

        Defaults of later options go without saying: files from before there were any stay valid.
        """
        default = ShapesOptions()
        later = {"look": default.look, "smallest": default.smallest}
        return {key: value for key, value in asdict(self).items() if later.get(key) != value}


@dataclass(frozen=True)
class ShapesPaths:
    """The files of a generated data set."""

    root: Path

    def annotations(self, split: str) -> Path:
        """The split's COCO file."""
        return self.root / "annotations" / f"instances_{split}.json"

    def images(self, split: str) -> Path:
        """The split's image folder, to which the file names are relative."""
        return self.root / "images" / split


@dataclass(frozen=True)
class ShapesImage:
    """One image with its O objects in drawing order: later ones are on top."""

    pixels: np.ndarray  # (size, size, 3) uint8
    labels: np.ndarray  # (O,) int, indices in the list of categories
    boxes: np.ndarray  # (O, 4) float64 x0 y0 x1 y1, tight around the whole silhouette
    areas: np.ndarray  # (O,) float64, px of the whole silhouette
    hidden: np.ndarray  # (O,) float64, the share that later objects cover


def ensure_shapes(
    root: str | os.PathLike[str], options: ShapesOptions | None = None
) -> ShapesPaths:
    """Generates the data set of these options in `root`, unless it is there already.

    A new data set is written beside `root` and renamed when it is complete, so that an interrupted
    run leaves nothing that looks finished. An option out of range, or a `root` with something else
    in it, is an `InputError`.
    """
    options = options or ShapesOptions()
    options.check()
    paths = ShapesPaths(Path(root))
    if _is_complete(paths, options):
        return paths
    if paths.root.exists() and not _is_replaceable(paths.root):
        raise InputError(
            f"{paths.root} holds something that is not a generated shapes data set: give another "
            "folder or empty this one"
        )
    paths.root.parent.mkdir(parents=True, exist_ok=True)
    beside = paths.root.with_name(f".{paths.root.name}.{os.getpid()}.partial")
    outdated = paths.root.with_name(f".{paths.root.name}.{os.getpid()}.outdated")
    try:
        _generate(ShapesPaths(beside), options)
        # Another process may have finished the same data set in the meantime.
        if not _is_complete(paths, options):
            if paths.root.exists():
                logger.info("%s: replacing a data set of other options", paths.root)
                os.rename(paths.root, outdated)
            os.rename(beside, paths.root)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(outdated, ignore_errors=True)
    return paths


def category_shares(categories: int, tail: float) -> np.ndarray:
    """Computes how often each category is drawn, (K,), summing to 1.

    Frequent and rare categories are spread over the ids by the golden-ratio sequence, so that
    wherever a scenario cuts the list, each phase gets some of both.
    """
    order = np.argsort(np.arange(1, categories + 1) * 0.6180339887498949 % 1)
    shares = np.empty(categories)
    shares[order] = np.arange(1, categories + 1) ** -float(tail)
    return shares / shares.sum()


def draw_image(options: ShapesOptions, split: str, index: int) -> ShapesImage:
    """Draws an image of a split."""
    rng = np.random.default_rng((options.seed, SPLITS.index(split), index))
    outlines = list(SILHOUETTES.values())[: options.categories]
    shares = category_shares(options.categories, options.tail)
    wanted = rng.choice(options.categories, rng.integers(1, options.most_objects + 1), p=shares)
    if index < options.categories:
        wanted[0] = index  # the first images show each category once, so that none is missing

    canvas, tones = draw_background(rng, options.size)
    owner = np.full((options.size, options.size), -1)  # the topmost object of each pixel
    colours: list[np.ndarray] = []
    labels: list[int] = []
    boxes: list[np.ndarray] = []
    areas: list[float] = []
    solid, visible = np.zeros(0, int), np.zeros(0, int)  # (O,) px of each object placed so far
    for label in wanted.tolist():
        extent = options.size * options.smallest * (_LARGEST / options.smallest) ** rng.random()
        mask = draw_silhouette(outlines[label], extent, angle=rng.random() * 2 * np.pi)
        position = _find_position(rng, mask, owner, solid, visible)
        if position is None:
            continue
        x, y, covered = position
        inside = mask.coverage > 0.5
        window = np.s_[y : y + inside.shape[0], x : x + inside.shape[1]]
        colour = pick_colour(rng, [*tones, *(colours[k] for k in np.flatnonzero(covered))])
        alpha = mask.coverage[..., None]
        fill = draw_fill(rng, colour, *inside.shape)
        canvas[window] += alpha * (fill - canvas[window])
        owner[window][inside] = len(labels)
        solid = np.append(solid, inside.sum())
        visible = np.append(visible - covered, inside.sum())
        colours.append(colour)
        labels.append(label)
        boxes.append(np.add(mask.box, (x, y, x, y)))
        areas.append(mask.area)

    canvas = LOOKS[options.look](rng, canvas, owner)
    grain = rng.integers(-4, 5, canvas.shape, dtype=np.int8)
    return ShapesImage(
        pixels=np.clip(np.rint(canvas) + grain, 0, 255).astype(np.uint8),
        labels=np.array(labels),
        boxes=np.array(boxes),
        areas=np.array(areas),
        hidden=1 - visible / solid,
    )


def _find_position(
    rng: np.random.Generator,
    mask: Mask,
    owner: np.ndarray,
    solid: np.ndarray,
    visible: np.ndarray,
) -> tuple[int, int, np.ndarray] | None:
    """Looks for a position where neither the object nor any other is hidden too much.

    Args:
        rng: The image's generator.
        mask: The silhouette to place.
        owner: (size, size) int, the topmost object of each pixel, −1 for background.
        solid: (O,) pixels of each object placed so far.
        visible: (O,) those of them that nothing covers yet.

    Returns:
        The window's left and top and how much of each object it covers there, (O,), or None if no
        position is found.
    """
    inside = mask.coverage > 0.5
    height, width = inside.shape
    max_covered = visible - (1 - _MAX_HIDDEN) * solid
    for _ in range(_MAX_TRIES):
        x = int(rng.integers(0, owner.shape[1] - width + 1))
        y = int(rng.integers(0, owner.shape[0] - height + 1))
        beneath = owner[y : y + height, x : x + width][inside]
        covered = np.bincount(beneath[beneath >= 0], minlength=len(solid))
        if covered.sum() <= _MAX_HIDDEN * inside.sum() and (covered <= max_covered).all():
            return x, y, covered
    return None


def _generate(paths: ShapesPaths, options: ShapesOptions) -> None:
    """Writes the data set below `paths.root`, its marker last."""
    names = list(SILHOUETTES)[: options.categories]
    categories = [{"id": k, "name": name} for k, name in enumerate(names, start=1)]
    image_id = object_id = 0
    total = options.train_images + options.val_images
    # A log file gets a line now and then, not one per tenth of a second.
    pace = {"delay": 2, "mininterval": 0.2 if sys.stderr.isatty() else 10}
    with tqdm(total=total, desc="shapes", unit="image", leave=False, **pace) as progress:
        for split in SPLITS:
            paths.images(split).mkdir(parents=True)
            images: list[dict[str, Any]] = []
            annotations: list[dict[str, Any]] = []
            for index in range(options.images(split)):
                image = draw_image(options, split, index)
                image_id += 1  # unique over both splits
                file_name = f"{image_id:06d}.png"
                # Level 1: the grain compresses badly at any level.
                picture = Image.fromarray(image.pixels)
                picture.save(paths.images(split) / file_name, compress_level=1)
                side = options.size
                images.append(
                    {"id": image_id, "file_name": file_name, "width": side, "height": side}
                )
                for label, box, area in zip(image.labels, image.boxes, image.areas, strict=True):
                    object_id += 1
                    x0, y0, x1, y1 = box.tolist()
                    annotations.append(
                        {
                            "id": object_id,
                            "image_id": image_id,
                            "category_id": int(label) + 1,
                            "bbox": [x0, y0, x1 - x0, y1 - y0],
                            "area": float(area),
                            "iscrowd": 0,
                        }
                    )
                progress.update()
            content = {
                "info": {"description": f"shapes, {split}", **options.record()},
                "images": images,
                "annotations": annotations,
                "categories": categories,
            }
            write_json(paths.annotations(split), content, pretty=False)
    write_json(paths.root / MARKER, _marker(paths, options))


def _marker(paths: ShapesPaths, options: ShapesOptions) -> dict[str, Any]:
    request = {"generator": GENERATOR_VERSION, **options.record()}
    return {
        "request": request,
        "request_sha256": sha256_json(request),
        "annotations_sha256": {split: sha256_file(paths.annotations(split)) for split in SPLITS},
    }


def _is_complete(paths: ShapesPaths, options: ShapesOptions) -> bool:
    """Whether the data set of these options is there, unchanged and complete."""
    try:
        marker = json.loads((paths.root / MARKER).read_text(encoding="utf-8"))
        return bool(
            marker == _marker(paths, options)
            and all(
                sum(entry.name.endswith(".png") for entry in os.scandir(paths.images(split)))
                == options.images(split)
                for split in SPLITS
            )
        )
    except (OSError, ValueError):
        return False


def _is_replaceable(root: Path) -> bool:
    """Whether a folder is empty or was written by this generator."""
    return root.is_dir() and ((root / MARKER).is_file() or not any(root.iterdir()))
