"""How many training images a second one core decodes and augments, and how many GPUs need.

    python benchmarks/loader.py

Photographs of COCO's size (640 × 480, JPEG) through the COCO augmentation (flip, crop, short side
up to 800): reading, decoding, resizing, boxes, labels. `detectron2` is its `DatasetMapper` with the
same transforms of each image; both must give the same images and boxes. `predictions` carries ten
stored predictions an image along (METHOD.PSEUDO.CACHE). `worker` is what a worker process of the
loader takes, which also hands the images over. CPU time of one thread, medians of alternating
passes.

What a GPU needs is the rate of its expected steps (`benchmarks/gpu.py`, four images of 800 × 1333);
`at_training_size` scales it to the mean size of the augmented images. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.data import DatasetMapper, detection_utils
from detectron2.data import transforms as T
from detectron2.data.build import trivial_batch_collator
from detectron2.structures import BoxMode
from measure import (  # type: ignore[import-not-found]
    ask_fresh_process,
    medians,
    rounded,
    shares,
    take_turns,
    versions,
)
from PIL import Image
from torch.utils.data import DataLoader

from cldetr.data.loader import PositionDataset, SampleOrder
from cldetr.data.mapper import Augmentation, Mapper
from cldetr.data.predictions import ImagePredictions

HEIGHT, WIDTH, OBJECTS = 480, 640, 7
GPU = "A100, half"  # the fastest of benchmarks/gpu.py
MACHINE = 8  # GPUs

Entry = dict[str, Any]
Mapped = Callable[[Entry, int], Entry]  # maps an entry with the transforms of a seed


def write_photographs(folder: Path, count: int) -> list[Entry]:
    """Pictures with detail at all scales, which compress about as photographs do."""
    rng = np.random.default_rng(0)
    entries = []
    for number in range(count):
        pixels = np.zeros((HEIGHT, WIDTH, 3))
        for side in (5, 10, 20, 40, 80, 160):
            noise = rng.integers(0, 255, (side * HEIGHT // WIDTH, side, 3), dtype=np.uint8)
            size = (WIDTH, HEIGHT)
            pixels += np.asarray(Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)) / 6
        path = folder / f"{number}.jpg"
        Image.fromarray(pixels.astype(np.uint8)).save(path, quality=90)
        corners = rng.uniform(0, 300, (OBJECTS, 2))
        boxes = np.concatenate([corners, rng.uniform(10, 170, (OBJECTS, 2))], axis=1).tolist()
        objects = [
            {"bbox": box, "bbox_mode": BoxMode.XYWH_ABS, "category_id": 1, "iscrowd": 0}
            for box in boxes
        ]
        entry = {"file_name": str(path), "height": HEIGHT, "width": WIDTH, "annotations": objects}
        entries.append(entry)
    return entries


class SeededTransforms(T.Augmentation):
    """Gives Detectron2's mapper the transforms that ours draws from a seed."""

    def __init__(self, augmentation: Augmentation) -> None:
        self.augmentation, self.seed = augmentation, 0

    def get_transform(self, image: np.ndarray) -> T.Transform:
        """The transforms of the present seed."""
        rng = np.random.default_rng(self.seed)
        height, width = image.shape[:2]
        return self.augmentation.draw(height, width, rng)


def make_mappers() -> dict[str, Mapped]:
    """Our mapper and Detectron2's, with the same transforms for the same seed."""
    augmentation = Augmentation()
    ours = Mapper(augmentation, training=True)
    seeded = SeededTransforms(augmentation)
    theirs = DatasetMapper(is_train=True, augmentations=[seeded], image_format="RGB")

    def map_by_detectron2(entry: Entry, seed: int) -> Entry:
        seeded.seed = seed
        return theirs(entry)

    return {
        "training": lambda entry, seed: ours(entry, np.random.default_rng(seed)),
        "detectron2": map_by_detectron2,
    }


def check_same(mappers: dict[str, Mapped], entries: Sequence[Entry]) -> None:
    """Stops where the mappers do not give the same images, boxes and classes."""
    for seed, entry in enumerate(entries):
        ours, theirs = (mapper(entry, seed) for mapper in mappers.values())
        assert torch.equal(ours["image"], theirs["image"])
        ours, theirs = ours["instances"], theirs["instances"]
        torch.testing.assert_close(ours.gt_boxes.tensor, theirs.gt_boxes.tensor)
        assert torch.equal(ours.gt_classes, theirs.gt_classes)


def with_predictions(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with ten stored predictions each."""
    boxes = np.random.default_rng(1).uniform(0, 240, (10, 4)).astype(np.float32)
    boxes[:, 2:] += boxes[:, :2] + 1
    stored = ImagePredictions(np.full((10, 70), 0.5, np.float32), boxes)
    return [{**entry, "predictions": stored} for entry in entries]


def worker_seconds(entries: Sequence[Entry], repeat: int) -> float:
    """CPU seconds an image of a worker process that maps and hands over, without its start."""
    mapper = Mapper(Augmentation(), training=True)
    dataset = PositionDataset(entries, mapper, SampleOrder(len(entries), 1, (0,)))

    def child_seconds(passes: int) -> float:
        before = os.times()
        loader: DataLoader = DataLoader(
            dataset,
            sampler=range(passes * len(entries)),
            batch_size=4,
            num_workers=1,
            collate_fn=trivial_batch_collator,
        )
        for _ in loader:
            pass
        after = os.times()  # the worker has ended: its time is known
        spent = after.children_user - before.children_user
        return spent + after.children_system - before.children_system

    return (child_seconds(repeat + 1) - child_seconds(1)) / (repeat * len(entries))


def gpu_rates(pixels: float) -> dict[str, float]:
    """Images a second that the steps of one GPU take, by the size of the images."""
    counted = ask_fresh_process(str(Path(__file__).with_name("gpu.py")), "--only", "time")
    height, width = counted["size"]
    rate = counted["images"] / (counted["time"][GPU]["plain"] / 1000)
    return {"at_full_size": rate, "at_training_size": rate * height * width / pixels}


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mappers = make_mappers()
    with tempfile.TemporaryDirectory() as folder:
        entries = write_photographs(Path(folder), args.images)
        size = sum(Path(entry["file_name"]).stat().st_size for entry in entries) / len(entries)
        check_same(mappers, entries)

        def pass_over(mapper: Mapped, listed: Sequence[Entry]) -> Callable[[], None]:
            def run() -> None:
                for seed, entry in enumerate(listed):
                    mapper(entry, seed)

            return run

        def decode() -> None:
            for entry in entries:
                detection_utils.read_image(entry["file_name"], format="RGB")

        runs = {name: pass_over(mapper, entries) for name, mapper in mappers.items()}
        runs["predictions"] = pass_over(mappers["training"], with_predictions(entries))
        runs["decode"] = decode
        times = take_turns(runs, args.repeat, time.process_time)
        mapped = [mappers["training"](entry, seed)["image"] for seed, entry in enumerate(entries)]
        pixels = sum(image[0].numel() for image in mapped) / len(mapped)
        worker = worker_seconds(entries, max(args.repeat // 3, 1))
    rates = {name: args.images / seconds for name, seconds in medians(times).items()}
    rates["worker"] = 1 / worker
    needed = gpu_rates(pixels)
    report = {
        "benchmark": "loader",
        "images_per_second": rounded(rates, 1),
        "speed_of_detectron2": round(1 / shares(times, "detectron2")["training"], 3),
        "predictions_of_training": round(shares(times, "training")["predictions"], 3),
        "gpu": GPU,
        "needed_per_gpu": rounded(needed, 1),
        f"needed_by_{MACHINE}_gpus": rounded({k: MACHINE * v for k, v in needed.items()}, 0),
        "workers_per_gpu": rounded({k: v * worker for k, v in needed.items()}, 2),
        "pixels_per_image": round(pixels),
        "kilobytes_per_file": round(size / 1024),
        "repeat": args.repeat,
        "versions": versions("detectron2", "PIL"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
