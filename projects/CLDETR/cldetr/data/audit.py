"""What a scenario does to its data: images and objects per phase, and what the phases hide."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cldetr.data.coco import CocoData, label_table
from cldetr.scenario import Phase, Scenario


def audit_scenario(scenario: Scenario, data: Mapping[str, CocoData]) -> dict[str, Any]:
    """Counts images and objects per phase, and what the phases share or hide.

    Args:
        scenario: the scenario.
        data: its data sets by source.

    Returns:
        Plain values for JSON. `phases`: per phase the images, those with an object of its classes
        (`annotated`) and without (`empty`), `instances` (crowd regions included), `crowd`, boxes
        `dropped` at loading, objects `hidden` because their class is old, comes later or is never
        learnt, and `instances_per_class`. `overlap`: images that two phases share, by file.
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


def _audit_phase(scenario: Scenario, phase: Phase, data: CocoData) -> dict[str, Any]:
    chosen = np.isin(data.image_ids, phase.image_ids)
    owners = np.repeat(np.arange(len(data.image_ids)), np.diff(data.starts))  # (N,)
    inside = chosen[owners]
    every = range(len(scenario.categories))
    labels = label_table(data, scenario.categories, every)[data.labels]
    own = inside & np.isin(labels, phase.annotated)
    per_class = np.bincount(labels[own], minlength=len(scenario.categories))
    annotated = len(np.unique(owners[own]))
    hidden = inside & ~own
    old, future = scenario.old(phase.index), scenario.future(phase.index)
    hidden_old, hidden_future = (
        int(np.isin(labels[hidden], group).sum()) for group in (old, future)
    )
    return {
        "index": phase.index,
        "source": phase.source,
        "classes": len(phase.classes),
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
