"""How many training images a second one core decodes and augments.

    python benchmarks/loader.py

Photographs of COCO's size (640 × 480, JPEG) through the COCO augmentation (flip, crop, short side
up to 800): reading, decoding, resizing, boxes, labels, as a worker of the training loader does it.
`predictions` carries ten stored predictions an image along (METHOD.PSEUDO.CACHE). CPU time of one
thread, medians of alternating passes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.data import detection_utils
from detectron2.structures import BoxMode
from measure import alternate, rounded, versions  # type: ignore[import-not-found]
from PIL import Image

from cldetr.data.mapper import Augmentation, Mapper
from cldetr.data.predictions import ImagePredictions

HEIGHT, WIDTH, OBJECTS = 480, 640, 7


def write_photographs(folder: Path, count: int) -> list[dict[str, Any]]:
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


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mapper = Mapper(Augmentation(), training=True)
    boxes = np.random.default_rng(1).uniform(0, 240, (10, 4)).astype(np.float32)
    boxes[:, 2:] += boxes[:, :2] + 1
    stored = ImagePredictions(np.full((10, 70), 0.5, np.float32), boxes)
    with tempfile.TemporaryDirectory() as folder:
        entries = write_photographs(Path(folder), args.images)
        size = sum(Path(entry["file_name"]).stat().st_size for entry in entries) / len(entries)
        predicted = [{**entry, "predictions": stored} for entry in entries]

        def pass_over(listed: list[dict[str, Any]]) -> Callable[[], None]:
            def run() -> None:
                for place, entry in enumerate(listed):
                    mapper(entry, np.random.default_rng(place))

            return run

        def decode() -> None:
            for entry in entries:
                detection_utils.read_image(entry["file_name"], format="RGB")

        runs = {
            "decode": decode,
            "training": pass_over(entries),
            "predictions": pass_over(predicted),
        }
        seconds = alternate(runs, args.repeat, time.process_time)
    report = {
        "benchmark": "loader",
        "images_per_second": rounded({k: args.images / v for k, v in seconds.items()}, 1),
        "predictions_of_training": round(seconds["predictions"] / seconds["training"], 3),
        "kilobytes_per_file": round(size / 1024),
        "repeat": args.repeat,
        "versions": versions("detectron2", "PIL"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
