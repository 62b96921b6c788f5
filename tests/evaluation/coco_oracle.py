"""Random detection problems full of corner cases, and pycocotools' answer to them."""

import contextlib
import io
from pathlib import Path

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from cldetr.data.coco import CocoData
from cldetr.evaluation.average_precision import Detections
from cldetr.scenario import Category

METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")


def make_data(rng, images=12, classes=5, objects=4.0, crowd=0.1, without=()):
    """Makes an annotation file's arrays: boxes on a grid, so that overlaps tie and meet thresholds.

    Image and category ids have gaps, images stand in no order, some have no object, some boxes are
    empty, areas are not those of the boxes and often sit exactly on 32² and 96², and classes
    `without` have no object.
    """
    counts = rng.poisson(objects, images) * (rng.random(images) < 0.85)
    total = int(counts.sum())
    present = np.setdiff1d(np.arange(classes), without)
    boxes = np.concatenate(
        [rng.integers(0, 8, (total, 2)) * 10, rng.integers(0, 12, (total, 2)) * 10], axis=1
    ).astype(np.float64)
    areas = boxes[:, 2] * boxes[:, 3] * rng.uniform(0.4, 1.0, total)
    areas = np.where(rng.random(total) < 0.3, rng.choice([32.0**2, 96.0**2], total), areas)
    return CocoData(
        name="random",
        json_file=Path("random.json"),
        image_root=Path("."),
        categories=tuple(Category(3 * k + 2, f"class {k}") for k in range(classes)),
        image_ids=rng.permutation(images).astype(np.int64) * 7 + 5,
        file_names=[f"{i}.jpg" for i in range(images)],
        widths=np.full(images, 200, np.int32),
        heights=np.full(images, 200, np.int32),
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        labels=rng.choice(present, total).astype(np.int32),
        boxes=boxes,
        areas=areas,
        crowd=rng.random(total) < crowd,
        object_ids=rng.permutation(total).astype(np.int64) + 1,
        fingerprint="",
    )


def make_detections(rng, data, per_image=10):
    """Makes detections near objects and elsewhere, with equal scores and exact duplicates.

    `images` holds places in the ascending image ids. Some images get none.
    """
    rows = []
    classes = len(data.categories)
    for place, number in enumerate(np.argsort(data.image_ids)):
        here = np.arange(data.starts[number], data.starts[number + 1])
        for _ in range(rng.poisson(per_image) if rng.random() < 0.9 else 0):
            if len(here) and rng.random() < 0.7:
                j = rng.choice(here)
                label, box = int(data.labels[j]), data.boxes[j] + rng.integers(-1, 2, 4) * 10.0
                if rng.random() < 0.1:
                    label = int(rng.integers(classes))
            else:
                label = int(rng.integers(classes))
                box = np.concatenate([rng.integers(0, 8, 2), rng.integers(1, 12, 2)]) * 10.0
            box[2:] = np.maximum(box[2:], 5)
            row = (place, label, box, float(np.float32(rng.integers(0, 20) / 20)))
            rows += [row] * (2 if rng.random() < 0.1 else 1)
    places, labels, boxes, scores = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Detections(
        np.array(places, np.int64),
        np.array(labels, np.int64),
        np.array(boxes, np.float64).reshape(-1, 4),
        np.array(scores, np.float64),
    )


def to_coco_dict(data):
    numbers = np.repeat(np.arange(len(data.image_ids)), np.diff(data.starts))
    return {
        "info": {},
        "images": [
            {"id": int(i), "file_name": name, "width": 200, "height": 200}
            for i, name in zip(data.image_ids, data.file_names, strict=True)
        ],
        "categories": [{"id": c.id, "name": c.name} for c in data.categories],
        "annotations": [
            {
                "id": int(data.object_ids[j]),
                "image_id": int(data.image_ids[numbers[j]]),
                "category_id": data.categories[data.labels[j]].id,
                "bbox": data.boxes[j].tolist(),
                "area": float(data.areas[j]),
                "iscrowd": int(data.crowd[j]),
            }
            for j in range(len(numbers))
        ],
    }


def run_pycocotools(data, detections, labels=None, image_ids=None):
    """Returns (precision (T, R, K, A), {metric: percent or None}) with catIds and imgIds set."""
    ascending = np.sort(data.image_ids)
    found = [
        {
            "image_id": int(ascending[place]),
            "category_id": data.categories[label].id,
            "bbox": box.tolist(),
            "score": float(score),
        }
        for place, label, box, score in zip(
            detections.images, detections.labels, detections.boxes, detections.scores, strict=True
        )
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = to_coco_dict(data)
        truth.createIndex()
        # loadRes cannot take an empty list.
        results = truth.loadRes(found) if found else _no_results(truth)
        run = COCOeval(truth, results, "bbox")
        if labels is not None:
            run.params.catIds = [data.categories[k].id for k in labels]
        if image_ids is not None:
            run.params.imgIds = [int(i) for i in image_ids]
        run.evaluate()
        run.accumulate()
        run.summarize()
    scores = {
        metric: float(value * 100) if value > -1 else None
        for metric, value in zip(METRICS, run.stats[:6], strict=True)
    }
    return run.eval["precision"][..., -1], scores


def _no_results(truth):
    empty = COCO()
    empty.dataset = {**truth.dataset, "annotations": []}
    empty.createIndex()
    return empty
