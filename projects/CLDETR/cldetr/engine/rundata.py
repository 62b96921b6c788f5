"""The data of a run: read once, divided by the scenario, registered under names for each stage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from torch.utils.data import Dataset
from tqdm import tqdm

from cldetr.config import method_of, scenario_settings, schedule_of
from cldetr.data.audit import audit_scenario, setting_warnings
from cldetr.data.coco import CocoData
from cldetr.data.datasets import (
    read_dataset,
    register_dataset,
    register_exemplars,
    register_held_out,
    register_replay,
    register_views,
    unregister_views,
    view_name,
)
from cldetr.data.exemplars import Context, Selection, find_strategy, phase_budget
from cldetr.data.herding import ObjectFeatures
from cldetr.data.manifest import check_same, load_manifest, save_manifest, scenario_hash
from cldetr.data.memory import ExemplarMemory, PhaseExemplars, phase_counts
from cldetr.data.scan import scan_images
from cldetr.data.unlabelled import no_images, read_image_folder
from cldetr.data.views import View
from cldetr.engine.features import object_features
from cldetr.engine.initial_weights import known_categories, trained_sides
from cldetr.engine.ranks import from_rank0
from cldetr.errors import InputError
from cldetr.files import write_json
from cldetr.grouping import random_state
from cldetr.methods.method import MemoryRule, Method
from cldetr.modeling.detector import Detector
from cldetr.scenario import (
    BASE,
    DETECTOR,
    Scenario,
    hold_out,
    make_domain_scenario,
    make_extension,
    make_scenario,
    make_separate_scenario,
    similar_names,
)

logger = logging.getLogger(__name__)

HOLD_OUT = "hold_out"  # in DATASETS.TEST: the training images that no phase sees
NOTHING = Selection(np.empty(0, np.int64), np.empty(0), 0, "a detector without images was given")


class RunData:
    """Scenario, training and test data of a run."""

    def __init__(self, cfg: CfgNode) -> None:
        """Reads DATASETS.TRAIN and TEST, divides them by SCENARIO and registers the views."""
        self.cfg = cfg
        memory = method_of(cfg).memory
        if memory is not None:
            find_strategy(memory.strategy)  # a wrong word is to be told before anything is trained
        self.prefix = str(cfg.OUTPUT_DIR).strip("/")
        self.extends = scenario_settings(cfg).protocol == "extend"
        self.train = self._read_train(trim=True, held_out=False)
        if list(cfg.DATASETS.TEST) == [HOLD_OUT]:
            self.test = self._read_train(trim=False, held_out=True)
        else:
            self.test = self._read("TEST", trim=False)
        self.scenario = self._extension() if self.extends else self._scenario()
        if self.scenario.protocol == "domains":
            self.test = self._by_domain(self.test)
        unregister_views(self.prefix)
        self.skip_empty = bool(cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS)
        early_stop = schedule_of(cfg).early_stop
        if early_stop is not None:
            seed = scenario_settings(cfg).data_seed
            self.scenario, held_out = hold_out(self.scenario, early_stop.hold_out, seed)
            register_held_out(held_out, self.train, self.prefix, method_of(cfg).view)
        register_views(self.scenario, self.train, self.test, self.prefix, self.skip_empty)

    @property
    def digest(self) -> str:
        """The hash of the scenario's manifest."""
        return scenario_hash(self.scenario)

    def name(self, kind: str, phase: int, suffix: str = "") -> str:
        """The registered name of one of the run's data sets (`cldetr.data.datasets`)."""
        return view_name(self.prefix, kind, phase, suffix)

    def size(self, names: Sequence[str]) -> int:
        """Images in registered data sets."""
        return sum(len(DatasetCatalog.get(name)) for name in names)

    def short_sides(self, phase: int) -> tuple[int, ...]:
        """The smallest and the largest short side of the images of all phases up to this one.

        Those of a detector that was given are in its file; where it does not say, there are none.
        """
        given = trained_sides(self.cfg.MODEL.DETECTOR) if self.extends else ()
        found = {*given}
        for each in self.scenario.phases[:phase]:
            data = self.train[each.source]
            indices = data.indices_of(each.image_ids)
            found.update(np.minimum(data.widths, data.heights)[indices].tolist())
        return (min(found), max(found)) if found else ()

    def load_memory(self, folder: Path) -> ExemplarMemory:
        """Reads E_1:i from the folder of its selection, and registers it."""
        memory = from_rank0(lambda: self._read_memory(folder))
        register_exemplars(self.scenario, self.train, self.prefix, memory.image_ids)
        return memory

    def register_replay(self, phase: int, before: Path | None, method: Method) -> str:
        """Registers D_i with E_1:i−1 and what else the training step sees; returns the name.

        Args:
            phase: i.
            before: the folder of the selection before; None where no exemplars are replayed.
            method: says whether D_i shows old classes; with an old model, images without labels
                are of use.
        """
        chosen = None if before is None else self.load_memory(before).image_ids
        return register_replay(
            self.scenario,
            self.train,
            self.prefix,
            phase,
            chosen,
            reveal=method.reveal_old,
            skip_empty=self.skip_empty,
            unlabelled=method.needs_teacher,
        )

    def consequences(self) -> list[str]:
        """What follows from the data that a user may not expect, told before training."""
        if self.scenario.protocol == "domains":
            return self._without_use()
        if not self.extends:
            return []
        found = [
            f"the new category {new!r} is named nearly as {known!r}, which the detector knows: if "
            "they are the same, spell it so"
            for new, known in similar_names(self.scenario)
        ]
        shown = {
            data.categories[label].name
            for data in self.test.values()
            for label in np.unique(data.labels).tolist()
        }
        old = {self.scenario.categories[label].name for label in self.scenario.seen(1)}
        new = {self.scenario.categories[label].name for label in self.scenario.future(1)}
        for kind, names in (("old", old), ("new", new)):
            missing = sorted(names - shown)
            if len(missing) == len(names):
                found.append(
                    f"the test set has no object of {kind} classes: AP on {kind} classes cannot be "
                    "shown"
                )
            elif missing:
                found.append(
                    f"the test set has no object of {', '.join(missing)}: AP on {kind} classes is "
                    "that of the others"
                )
        return found

    def register_predicted(self, phase: int, stage: str, view: Dataset, like: str) -> str:
        """Registers a stage's images with the teacher's predictions; returns the name."""
        name = self.name("predicted", phase, f"_{stage}")
        register_dataset(name, view, like)
        return name

    def check(self, root: Path) -> None:
        """Compares the scenario with the run's manifest, if it has one, and checks all images."""
        manifest = root / "manifest.json"
        if manifest.exists():
            check_same(load_manifest(manifest), self.scenario, f"the run in {root}")
        elif any(root.glob("phase*/*")):
            raise InputError(
                f"{manifest} is missing: without it nothing tells that the stages in {root} "
                "saw this data. Restore it, or start in a new OUTPUT_DIR"
            )
        if self.cfg.DATASETS.SCAN:
            for data in (*self.train.values(), *self.test.values()):
                scan_images(data)

    def record(self, root: Path) -> None:
        """Writes the manifest of the scenario and its audit, once."""
        if not (root / "manifest.json").exists():
            for warning in setting_warnings(self.scenario, self.train, self.cfg):
                logger.warning(warning)
            save_manifest(self.scenario, root / "manifest.json")
            write_json(root / "audit.json", audit_scenario(self.scenario, self.train))

    def object_features(
        self, phase: int, rule: MemoryRule, detector: Detector
    ) -> ObjectFeatures | None:
        """Features of a phase's objects, where the strategy of exemplars needs them.

        All ranks compute their share; rank 0 has the result.
        """
        part = self.scenario.phase(phase)
        if not find_strategy(rule.strategy).needs_features or not part.image_ids:
            return None
        view = View(self.scenario.categories, (part.subset(),), self.train)  # every image of D_i
        return object_features(detector, view, part.annotated, self.cfg)

    def select_exemplars(
        self, phase: int, rule: MemoryRule, before: Path | None, features: ObjectFeatures | None
    ) -> ExemplarMemory:
        """E_1:i from E_1:i−1: chooses the phase's exemplars (Alg. 2); on rank 0 alone.

        Args:
            phase: i.
            rule: how many, and by which strategy.
            before: the folder of the selection before, None in the first phase.
            features: of the phase's objects, where the strategy needs them.
        """
        counts = phase_counts(self.scenario, phase, self.train[self.scenario.phase(phase).source])
        strategy = find_strategy(rule.strategy)
        with tqdm(desc="choosing exemplars", unit="image", leave=False, disable=None) as bar:
            context = Context(self.cfg.SEED, features, progress=bar.update)
            budget = phase_budget(rule.budget, self.scenario)
            # A detector that was given brings no images.
            selection = strategy.choose(counts, budget, context) if counts.shape[0] else NOTHING
        chosen = PhaseExemplars.of(
            self.scenario,
            phase,
            counts,
            selection,
            strategy=rule.strategy,
            budget=rule.budget,
            seed=self.cfg.SEED,
        )
        logger.info(
            "phase %d select: %d of %d images by %r%s",
            phase,
            len(chosen.image_ids),
            counts.shape[0],
            rule.strategy,
            f", KL {chosen.kl[-1]:.2g}" if chosen.kl and chosen.kl[-1] is not None else "",
        )
        empty = ExemplarMemory.empty(self.scenario)
        return (self._read_memory(before) if before else empty).add(chosen)

    def _read_memory(self, folder: Path) -> ExemplarMemory:
        memory = ExemplarMemory.load(folder)
        memory.check(self.scenario, self.train)
        return memory

    def _read(self, part: str, trim: bool) -> dict[str, CocoData]:
        """Reads data sets by source: a single one is the base, several go by their names."""
        references = self.cfg.DATASETS[part]
        if not references:
            raise InputError(f"no data set is given: set DATASETS.{part}")
        loaded = [
            read_dataset(reference, bad_boxes=self.cfg.DATASETS.BAD_BOXES, trim=trim)
            for reference in references
        ]
        if len(loaded) == 1 and not (part == "TRAIN" and self.extends):
            return {BASE: loaded[0]}
        names = _distinct_names(loaded)
        return {name: replace(data, name=name) for name, data in zip(names, loaded, strict=True)}

    def _read_train(self, trim: bool, held_out: bool) -> dict[str, CocoData]:
        """The training data sets without the images that are held out, or these alone."""
        wanted = scenario_settings(self.cfg)
        if held_out and not wanted.hold_out:
            raise InputError(
                "DATASETS.TEST is hold_out, but no image is held out: set SCENARIO.HOLD_OUT to a "
                "share of the training images, such as 0.1"
            )
        found = self._read("TRAIN", trim)
        if not wanted.hold_out:
            return found
        for source, data in found.items():
            order = np.arange(len(data.image_ids))
            random_state(wanted.data_seed).shuffle(order)
            chosen = np.split(order, [max(round(wanted.hold_out * len(order)), 1)])[not held_out]
            name = f"{data.name}, held out" if held_out else data.name
            found[source] = data.subset(np.sort(chosen), name)
        return found

    def _extension(self) -> Scenario:
        """The scenario that adds the new data to MODEL.DETECTOR, whose images may join them."""
        cfg, wanted = self.cfg, scenario_settings(self.cfg)
        method = method_of(cfg)
        if method.joint or method.reveal_old:
            raise InputError(
                f"METHOD {method.name} trains on the old data, which SCENARIO.PROTOCOL extend does "
                "without: choose another method, or give all data as DATASETS.TRAIN"
            )
        if not cfg.MODEL.DETECTOR:
            raise InputError(
                "SCENARIO.PROTOCOL extend adds categories to a trained detector: set MODEL.DETECTOR"
            )
        new = list(self.train.values())
        detector = no_images(DETECTOR, cfg.MODEL.DETECTOR, known_categories(cfg.MODEL.DETECTOR))
        exemplars = [
            replace(read_dataset(reference), name=f"{DETECTOR}: exemplars {index}")
            for index, reference in enumerate(cfg.DATASETS.EXEMPLARS, start=1)
        ]
        folder, unlabelled = cfg.DATASETS.OLD_IMAGES, []
        if folder:
            unlabelled.append(read_image_folder(folder, f"{DETECTOR}: old images"))
        for data in (detector, *exemplars, *unlabelled):
            self.train[data.name] = data
        return make_extension(
            detector,
            new,
            refresh=wanted.known == "refresh",
            exemplars=exemplars,
            unlabelled=unlabelled,
        )

    def _by_domain(self, test: dict[str, CocoData]) -> dict[str, CocoData]:
        """The test sets by the names of their domains."""
        domains = [phase.source for phase in self.scenario.phases]
        if len(test) != len(domains):
            raise InputError(
                f"SCENARIO.PROTOCOL domains evaluates each domain by itself: DATASETS.TRAIN has "
                f"{len(domains)} data sets, DATASETS.TEST {len(test)}. Give a test set for each, "
                "in the same order"
            )
        return dict(zip(domains, test.values(), strict=True))

    def _without_use(self) -> list[str]:
        """Pseudo-labels that the method asks for although every object is annotated."""
        method = method_of(self.cfg)
        complete = method.calibrate.complete if method.calibrate is not None else None
        keys = {"METHOD.PSEUDO": method.pseudo, "METHOD.CALIBRATE.COMPLETE": complete}
        if self.scenario.hides_seen(len(self.scenario.phases)):
            return []
        return [
            f"{key} has nothing to label: all classes are annotated in every domain"
            for key, rule in keys.items()
            if rule is not None
        ]

    def _scenario(self) -> Scenario:
        wanted = scenario_settings(self.cfg)
        if wanted.protocol == "domains":
            if len(set(self.cfg.DATASETS.TRAIN)) < len(self.cfg.DATASETS.TRAIN):
                raise InputError("DATASETS.TRAIN has a data set twice: give each domain its own")
            return make_domain_scenario(list(self.train.values()))
        if BASE not in self.train:
            if wanted.published:
                raise InputError(
                    f"scenario {wanted.name} divides one data set, but DATASETS.TRAIN has "
                    f"{len(self.train)}: give one, or set SCENARIO.NAME to class counts to make a "
                    "phase of each"
                )
            return make_separate_scenario(list(self.train.values()))
        phases: str | Sequence[Sequence[str]] = wanted.phases or wanted.name
        own_seeds = wanted.order == "released"
        return make_scenario(
            phases,
            self.train[BASE],
            protocol=wanted.protocol,
            order="id" if wanted.phases else wanted.order,
            class_seed=None if own_seeds else wanted.class_seed,
            data_seed=None if own_seeds else wanted.data_seed,
            partial=wanted.partial,
        )


def _distinct_names(datasets: Sequence[CocoData]) -> list[str]:
    """What to call data sets: their names or, where these agree, the folders that differ.

    `city/train.json` and `fog/train.json` are city and fog.
    """
    paths = [data.json_file.parts[::-1] for data in datasets]
    for names in ([data.name for data in datasets], *zip(*paths, strict=False)):
        if len(set(names)) == len(names):
            return list(names)
    return [f"{data.name} {index}" for index, data in enumerate(datasets, start=1)]
