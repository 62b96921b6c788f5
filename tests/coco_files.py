"""Small COCO files for tests."""

import json
import os
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from cldetr.scenario import Category

# For tests marked `data`: COCO's val2017 with boxes alone, and the published class orders.
VAL2017 = Path(os.environ.get("CLDETR_SHARED_DATA", "")) / "coco_val2017"
VAL2017_BOXES = VAL2017 / "instances_val2017_rebuilt.json"
VAL2017_SPLITS = VAL2017 / "coco_splits.json"


def coco(images=3, categories=("cat", "dog", "bird"), objects=((1, 1), (1, 2), (2, 3))):
    """A valid file's content; `objects` are (image id, category id) pairs."""
    return {
        "images": [
            {"id": i, "file_name": f"{i:04d}.jpg", "width": 100, "height": 80}
            for i in range(1, images + 1)
        ],
        "annotations": [
            {
                "id": n,
                "image_id": image,
                "category_id": category,
                "bbox": [10.0 + n % 7, 5, 20, 30.5],
                "area": 600.25,
                "iscrowd": 0,
            }
            for n, (image, category) in enumerate(objects, start=1)
        ],
        "categories": [{"id": i, "name": name} for i, name in enumerate(categories, start=1)],
    }


def write(path: Path, content) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def random_coco(seed=0, images=40, categories=8, max_objects=5, crowd=0.1):
    """A valid file with shuffled, gapped ids, images without objects and crowd regions."""
    rng = np.random.default_rng(seed)
    image_ids = (rng.permutation(images * 10)[:images] + 1).tolist()
    category_ids = sorted((rng.permutation(categories * 3)[:categories] + 1).tolist())
    content = coco(0, (), ())
    content["images"] = [
        {"id": i, "file_name": f"sub/{i}.jpg", "width": 64, "height": 48} for i in image_ids
    ]
    content["categories"] = [{"id": i, "name": f"class {i}"} for i in category_ids]
    rng.shuffle(content["categories"])
    for image in image_ids:
        for _ in range(int(rng.integers(max_objects + 1))):
            x, y = rng.uniform(0, 40, 2).round(2).tolist()
            w, h = (rng.uniform(1, 8, 2)).round(2).tolist()
            content["annotations"].append(
                {
                    "id": len(content["annotations"]) + 1,
                    "image_id": image,
                    "category_id": int(rng.choice(category_ids)),
                    "bbox": [x, y, w, h],
                    "area": round(w * h, 3),
                    "iscrowd": int(rng.random() < crowd),
                }
            )
    rng.shuffle(content["annotations"])
    return content


def class_counts(labels, num_classes):
    """The class counts of images given by the labels of their objects."""
    images = np.repeat(np.arange(len(labels)), [len(row) for row in labels])
    flat = np.array([label for row in labels for label in row], dtype=np.int64)
    ones = np.ones(len(flat), np.int64)
    return csr_array((ones, (images, flat)), shape=(len(labels), num_classes))


class Labels:
    """The least that a scenario is made from: the labels of each image."""

    def __init__(self, categories: int, labels: list[list[int]], name="toy", first_id=100):
        self.name = name
        self.categories = tuple(Category(i + 1, f"class {i}") for i in range(categories))
        self.image_ids = np.arange(len(labels)) * 3 + first_id
        self.starts = np.concatenate([[0], np.cumsum([len(row) for row in labels])]).astype(int)
        self.labels = np.array([label for row in labels for label in row], dtype=int)
        self.fingerprint = f"of {name}"
