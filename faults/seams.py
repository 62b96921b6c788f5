"""Code of the user's that fails: hooks, evaluators, writers, builders, registered functions.

A run with a trainer of the user's own (`user_project.py`) is stopped by a fault in each of its
parts. The console must name class, file and line and say what to do, and the run, resumed with the
fault fixed, must end in the bits of one that never had it. A registered function that raises or
returns malformed dictionaries must be named before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json

import cldetr.train
from faults import tiny, user_project
from faults.tally import Options, Tally


def run(options: Options) -> Tally:
    """Tries every fault once."""
    tally = Tally("seams")
    base = tiny.Baseline.of(options)
    faults = user_project.FAULTS
    for fault in faults[1::3] if options.size == "short" else faults:
        folder = base.work / fault
        child = tiny.start(base.data.command(folder), folder.with_suffix(".txt"), _use(fault))
        status, said = child.wait(), child.said()
        told = fault in said and "user_project.py:" in said and "--resume" in said
        tally.check(
            "faults of the user's code: named with class, file, line and what to do",
            status == 1 and told,
            f"{fault}: {status} {said[-1500:]}",
        )
        before = tiny.finished_stages(folder)
        again = tiny.start(base.data.command(folder), folder.with_suffix(".txt"), _use(""))
        wrong = again.said()[-1500:] if again.wait() else tiny.difference(folder, base.expected)
        after = tiny.finished_stages(folder)
        lost = [stage for stage, record in before.items() if after[stage] != record]
        tally.check(
            "faults of the user's code: fixed and resumed, bit-identical, no stage done twice",
            not wrong and not lost,
            f"{fault}: {lost} {wrong}",
        )
    _registered(tally, base)
    return tally


def _use(fault: str) -> Callable[[], None]:
    """Makes the child's training command use the user's trainer."""

    def before() -> None:
        user_project.Trainer.fault = fault
        cldetr.train.Trainer = user_project.Trainer  # type: ignore[misc]

    return before


def _registered(tally: Tally, base: tiny.Baseline) -> None:
    """Registered functions, good and bad, in one folder: the good one must start after all."""
    paths = base.data.paths
    good = load_coco_json(str(paths.annotations("train")), str(paths.images("train")), "raw")
    classes = [f"class {label}" for label in range(4)]
    folder = base.work / "registered"
    for name, (function, expected) in {**BROKEN, "good": (lambda dicts: dicts, "")}.items():

        def before(function: Callable[[Any], Any] = function) -> None:
            dicts = [{**entry, "annotations": [*entry["annotations"]]} for entry in good]
            DatasetCatalog.register("own_data", lambda: function(dicts))
            MetadataCatalog.get("own_data").thing_classes = classes

        words = ("DATASETS.TRAIN", "['own_data']", "DATASETS.TEST", "['own_data']")
        log = base.work / f"registered_{name.replace(' ', '_')}.txt"
        child = tiny.start(base.data.command(folder, *words), log, before)
        status, said = child.wait(), child.said()
        if name == "good":
            tally.check(
                "registered functions, fixed: the same folder takes the run",
                status == 0,
                said[-1500:],
            )
        else:
            tally.check(
                "registered functions that are broken: named, with what is wrong",
                status == 2 and "own_data" in said and expected in said and "Traceback" not in said,
                f"{name}: {status} {said[-1500:]}",
            )
            left = [path.name for path in Path(folder).glob("*") if path.name != "lock"]
            tally.check(
                "registered functions that are broken: nothing written", not left, f"{left}"
            )


def _with(index: int, **changes: Any) -> Callable[[Any], Any]:
    def change(dicts: Any) -> Any:
        dicts[index].update(changes)
        return dicts

    return change


def _without(key: str) -> Callable[[Any], Any]:
    return lambda dicts: [{k: v for k, v in entry.items() if k != key} for entry in dicts]


def _annotated(**changes: Any) -> Callable[[Any], Any]:
    def change(dicts: Any) -> Any:
        entry = next(entry for entry in dicts if entry["annotations"])
        entry["annotations"][0] = {**entry["annotations"][0], **changes}
        return dicts

    return change


def _raise(dicts: Any) -> Any:
    raise KeyError("no such file in my archive")


# What a function does, and what the message must say of it.
BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "raises": (_raise, "KeyError: 'no such file in my archive'"),
    "returns nothing": (lambda dicts: None, "NoneType"),
    "returns no image": (lambda dicts: [], "no image"),
    "returns a text": (lambda dicts: "images", "entry 0"),
    "returns texts": (lambda dicts: ["a.png"], "entry 0"),
    "no file name": (_without("file_name"), "file_name"),
    "no height": (_without("height"), "height"),
    "no image id": (_without("image_id"), "image_id"),
    "size is a text": (_with(1, height="tall"), "entry 1"),
    "size is negative": (_with(1, width=-64), "-64"),
    "annotations is a number": (_with(0, annotations=3), "entry 0"),
    "annotation is a list": (_with(0, annotations=[[1, 2, 3, 4]]), "annotation 0"),
    "box of three": (_annotated(bbox=[1, 2, 3]), "[1, 2, 3]"),
    "box of texts": (_annotated(bbox=["a", "b", "c", "d"]), "boxes are not"),
    "box is NaN": (_annotated(bbox=[float("nan"), 1, 2, 3]), "nan"),
    "no mode of boxes": (_annotated(bbox_mode=None), "bbox_mode"),
    "category is a text": (_annotated(category_id="cat"), "category_id"),
    "category is unknown": (_annotated(category_id=99), "99"),
    "file is missing": (_with(0, file_name="/nowhere/x.png"), "nowhere/x.png"),
}
