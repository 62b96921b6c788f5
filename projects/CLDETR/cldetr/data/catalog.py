"""Views in Detectron2's catalogs, under names such as `cldetr/<prefix>/phase1`.

Registering loads nothing: an annotation file is read when the first view of it is asked for, once
per process. A process that was spawned registers again with `register_from_manifest`.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager

from cldetr.data.coco import CocoData, load_coco
from cldetr.data.manifest import check_source, load_manifest, scenario_hash
from cldetr.data.views import View, evaluation_part
from cldetr.errors import InputError
from cldetr.files import sha256_json
from cldetr.scenario import BASE, Part, Scenario

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataFile:
    """An annotation file to be read when it is first needed, with the options of `load_coco`."""

    json_file: str
    image_root: str
    name: str | None = None
    bad_boxes: str = "stop"
    cache_dir: str | None = None

    def open(self) -> CocoData:
        """Reads the file; the same file with the same options is read once per process."""
        try:
            state = os.stat(self.json_file)
        except OSError:
            return _load(self, None)  # says what is wrong
        return _load(self, (state.st_ino, state.st_size, state.st_mtime_ns))


Source = CocoData | DataFile


@lru_cache(maxsize=16)
def _load(file: DataFile, state: tuple[int, int, int] | None) -> CocoData:
    return load_coco(
        file.json_file,
        file.image_root,
        name=file.name,
        bad_boxes=file.bad_boxes,
        cache_dir=file.cache_dir,
    )


def registered_file(
    name: str, *, bad_boxes: str = "stop", cache_dir: str | None = None
) -> DataFile:
    """The annotation file and image folder of a data set that is registered in COCO format.

    Detectron2 registers COCO 2017 as `coco_2017_train` and `coco_2017_val`, below the folder that
    the environment variable DETECTRON2_DATASETS names (`datasets` by default).
    """
    if name not in DatasetCatalog:
        near = difflib.get_close_matches(name, DatasetCatalog.keys(), n=3)
        raise InputError(
            f"no data set {name!r} is registered with Detectron2; "
            + (f"do you mean {', '.join(near)}?" if near else "use register_coco_instances first")
        )
    metadata = MetadataCatalog.get(name)
    if not hasattr(metadata, "json_file") or not hasattr(metadata, "image_root"):
        raise InputError(
            f"the data set {name!r} has no COCO annotation file: register it with Detectron2's "
            "register_coco_instances"
        )
    json_file = PathManager.get_local_path(os.fspath(metadata.json_file))
    return DataFile(json_file, os.fspath(metadata.image_root), name, bad_boxes, cache_dir)


def base_data(name: str, *, bad_boxes: str = "stop", cache_dir: str | None = None) -> CocoData:
    """Reads a data set that is registered with Detectron2 in COCO format, once per process."""
    return registered_file(name, bad_boxes=bad_boxes, cache_dir=cache_dir).open()


def view_name(prefix: str, kind: str, index: int | str = "") -> str:
    """The catalog's name of a view: `view_name("voc", "phase", 1)` is "cldetr/voc/phase1"."""
    return f"cldetr/{prefix}/{kind}{index}"


def register_views(
    scenario: Scenario,
    data: Source | Mapping[str, Source],
    prefix: str,
    *,
    evaluation: Source | Mapping[str, Source] | None = None,
) -> list[str]:
    """Registers the views of a scenario and returns their names.

    `phase1` … are the D_i with annotations of C_i; `joint1` … all images up to a phase with all
    classes seen so far (the upper bound); `eval`, or `eval/<key>` for several, all images and
    categories of an evaluation data set. Registering the same again is fine; a name that stands for
    something else is refused.

    Training views carry no `json_file`: Detectron2's evaluator would take the whole file as their
    ground truth. Without it, it converts the view.

    Args:
        scenario: what to register.
        data: the base data set, or the data sets by source.
        prefix: tells scenarios apart.
        evaluation: one data set, or several by a key; its categories are matched by name.
    """
    sources, digest = _Sources(scenario, data), scenario_hash(scenario)
    names = []
    for phase in scenario.phases:
        for kind, parts in (("phase", (phase.part(),)), ("joint", scenario.joint(phase.index))):
            names.append(view_name(prefix, kind, phase.index))
            _register_training(names[-1], parts, sources, identity=digest)
    if isinstance(evaluation, Mapping):
        tests = {view_name(prefix, "eval/", key): source for key, source in evaluation.items()}
    else:
        tests = {} if evaluation is None else {view_name(prefix, "eval"): evaluation}
    for name, source in tests.items():
        _register_evaluation(name, scenario, source)
    return [*names, *tests]


def register_exemplars(
    scenario: Scenario,
    data: Source | Mapping[str, Source],
    prefix: str,
    image_ids: Mapping[int, Sequence[int]],
) -> str:
    """Registers E_1:i as `exemplars<i>`, i the last phase in `image_ids`, and returns the name.

    Args:
        scenario: that the exemplars were chosen in.
        data: the base data set, or the data sets by source.
        prefix: as in `register_views`.
        image_ids: phase index → image ids of its exemplars.
    """
    if not image_ids:
        raise InputError("there are no exemplars to register")
    name = view_name(prefix, "exemplars", max(image_ids))
    parts = scenario.exemplars(image_ids)
    identity = sha256_json([scenario_hash(scenario), [part.image_ids for part in parts]])
    _register_training(name, parts, _Sources(scenario, data), identity=identity)
    return name


def register_from_manifest(
    manifest: str | os.PathLike[str],
    files: DataFile | Mapping[str, DataFile],
    prefix: str,
    *,
    evaluation: DataFile | Mapping[str, DataFile] | None = None,
) -> Scenario:
    """Registers the views of a manifest's scenario, as a process that has just started must."""
    scenario = load_manifest(manifest)
    register_views(scenario, files, prefix, evaluation=evaluation)
    return scenario


class _Sources:
    """The data sets of a scenario, each opened and held against the scenario when first used."""

    def __init__(self, scenario: Scenario, data: Source | Mapping[str, Source]) -> None:
        self.scenario = scenario
        self.given = data if isinstance(data, Mapping) else {BASE: data}
        missing = [source for source, _ in scenario.fingerprints if source not in self.given]
        if missing:
            raise InputError.listing("data sets of the scenario were not given:", missing)
        self._opened: dict[str, CocoData] = {}

    def __getitem__(self, source: str) -> CocoData:
        if source not in self._opened:
            data = _open(self.given[source])
            check_source(self.scenario, source, data)
            self._opened[source] = data
        return self._opened[source]


def _open(source: Source) -> CocoData:
    return source.open() if isinstance(source, DataFile) else source


def _register_training(
    name: str, parts: tuple[Part, ...], sources: _Sources, identity: str
) -> None:
    scenario = sources.scenario

    def build() -> View:
        data = {part.source: sources[part.source] for part in parts}
        return View(scenario.categories, parts, data, name)

    metadata = {
        "thing_classes": [category.name for category in scenario.categories],
        "thing_dataset_id_to_contiguous_id": {
            category.id: label for label, category in enumerate(scenario.categories)
        },
    }
    places = [_place(sources.given[part.source]) for part in parts]
    _register(name, [identity, places], build, metadata)


def _register_evaluation(name: str, scenario: Scenario, source: Source) -> None:
    # Read now: how its category ids become labels belongs to the metadata.
    data = _open(source)
    part = evaluation_part(data, name, scenario.categories)
    known = {scenario.categories[label].name for label in part.classes}
    unknown = [category.name for category in scenario.categories if category.name not in known]
    if unknown:
        logger.warning("%s says nothing about %s", data.json_file, ", ".join(unknown))
    metadata = {
        "thing_classes": [category.name for category in scenario.categories],
        "thing_dataset_id_to_contiguous_id": {
            category.id: label
            for category, label in zip(data.categories, part.classes, strict=True)
        },
        "evaluator_type": "coco",
        "json_file": os.fspath(data.json_file),
        "image_root": os.fspath(data.image_root),
    }
    identity = [[c.name for c in scenario.categories], data.fingerprint, _place(source)]
    _register(
        name, identity, lambda: View(scenario.categories, (part,), {name: data}, name), metadata
    )


def _place(source: Source) -> list[str]:
    return [str(Path(source.json_file).absolute()), str(Path(source.image_root).absolute())]


def _register(name: str, identity: Any, build: Any, metadata: dict[str, Any]) -> None:
    """Registers a view under a name, unless the very same is registered already."""
    digest = sha256_json(identity)
    if name in DatasetCatalog:
        if getattr(MetadataCatalog.get(name), "identity", None) == digest:
            return
        raise InputError(
            f"the data set name {name} already stands for something else: choose another prefix, "
            "or remove it from DatasetCatalog and MetadataCatalog first"
        )
    DatasetCatalog.register(name, cache(build))
    MetadataCatalog.get(name).set(identity=digest, **metadata)
