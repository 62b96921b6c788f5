"""Reading Pascal VOC and YOLO data of 20,000 images, all checks included.

    python benchmarks/formats.py

Writes both data sets into a temporary folder: 640 × 480 JPEG files of the same few kilobytes, and
seven objects an image (COCO's mean). What is counted is the whole of `read_dataset`: listing the
folders, opening and parsing every annotation file, and for YOLO, whose labels do not say how large
an image is, opening every image file and reading its header, its EXIF rotation included. VOC states
the size, so its images are listed but not opened. The files have just been written: they come from
memory, not from a disk. Nothing is cached by the reader. Detectron2's `load_voc_instances` reads
the same VOC files, without checks.

Process time of one thread, and time passed; medians of alternating rounds.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from detectron2.data.datasets.pascal_voc import CLASS_NAMES, load_voc_instances
from PIL import Image

from cldetr.data.datasets import read_dataset

WIDTH, HEIGHT, OBJECTS = 640, 480, 7


def main() -> None:
    """Prints a table and, on the last line, the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_data(root, args.images)
        readers: dict[str, Callable[[], object]] = {
            "voc": lambda: read_dataset(f"voc:{root}/voc/train").image_ids,
            "yolo": lambda: read_dataset(f"yolo:{root}/yolo/data.yaml/train").image_ids,
            "detectron2": lambda: load_voc_instances(f"{root}/voc", "train", CLASS_NAMES),
        }
        rounds = [
            {name: measure(read) for name, read in readers.items()} for _ in range(args.repeats)
        ]
    found = {
        name: [statistics.median(one[name][i] for one in rounds) for i in range(2)]
        for name in readers
    }
    print(f"{'':34}{'CPU time':>10}{'time passed':>13}")
    for name, title in (
        ("voc", "cldetr, Pascal VOC"),
        ("yolo", "cldetr, YOLO"),
        ("detectron2", "Detectron2, load_voc_instances"),
    ):
        print(f"{title:34}{found[name][0]:8.2f} s{found[name][1]:11.2f} s")
    print(json.dumps({"images": args.images, "seconds": {k: v[0] for k, v in found.items()}}))


def measure(read: Callable[[], object]) -> tuple[float, float]:
    """CPU time and time passed of one reading."""
    cpu, wall = time.process_time(), time.perf_counter()
    read()
    return time.process_time() - cpu, time.perf_counter() - wall


def write_data(root: Path, images: int) -> None:
    """Writes the same images and boxes in both formats."""
    for name in ("voc/Annotations", "voc/JPEGImages", "voc/ImageSets/Main"):
        (root / name).mkdir(parents=True)
    for name in ("yolo/images", "yolo/labels"):
        (root / name).mkdir(parents=True)
    buffer = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT), "teal").save(buffer, "JPEG")
    rng = np.random.default_rng(0)
    low = rng.integers(1, (WIDTH // 2, HEIGHT // 2), (images, OBJECTS, 2))
    high = low + rng.integers(8, (WIDTH // 2, HEIGHT // 2), low.shape)
    labels = rng.integers(len(CLASS_NAMES), size=(images, OBJECTS))
    for image in range(images):
        stem = f"{image + 1:06d}"
        xml, lines = [], []
        for label, (x0, y0), (x1, y1) in zip(labels[image], low[image], high[image], strict=True):
            xml.append(
                f"\t<object>\n\t\t<name>{CLASS_NAMES[label]}</name>\n\t\t<pose>Unspecified</pose>\n"
                "\t\t<truncated>0</truncated>\n\t\t<difficult>0</difficult>\n\t\t<bndbox>\n"
                f"\t\t\t<xmin>{x0}</xmin>\n\t\t\t<ymin>{y0}</ymin>\n\t\t\t<xmax>{x1}</xmax>\n"
                f"\t\t\t<ymax>{y1}</ymax>\n\t\t</bndbox>\n\t</object>\n"
            )
            x, y = (x0 - 1 + x1) / 2 / WIDTH, (y0 - 1 + y1) / 2 / HEIGHT
            lines.append(f"{label} {x:.6f} {y:.6f} {(x1 - x0 + 1) / WIDTH:.6f} ")
            lines[-1] += f"{(y1 - y0 + 1) / HEIGHT:.6f}\n"
        (root / f"voc/Annotations/{stem}.xml").write_text(
            f"<annotation>\n\t<folder>VOC</folder>\n\t<filename>{stem}.jpg</filename>\n\t<size>\n"
            f"\t\t<width>{WIDTH}</width>\n\t\t<height>{HEIGHT}</height>\n\t\t<depth>3</depth>\n"
            f"\t</size>\n\t<segmented>0</segmented>\n{''.join(xml)}</annotation>\n"
        )
        (root / f"yolo/labels/{stem}.txt").write_text("".join(lines))
        for kind in ("voc/JPEGImages", "yolo/images"):
            (root / kind / f"{stem}.jpg").write_bytes(buffer.getvalue())
    stems = "".join(f"{image + 1:06d}\n" for image in range(images))
    (root / "voc/ImageSets/Main/train.txt").write_text(stems)
    names = ", ".join(CLASS_NAMES)
    (root / "yolo/data.yaml").write_text(f"train: images\nnames: [{names}]\n")


if __name__ == "__main__":
    main()
