"""COCO evaluation of all groups of classes, against pycocotools for one group.

Both sides get the same detections in the form that they take (Detectron2's Instances processed by
our evaluator; a list of dictionaries for pycocotools) and the time until the metrics are there is
measured: median of alternating runs, CPU time of one process.

    python benchmarks/evaluation.py              5,000 images × 100 detections × 80 classes
    python benchmarks/evaluation.py --scale 0.1  a tenth of the images
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Boxes, Instances
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from cldetr.evaluation.average_precision import (
    METRICS,
    Detections,
    GroundTruth,
    Source,
    match,
    summarise_precision,
)
from cldetr.evaluation.evaluator import IncrementalEvaluator
from cldetr.scenario import Category, Phase, Scenario

CLASSES = 80
GROUPS = (40, 10, 10, 10, 10)  # the paper's 40+10×4


def main() -> None:
    """Measures and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of 5,000 images")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    images = max(1, round(5000 * args.scale))

    rng = np.random.default_rng(0)
    truth = make_truth(rng, images)
    outputs = make_outputs(rng, truth)
    evaluator = IncrementalEvaluator(truth, make_scenario(), len(GROUPS))
    evaluator.process([{"image_id": i + 1} for i in range(images)], outputs)
    results = [
        {**result, "category_id": result["category_id"] + 1}
        for i, output in enumerate(outputs)
        for result in instances_to_coco_json(output["instances"], i + 1)
    ]
    detections = Detections(
        np.array([result["image_id"] - 1 for result in results]),
        np.array([result["category_id"] - 1 for result in results]),
        np.array([result["bbox"] for result in results]),
        np.array([result["score"] for result in results]),
    )
    annotations = to_coco_dict(truth)

    seconds: dict[str, list[float]] = {"all groups": [], "one group": [], "pycocotools": []}
    scores = {}
    evaluator.evaluate()  # warm
    for _ in range(args.repeats):
        entry = timed(seconds["all groups"], evaluator.evaluate)
        scores["all groups"] = entry["all"]
        scores["one group"] = timed(seconds["one group"], score_one_group, truth, detections)
        # pycocotools writes into what it is given.
        inputs = copy.deepcopy(annotations), copy.deepcopy(results)
        scores["pycocotools"] = timed(seconds["pycocotools"], run_pycocotools, *inputs)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    report = {
        "benchmark": "evaluation",
        "images": images,
        "detections": len(results),
        "classes": CLASSES,
        "groups": len(GROUPS) + 3,
        "seconds": {side: round(value, 3) for side, value in medians.items()},
        "times_faster_than_pycocotools": round(medians["pycocotools"] / medians["all groups"], 1),
        "all_groups_over_one": round(medians["all groups"] / medians["one group"], 3),
        "identical": scores["all groups"] == scores["one group"] == scores["pycocotools"],
        "AP": round(scores["all groups"]["AP"], 3),
        "repeats": args.repeats,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "pycocotools": version("pycocotools"),
        },
    }
    print(json.dumps(report))


def timed(seconds: list[float], function: Callable[..., Any], *inputs: Any) -> Any:
    """Runs a function and notes the CPU time it took."""
    begin = time.process_time()
    result = function(*inputs)
    seconds.append(time.process_time() - begin)
    return result


def score_one_group(truth: GroundTruth, detections: Detections) -> dict[str, float | None]:
    """Computes the six metrics over all classes alone."""
    return summarise_precision(match(truth, detections).precision(range(CLASSES)))


def run_pycocotools(
    annotations: dict[str, Any], results: list[dict[str, Any]]
) -> dict[str, float | None]:
    """Computes the six metrics over all classes as COCO's own code does."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = annotations
        truth.createIndex()
        run = COCOeval(truth, truth.loadRes(results), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return {
        metric: float(value * 100) if value > -1 else None
        for metric, value in zip(METRICS, run.stats[:6], strict=True)
    }


def make_scenario() -> Scenario:
    """Divides the classes, in order, as 40+10×4."""
    ends = np.cumsum(GROUPS).tolist()
    return Scenario(
        name="40+10x4",
        protocol="strict",
        categories=tuple(Category(k + 1, f"class {k}") for k in range(CLASSES)),
        phases=tuple(
            Phase(i, tuple(range(end - count, end)), ())
            for i, (end, count) in enumerate(zip(ends, GROUPS, strict=True), start=1)
        ),
        order="id",
        class_seed=None,
        data_seed=None,
        fingerprints=(),
    )


def make_truth(rng: np.random.Generator, images: int) -> GroundTruth:
    """Draws objects as COCO's val2017 has them: 7.3 an image, of few classes, some crowds."""
    counts = rng.poisson(7.3, images)
    images_of = np.repeat(np.arange(images), counts)
    palette = rng.integers(0, CLASSES, (images, 3))  # an image's classes
    boxes = draw_boxes(rng, len(images_of))
    return GroundTruth(
        sources=(Source("synthetic", frozenset(range(CLASSES))),),
        image_sources=np.zeros(images, dtype=np.int64),
        image_ids=np.arange(1, images + 1),
        images=images_of,
        labels=palette[images_of, rng.integers(0, 3, len(images_of))],
        boxes=boxes,
        areas=boxes[:, 2] * boxes[:, 3] * rng.uniform(0.5, 1.0, len(images_of)),
        crowd=rng.random(len(images_of)) < 0.01,
    )


def make_outputs(rng: np.random.Generator, truth: GroundTruth) -> list[dict[str, Instances]]:
    """Draws 100 detections an image, a quarter of them near an object, the rest anywhere."""
    starts = np.searchsorted(truth.images, np.arange(len(truth.image_ids) + 1))
    outputs = []
    for first, last in itertools.pairwise(starts):
        boxes, labels = draw_boxes(rng, 100), rng.integers(0, CLASSES, 100)
        scores = rng.beta(1, 8, 100)
        if last > first:
            # As detectors do, most often the classes that are there, right or wrong.
            labels[:60] = truth.labels[rng.integers(first, last, 60)]
            chosen = rng.integers(first, last, 25)
            moved = truth.boxes[chosen]
            moved[:, :2] += rng.normal(0, 0.08, (25, 2)) * moved[:, 2:]
            moved[:, 2:] *= np.exp(rng.normal(0, 0.1, (25, 2)))
            boxes[:25], labels[:25], scores[:25] = moved, truth.labels[chosen], rng.beta(3, 2, 25)
        instances = Instances((640, 640))
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        instances.pred_boxes = Boxes(torch.as_tensor(corners, dtype=torch.float32))
        instances.scores = torch.as_tensor(scores, dtype=torch.float32)
        instances.pred_classes = torch.as_tensor(labels)
        outputs.append({"instances": instances})
    return outputs


def draw_boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws boxes (N, 4) as x y w h within 640 × 640, of all three sizes."""
    sizes = np.exp(rng.normal(4, 0.9, (count, 2))).clip(4, 400)
    return np.concatenate([rng.uniform(0, 1, (count, 2)) * (640 - sizes), sizes], axis=1)


def to_coco_dict(truth: GroundTruth) -> dict[str, Any]:
    """Writes ground truth as the content of an annotation file."""
    return {
        "info": {},
        "images": [{"id": int(i), "width": 640, "height": 640} for i in truth.image_ids],
        "categories": [{"id": k + 1, "name": f"class {k}"} for k in range(CLASSES)],
        "annotations": [
            {
                "id": i + 1,
                "image_id": int(truth.image_ids[truth.images[i]]),
                "category_id": int(truth.labels[i]) + 1,
                "bbox": truth.boxes[i].tolist(),
                "area": float(truth.areas[i]),
                "iscrowd": int(truth.crowd[i]),
            }
            for i in range(len(truth.labels))
        ],
    }


if __name__ == "__main__":
    main()
