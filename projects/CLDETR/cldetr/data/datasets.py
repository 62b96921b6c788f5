"""Data sets by name: what may be trained on, and the views of a run in Detectron2's catalogs.

A run registers, below `cldetr/<run directory>/`,

    phase1, phase2 …          D_i with annotations of C_i
    joint1, joint2 …          all images up to a phase with all classes seen so far (upper bound)
    revealed1, revealed2 …    D_i with all classes seen so far (the KD-oracle)
    exemplars1 …              E_1:i, each image with the annotations of its own phase
    replay2 …                 D_i ∪ E_1:i−1, where the training step replays exemplars, with the
                              unlabelled images that came with the detector of phase 1
    exemplars1_revealed …     E_1:i with all classes seen so far (an oracle)
    test1, test2 …            all test images with the classes seen so far; those of all
                              domains where the phases are domains, later ones among them
    held_out1, held_out2 …    images that an early stop holds out, with the annotations of D_i

with metadata, so that Detectron2's loaders, `Visualizer` and `COCOEvaluator` take them by name.
(Where data sets with the same image ids share a view, that evaluator cannot tell them apart; the
run's own can.)
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_pascal_voc
from detectron2.utils.file_io import PathManager
from torch.utils.data import Dataset

from cldetr.data.cache import cache_folder
from cldetr.data.coco import CocoData, label_table, load_coco
from cldetr.data.registered import data_from_dicts
from cldetr.data.views import View, evaluation_subset
from cldetr.data.voc import read_voc
from cldetr.data.yolo import read_yolo
from cldetr.errors import InputError
from cldetr.files import sha256_json
from cldetr.scenario import AnnotatedSubset, Scenario


def _read_coco(path: str, root: str | os.PathLike[str], **options: Any) -> CocoData:
    return load_coco(path, root, cache_dir=cache_folder(path), **options)


_BUILT_IN = " (Detectron2's built-in data sets are below the folder DETECTRON2_DATASETS)"

# Readers of other formats than COCO's: `FORMAT:TEXT` calls the reader of that format with the text.
# To add one, write a function with the same arguments and enter it here; `data_from_dicts` makes a
# `CocoData` of Detectron2's dictionaries.
READERS: dict[str, Callable[..., CocoData]] = {"voc": read_voc, "yolo": read_yolo}


def read_dataset(
    reference: str,
    *,
    bad_boxes: str = "stop",
    trim: bool = True,
    image_root: str | os.PathLike[str] | None = None,
) -> CocoData:
    """Reads the annotations of a data set.

    Args:
        reference: `ANNOTATIONS.json:IMAGE_FOLDER` (a COCO file), `FORMAT:TEXT` with a format in
            `READERS`, or the name of a data set that is registered with Detectron2. COCO files and
            Pascal VOC, such as `voc_2007_trainval`, are read by this package; of other data sets
            the registered function is called.
        bad_boxes: "stop" at malformed boxes, or "drop" and count them.
        trim: cut boxes to their image, as for training; see `load_coco`.
        image_root: the image folder of a COCO file that is given without it.
    """
    path, found, folder = reference.partition(".json:")
    if found:
        return _read_coco(f"{path}.json", folder, bad_boxes=bad_boxes, trim=trim)
    if image_root is not None and (reference.endswith(".json") or os.path.isfile(reference)):
        return _read_coco(reference, image_root, bad_boxes=bad_boxes, trim=trim)
    if reference.endswith(".json"):
        raise InputError(
            f"{reference} does not name the image folder: write {reference}:IMAGE_FOLDER"
        )
    format, found, text = reference.partition(":")
    if found and format in READERS:
        return READERS[format](text, bad_boxes=bad_boxes, trim=trim)
    if reference not in DatasetCatalog:
        near = difflib.get_close_matches(reference, DatasetCatalog.keys(), n=3)
        hint = f"do you mean {', '.join(near)}?" if near else "register it first"
        formats = ", ".join(f"{format}:…" for format in READERS)
        raise InputError(
            f"no data set {reference!r} is registered with Detectron2: {hint} (a COCO file is "
            f"given as ANNOTATIONS.json:IMAGE_FOLDER, other formats as {formats})"
        )
    metadata = MetadataCatalog.get(reference)
    # Detectron2's COCOEvaluator sets `json_file`, without `image_root`, on what it converts.
    is_coco = hasattr(metadata, "json_file") and hasattr(metadata, "image_root")
    if is_coco and metadata.get("evaluator_type", "coco") == "coco":
        json_file = PathManager.get_local_path(os.fspath(metadata.json_file))
        if not os.path.exists(json_file):
            raise InputError(
                f"there is no annotation file {json_file} of the data set {reference!r}: put it "
                f"there{_BUILT_IN}"
            )
        image_root = os.fspath(metadata.image_root)
        return _read_coco(json_file, image_root, name=reference, bad_boxes=bad_boxes, trim=trim)
    if getattr(DatasetCatalog[reference], "__module__", "") == register_pascal_voc.__module__:
        return _read_registered_voc(reference, bad_boxes=bad_boxes, trim=trim)
    try:
        dicts = list(DatasetCatalog.get(reference))
    except Exception as error:
        hint = "check that its files are there" if isinstance(error, OSError) else "fix it"
        raise InputError(
            f"the function registered as {reference!r} failed: {type(error).__name__}: {error}; "
            f"{hint}{_BUILT_IN}"
        ) from error
    return data_from_dicts(
        reference, dicts, metadata.get("thing_classes"), bad_boxes=bad_boxes, trim=trim
    )


def _read_registered_voc(reference: str, **options: Any) -> CocoData:
    """Reads what `register_pascal_voc` registered; its own function drops the difficult flags."""
    metadata = MetadataCatalog.get(reference)
    path = os.path.join(PathManager.get_local_path(metadata.dirname), metadata.split)
    try:
        return read_voc(path, name=reference, categories=metadata.thing_classes, **options)
    except InputError as error:
        raise InputError(f"the data set {reference!r} cannot be read{_BUILT_IN}: {error}") from None


def view_name(prefix: str, kind: str, phase: int, suffix: str = "") -> str:
    """The catalog's name of a view: `view_name("voc", "phase", 1)` is "cldetr/voc/phase1"."""
    return f"cldetr/{prefix}/{kind}{phase}{suffix}"


def register_views(
    scenario: Scenario,
    train: Mapping[str, CocoData],
    test: Mapping[str, CocoData],
    prefix: str,
    skip_empty: bool = False,
) -> list[str]:
    """Registers the views of a scenario, all but exemplars, and returns their names.

    Registering the same again is fine; a name that is registered with other content is refused.

    Args:
        scenario: what to register.
        train: the training data sets by source.
        test: the test data sets by source; their categories are matched by name.
        prefix: tells runs apart.
        skip_empty: train without the images that have no annotation of any class.
    """
    names = []
    for phase in scenario.phases:
        for kind, subsets in (
            ("phase", (phase.subset(),)),
            ("joint", scenario.joint(phase.index)),
            ("revealed", (scenario.revealed(phase.index),)),
        ):
            names.append(view_name(prefix, kind, phase.index))
            if skip_empty:
                subsets = tuple(_with_annotations(x, train[x.source]) for x in subsets)
            _register(names[-1], scenario, subsets, train)
    extends = scenario.protocol == "extend"
    whole = tuple(
        evaluation_subset(data, source, scenario.categories, ignore_unknown=extends)
        for source, data in test.items()
    )
    for phase in scenario.phases:
        seen = set(scenario.seen(phase.index))
        subsets = tuple(
            replace(subset, classes=tuple(label for label in subset.classes if label in seen))
            for subset in whole
        )
        names.append(view_name(prefix, "test", phase.index))
        metadata: dict[str, Any] = {"scenario": scenario, "phase": phase.index}
        if subsets == whole and len(whole) == 1:
            metadata |= _file_metadata(scenario, whole[0], test[whole[0].source])
        _register(names[-1], scenario, subsets, test, metadata)
    return names


def unregister_views(prefix: str) -> None:
    """Removes all views of a prefix, those of an earlier start in this process."""
    for name in DatasetCatalog.list():
        if name.startswith(f"cldetr/{prefix}/"):
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)


def register_exemplars(
    scenario: Scenario,
    train: Mapping[str, CocoData],
    prefix: str,
    image_ids: Mapping[int, Sequence[int]],
) -> list[str]:
    """Registers E_1:i, i the last phase in `image_ids`, and returns the names of its two views.

    Args:
        scenario: that the exemplars were chosen in.
        train: the training data sets by source.
        prefix: as in `register_views`.
        image_ids: phase index → image ids of its exemplars.
    """
    if not image_ids:
        raise InputError("there are no exemplars to register")
    names = []
    for suffix in ("", "_revealed"):
        names.append(view_name(prefix, "exemplars", max(image_ids), suffix))
        subsets = scenario.exemplars(image_ids, reveal=bool(suffix))
        _register(names[-1], scenario, subsets, train)
    return names


def register_replay(
    scenario: Scenario,
    train: Mapping[str, CocoData],
    prefix: str,
    phase: int,
    image_ids: Mapping[int, Sequence[int]] | None,
    reveal: bool = False,
    skip_empty: bool = False,
    unlabelled: bool = False,
) -> str:
    """Registers D_i ∪ E_1:i−1 and returns its name.

    Args:
        scenario: that the exemplars were chosen in.
        train: the training data sets by source.
        prefix: as in `register_views`.
        phase: i.
        image_ids: phase index → image ids of its exemplars; None for no exemplars.
        reveal: D_i with all classes seen so far, as the KD-oracle sees it.
        skip_empty: as in `register_views`.
        unlabelled: with the unlabelled images that came with the detector of phase 1.
    """
    own = scenario.revealed(phase) if reveal else scenario.phase(phase).subset()
    subsets = [_with_annotations(own, train[own.source]) if skip_empty else own]
    if image_ids is not None:
        subsets += scenario.exemplars(image_ids)
    if unlabelled:
        subsets += scenario.unlabelled()
    name = view_name(prefix, "replay", phase)
    _register(name, scenario, subsets, train)
    return name


def register_held_out(
    held_out: Scenario, train: Mapping[str, CocoData], prefix: str, kind: str = "phase"
) -> list[str]:
    """Registers the held-out images of each phase that has some and returns the names.

    Args:
        held_out: a scenario of these images alone (`cldetr.scenario.hold_out`).
        train: the training data sets by source.
        prefix: as in `register_views`.
        kind: "phase", "joint" or "revealed": the view of `register_views` that is trained on.
    """
    names = []
    for phase in held_out.phases:
        if not phase.image_ids:
            continue
        subsets: Sequence[AnnotatedSubset] = (phase.subset(),)
        if kind == "joint":
            subsets = held_out.joint(phase.index)
        elif kind == "revealed":
            subsets = (held_out.revealed(phase.index),)
        name = view_name(prefix, "held_out", phase.index)
        metadata = {"scenario": held_out, "phase": phase.index}
        data = {}  # an evaluator takes all images of a data set for those to be evaluated
        for subset in subsets:
            source = train[subset.source]
            indices = np.sort(source.indices_of(subset.image_ids))
            data[subset.source] = source.subset(indices, f"{source.name}, held out")
        _register(name, held_out, subsets, data, metadata)
        objects = (x for entry in DatasetCatalog.get(name) for x in entry["annotations"])
        if all(x["iscrowd"] for x in objects):
            raise InputError(
                f"the {len(phase.image_ids)} held-out images of phase {phase.index} show no object "
                "of its classes, an early stop cannot be decided on them: raise "
                "SCHEDULE.EARLY_STOP.HOLD_OUT, or set another SCENARIO.DATA_SEED"
            )
        names.append(name)
    return names


def register_dataset(name: str, dataset: Dataset, like: str) -> None:
    """Registers a data set that is made from a registered one, replacing an earlier one."""
    metadata = MetadataCatalog.get(like).as_dict()
    for catalog in (DatasetCatalog, MetadataCatalog):
        if name in catalog:
            catalog.remove(name)
    DatasetCatalog.register(name, lambda: dataset)
    MetadataCatalog.get(name).set(**{**metadata, "name": name})


def dataset_digest(names: Sequence[str]) -> str:
    """A digest of the images, annotation files and labels of registered views."""
    return sha256_json([MetadataCatalog.get(name).digest for name in names])


def _with_annotations(subset: AnnotatedSubset, data: CocoData) -> AnnotatedSubset:
    """The subset without images that have no annotation of any class, whichever it may see."""
    annotated = set(data.image_ids[np.diff(data.starts) > 0].tolist())
    return replace(subset, image_ids=tuple(x for x in subset.image_ids if x in annotated))


def _file_metadata(scenario: Scenario, subset: AnnotatedSubset, data: CocoData) -> dict[str, Any]:
    """What lets Detectron2's evaluator read the annotation file itself, where it may.

    It may not where the file lacks a category, which that evaluator does not take, or has boxes
    that were dropped at loading, or images that are not in the data set: then it converts the
    view, as it does with every other one.
    """
    report = data.report
    whole = report is not None and not report.dropped and report.images == len(data.image_ids)
    if not data.json_file.is_file() or not whole or len(subset.classes) < len(scenario.categories):
        return {}
    labels = label_table(data, scenario.categories, subset.classes).tolist()
    if -1 in labels:  # categories that the scenario ignores
        return {}
    ids = zip(data.categories, labels, strict=True)
    return {
        "thing_dataset_id_to_contiguous_id": {category.id: label for category, label in ids},
        "evaluator_type": "coco",
        "json_file": os.fspath(data.json_file),
        "image_root": os.fspath(data.image_root),
    }


def _register(
    name: str,
    scenario: Scenario,
    subsets: Sequence[AnnotatedSubset],
    data: Mapping[str, CocoData],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Registers a view under a name, unless the very same is registered already."""
    view = View(scenario.categories, subsets, data)
    digest = view.digest()
    if name in DatasetCatalog:
        if MetadataCatalog.get(name).get("digest") == digest:
            return
        raise InputError(
            f"the data set name {name} is already registered with other content: choose another "
            "OUTPUT_DIR, or remove it from DatasetCatalog and MetadataCatalog first"
        )
    DatasetCatalog.register(name, lambda: view)
    contiguous = {category.id: label for label, category in enumerate(scenario.categories)}
    MetadataCatalog.get(name).set(
        digest=digest,
        thing_classes=[category.name for category in scenario.categories],
        **{"thing_dataset_id_to_contiguous_id": contiguous, **(metadata or {})},
    )
