"""The data of a run: read once, divided by the scenario, handed to each stage as it may see it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detectron2.utils import comm
from torch.utils.data import DataLoader
from tqdm import tqdm

from cldetr.data.audit import audit_scenario
from cldetr.data.cache import cache_folder
from cldetr.data.catalog import register_exemplars, register_views, registered_file
from cldetr.data.coco import CocoData, load_coco
from cldetr.data.exemplars import Context, find_strategy, resolve_budget
from cldetr.data.loader import MappedDataset, SampleOrder, evaluation_loader
from cldetr.data.manifest import check_same, load_manifest, save_manifest
from cldetr.data.mapper import Mapper
from cldetr.data.memory import ExemplarMemory, PhaseExemplars, phase_counts
from cldetr.data.scan import scan_images
from cldetr.data.views import View, evaluation_part, label_table
from cldetr.engine.average_precision import GroundTruth
from cldetr.engine.features import object_features
from cldetr.engine.recipe import Recipe
from cldetr.errors import InputError
from cldetr.files import write_json
from cldetr.methods.method import MemoryRule
from cldetr.modeling.detector import Detector
from cldetr.scenario import BASE, Scenario, make_scenario, make_separate_scenario

logger = logging.getLogger(__name__)


class RunData:
    """Scenario, training and test data of a run."""

    def __init__(self, recipe: Recipe) -> None:
        """Reads the annotation files and divides them by the scenario."""
        self.recipe = recipe
        self.train = self._load(recipe.data.train, trim=True)
        self.test = self._load(recipe.data.test, trim=False)
        self.scenario = self._scenario()
        categories = self.scenario.categories
        self._test_parts = [
            evaluation_part(data, source, categories) for source, data in self.test.items()
        ]
        self._test_view = View(categories, self._test_parts, self.test, name="test")

    def register(self, root: Path) -> None:
        """Registers the views with Detectron2, as `cldetr/<run directory>/phase1` and so on."""
        register_views(self.scenario, self.train, str(root), evaluation=self.test)

    def register_memory(self, root: Path, memory: ExemplarMemory) -> None:
        """Registers E_1:i likewise, as `cldetr/<run directory>/exemplars<i>`."""
        register_exemplars(self.scenario, self.train, str(root), memory.image_ids)

    def check(self, root: Path) -> None:
        """Holds the scenario against the run's manifest, or writes both it and its audit.

        Then looks at the image files.
        """
        manifest = root / "manifest.json"
        if comm.is_main_process():
            if manifest.exists():
                check_same(load_manifest(manifest), self.scenario, f"the run in {root}")
            elif any(root.glob("phase*/*")):
                raise InputError(
                    f"{manifest} is missing: without it nothing tells that the stages in {root} "
                    "saw this data. Restore it, or start in a new OUTPUT_DIR"
                )
            else:
                save_manifest(self.scenario, manifest)
                write_json(root / "audit.json", audit_scenario(self.scenario, self.train))
            if self.recipe.data.scan:
                for data in (*self.train.values(), *self.test.values()):
                    scan_images(data)
        comm.synchronize()

    def train_entries(
        self,
        phase: int,
        memory: ExemplarMemory | None = None,
        joint: bool = False,
        reveal_old: bool = False,
    ) -> View:
        """D_i ∪ E_1:i−1 with the labels of each image's own phase, or what upper bounds see."""
        parts = [self.scenario.phase(phase).part()]
        if joint:
            parts = list(self.scenario.joint(phase))
        elif reveal_old:
            parts = [self.scenario.revealed(phase)]
        if memory is not None:
            parts += self.scenario.exemplars(memory.image_ids)
        return View(self.scenario.categories, parts, self.train, name=f"phase {phase}")

    def exemplar_entries(self, memory: ExemplarMemory, reveal: bool = False) -> View:
        """E_1:i with the labels of each exemplar's own phase, or all true ones for an oracle."""
        parts = self.scenario.exemplars(memory.image_ids, reveal)
        return View(self.scenario.categories, parts, self.train, name="exemplars")

    def select_exemplars(
        self, phase: int, rule: MemoryRule, before: ExemplarMemory, detector: Detector
    ) -> ExemplarMemory:
        """E_1:i from E_1:i−1: chooses the phase's exemplars (Alg. 2)."""
        view = self.train_entries(phase)
        classes = self.scenario.phase(phase).classes
        counts = phase_counts(self.scenario, phase, self.train[self.scenario.phase(phase).source])
        features = None
        if rule.strategy == "herding":
            features = object_features(detector, view, classes, self.recipe.augmentation)
        choose = find_strategy(rule.strategy)
        with tqdm(desc="choosing exemplars", unit="image", leave=False, disable=None) as bar:
            context = Context(self.recipe.seed, features, progress=bar.update)
            selection = choose(counts, rule.budget, context)
        chosen = PhaseExemplars.of(
            self.scenario,
            phase,
            counts,
            selection,
            strategy=rule.strategy,
            budget=rule.budget,
            seed=self.recipe.seed,
        )
        logger.info(
            "phase %d select: %d of %d images by %r%s",
            phase,
            len(chosen.image_ids),
            len(view),
            rule.strategy,
            f", KL {chosen.kl[-1]:.2g}" if chosen.kl and chosen.kl[-1] is not None else "",
        )
        return before.add(chosen)

    def test_entries(self, classes: Sequence[int]) -> View:
        """The test images with the objects of some classes."""
        parts = [
            dataclasses.replace(part, classes=tuple(x for x in part.classes if x in classes))
            for part in self._test_parts
        ]
        return View(self.scenario.categories, parts, self.test, name="test")

    def test_loader(self) -> DataLoader:
        """The test images in order, each process its share."""
        mapped = MappedDataset(self._test_view, Mapper(self.recipe.augmentation, training=False))
        return evaluation_loader(mapped, self.recipe.runtime.workers)

    def ground_truth(self) -> GroundTruth:
        """The test objects under the scenario's labels, of all test sets together."""
        categories = self.scenario.categories
        every = range(len(categories))
        return GroundTruth.join(
            [
                GroundTruth.from_coco(data, label_table(data, categories, every), source)
                for source, data in self.test.items()
            ]
        )

    def describe(self, phase: int, stage: str) -> dict[str, Any]:
        """What a weights file says about itself."""
        categories = self.scenario.categories
        return {
            "format": 1,
            "categories": [{"id": c.id, "name": c.name} for c in categories],
            "seen": [categories[label].name for label in self.scenario.seen(phase)],
            "scenario": self.scenario.name,
            "phase": phase,
            "stage": stage,
            # With these the file is all that prediction needs.
            "model": self.recipe.model.description,
            "augmentation": dataclasses.asdict(self.recipe.augmentation),
        }

    def planned_steps(self) -> list[tuple[int, str, int]]:
        """Every training stage of the run with its steps, as far as they are known beforehand.

        The number of exemplars is the budget's; a strategy may end up with fewer.
        """
        recipe, plan, exemplars = self.recipe, [], 0
        for phase in self.scenario.phases:
            images = len(phase.image_ids)
            if recipe.method.joint:
                images = sum(len(part.image_ids) for part in self.scenario.joint(phase.index))
            memory = recipe.method.memory
            if memory is not None and memory.replay:
                images += exemplars
            stage = recipe.schedule.first if phase.index == 1 else recipe.schedule.train
            if phase.index > 1 or not recipe.model.detector:
                plan.append((phase.index, "train", stage.steps(self._per_epoch(images))))
            if memory is not None:
                budget = resolve_budget(memory.budget, len(phase.image_ids))
                exemplars += min(budget, len(phase.image_ids))
            if recipe.method.calibrate is not None and phase.index > 1:
                steps = recipe.schedule.calibrate.steps(self._per_epoch(exemplars))
                plan.append((phase.index, "calibrate", steps))
        return plan

    def _per_epoch(self, images: int) -> int:
        return SampleOrder(images, self.recipe.optimizer.batch, seed=(0,)).steps_per_epoch

    def _load(self, references: Sequence[str], trim: bool) -> dict[str, CocoData]:
        """Reads data sets by source: a single one is the base, several go by their names."""
        if not references:
            raise InputError("no data set is given: set DATASETS.TRAIN and DATASETS.TEST")
        loaded = []
        for reference in references:
            json_file, image_root = locate(reference)
            loaded.append(
                load_coco(
                    json_file,
                    image_root,
                    bad_boxes=self.recipe.data.bad_boxes,
                    trim=trim,
                    cache_dir=cache_folder(json_file),
                )
            )
        return {BASE: loaded[0]} if len(loaded) == 1 else {data.name: data for data in loaded}

    def _scenario(self) -> Scenario:
        wanted = self.recipe.scenario
        if BASE not in self.train:
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
        )


def locate(reference: str) -> tuple[str, str]:
    """The annotation file and image folder of a reference (see `DataSettings.train`)."""
    head, mark, folder = reference.partition(".json:")
    if mark:
        return f"{head}.json", folder
    file = registered_file(reference)
    return file.json_file, file.image_root
