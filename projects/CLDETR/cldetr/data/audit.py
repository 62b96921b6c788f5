"""What a scenario does to its data: images and objects per phase, and what the phases hide."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from detectron2.config import CfgNode

from cldetr.data.coco import CocoData, label_table
from cldetr.scenario import Phase, Scenario

MIN_OBJECTS = 10  # of a class, below which its AP means little
MAX_SMALL = 0.05  # share of objects that may be smaller than a cell


def audit_scenario(scenario: Scenario, data: Mapping[str, CocoData]) -> dict[str, Any]:
    """Counts images and objects per phase, and what the phases share or hide.

    Args:
        scenario: the scenario.
        data: its data sets by source.

    Returns:
        Plain values for JSON. `phases`: per phase the images, those with an object of its classes
        (`annotated`) and without (`empty`), `instances` (crowd regions included), `crowd`, boxes
        `dropped` at loading, objects `hidden` because their class is old, comes later or is never
        learnt, `instances_per_class`, and, without crowd regions, `objects_per_image` (mean and
        maximum, and the maximum with hidden ones) and `box_sizes` (quantiles of √area in pixels).
        `overlap`: images that two phases share, by file.
        `unused_images`: images of the data sets that are in no phase. `classes_without_instances`:
        learnt classes that their phase has no object of.
    """
    phases = [_audit_phase(scenario, phase, data[phase.source]) for phase in scenario.phases]
    overlap = _overlap(scenario, data)
    used: dict[str, set[int]] = {}
    for phase in scenario.phases:
        used.setdefault(phase.source, set()).update(phase.image_ids)
    return {
        "scenario": scenario.name,
        "protocol": scenario.protocol,
        "phases": phases,
        "overlap": overlap,
        "unused_images": sum(
            len(data[source].image_ids) - len(ids) for source, ids in used.items()
        ),
        "repeated_files": sum(one.report.repeated_files for one in data.values() if one.report),
        "classes_never_learnt": [
            category.name
            for label, category in enumerate(scenario.categories)
            if label not in set(scenario.seen(len(scenario.phases)))
        ],
        "classes_without_instances": [
            {"phase": phase["index"], "class": name}
            for phase in phases
            for name, count in phase["instances_per_class"].items()
            if count == 0 and phase["images"]  # a detector that was given has none
        ],
    }


def setting_warnings(
    scenario: Scenario, data: Mapping[str, CocoData], cfg: CfgNode
) -> Iterator[str]:
    """Yields what in the data a setting cannot work with, and what to set instead.

    Args:
        scenario: the scenario.
        data: its data sets by source.
        cfg: reads MODEL.DETR (NUM_QUERIES, IN_FEATURES), or the same of a LazyConfig's model, and
            INPUT.
    """
    lazy, detr = cfg.LAZY.get("model", {}), cfg.MODEL.DETR
    own_model = cfg.MODEL.META_ARCHITECTURE in ("DeformableDETR", "DETR")
    own_model = own_model or {"num_queries", "in_features"} <= {*lazy}
    finest = str(lazy.get("in_features", detr.IN_FEATURES)[0])
    stride = {"res2": 4, "res3": 8, "res4": 16, "res5": 32}.get(finest)
    stride = int(finest[6:]) if finest.startswith("stride") and finest[6:].isdecimal() else stride
    for phase in [phase for phase in scenario.phases if phase.image_ids]:
        source, where = data[phase.source], f"phase {phase.index}"
        owners, labels, inside = _objects(scenario, phase, source)
        inside &= ~source.crowd
        counts = np.bincount(labels[inside & (labels >= 0)], minlength=len(scenario.categories))
        few = [
            f"{scenario.categories[label].name} ({counts[label]})"
            for label in phase.taught
            if 0 < counts[label] < MIN_OBJECTS
        ]
        if few:
            yield (
                f"{where}: fewer than {MIN_OBJECTS} objects of {', '.join(few[:10])}"
                f"{', …' * (len(few) > 10)}: their AP will mean little; add images"
            )
        if not own_model:
            continue
        known = np.isin(labels, scenario.seen(phase.index))  # old ones may be pseudo-labelled
        per_image = np.bincount(owners[inside & known], minlength=1)
        queries, most = lazy.get("num_queries", detr.NUM_QUERIES), int(per_image.max())
        if most > queries:
            yield (
                f"{where}: {int((per_image > queries).sum()):,} images have more objects than the "
                f"detector has queries ({queries}), up to {most}: set MODEL.DETR.NUM_QUERIES above "
                "that"
            )
        own = np.flatnonzero(inside & np.isin(labels, phase.taught))
        small = _sizes_at_test(source, owners[own], own, cfg) < (stride or 0)
        if len(small) and small.mean() > MAX_SMALL:
            yield (
                f"{where}: {small.mean():.0%} of the objects are smaller than a cell of the finest "
                f"feature level, {stride} × {stride} pixels: set INPUT.MIN_SIZE_TRAIN and "
                "MIN_SIZE_TEST higher, or use a finer level (MODEL.DETR.IN_FEATURES)"
            )


def _objects(
    scenario: Scenario, phase: Phase, data: CocoData
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every object: its image, by index, its label, and whether the phase has the image."""
    owners = np.repeat(np.arange(len(data.image_ids)), np.diff(data.starts))  # (N,)
    every = range(len(scenario.categories))
    labels = label_table(data, scenario.categories, every)[data.labels]
    return owners, labels, np.isin(data.image_ids, phase.image_ids)[owners]


def _sizes_at_test(
    data: CocoData, owners: np.ndarray, rows: np.ndarray, cfg: CfgNode
) -> np.ndarray:
    """√area of boxes in pixels of the images at test size."""
    sizes = np.sqrt(data.boxes[rows, 2:].prod(axis=1))
    if not cfg.INPUT.MIN_SIZE_TEST:
        return sizes
    sides = np.sort(np.stack([data.widths, data.heights])[:, owners], axis=0)  # short, long
    scale = np.minimum(cfg.INPUT.MIN_SIZE_TEST / sides[0], cfg.INPUT.MAX_SIZE_TEST / sides[1])
    return sizes * scale


def _audit_phase(scenario: Scenario, phase: Phase, data: CocoData) -> dict[str, Any]:
    owners, labels, inside = _objects(scenario, phase, data)
    own = inside & np.isin(labels, phase.annotated)
    per_class = np.bincount(labels[own], minlength=len(scenario.categories))
    annotated = len(np.unique(owners[own]))
    hidden = inside & ~own
    old, future = scenario.old(phase.index), scenario.future(phase.index)
    objects = np.bincount(owners[own & ~data.crowd])
    all_objects = np.bincount(owners[inside & ~data.crowd])
    sizes = np.sqrt(data.boxes[own & ~data.crowd, 2:].prod(axis=1))
    hidden_old, hidden_future = (
        int(np.isin(labels[hidden], group).sum()) for group in (old, future)
    )
    return {
        "index": phase.index,
        "source": phase.source,
        "classes": len(phase.taught),
        "images": len(phase.image_ids),
        "annotated": annotated,
        "empty": len(phase.image_ids) - annotated,
        "instances": int(own.sum()),
        "crowd": int((own & data.crowd).sum()),
        "dropped": _dropped(scenario, phase, data),
        "hidden": {
            "old": hidden_old,
            "future": hidden_future,
            "never": int(hidden.sum()) - hidden_old - hidden_future,
        },
        "images_with_hidden": len(np.unique(owners[hidden])),
        "objects_per_image": {
            "mean": round(float(objects.sum()) / max(len(phase.image_ids), 1), 2),
            "max": int(objects.max(initial=0)),
            "max_with_hidden": int(all_objects.max(initial=0)),
        },
        "box_sizes": {
            key: round(float(np.quantile(sizes, share)), 1) if len(sizes) else None
            for key, share in (("5%", 0.05), ("50%", 0.5), ("95%", 0.95))
        },
        "instances_per_class": {
            scenario.categories[label].name: int(per_class[label]) for label in phase.annotated
        },
    }


def _dropped(scenario: Scenario, phase: Phase, data: CocoData) -> int:
    """How many boxes of the phase the loader dropped."""
    if data.report is None or not data.report.dropped:
        return 0
    names = {scenario.categories[label].name for label in phase.annotated}
    categories = {category.id for category in data.categories if category.name in names}
    images = set(phase.image_ids)
    return sum(
        image in images and category in categories for _, image, category in data.report.dropped
    )


def _overlap(scenario: Scenario, data: Mapping[str, CocoData]) -> list[dict[str, Any]]:
    """Pairs of phases that share image files, as most do in the traditional protocol."""
    files = [_files(phase.image_ids, data[phase.source]) for phase in scenario.phases]
    found = []
    for later, second in enumerate(files):
        for earlier, first in enumerate(files[:later]):
            if shared := first.keys() & second.keys():
                found.append(
                    {
                        "phases": [earlier + 1, later + 1],
                        "images": len(shared),
                        "examples": sorted(second[file] for file in shared)[:10],
                    }
                )
    return found


def _files(image_ids: Sequence[int], data: CocoData) -> dict[str, int]:
    root = os.path.abspath(data.image_root)
    indices = data.indices_of(image_ids).tolist()
    return {
        os.path.join(root, data.file_names[index]): image
        for index, image in zip(indices, image_ids, strict=True)
    }
