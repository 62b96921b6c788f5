"""The exemplar memory E_1:i: which images of each phase are kept, and how they were chosen.

On disk it is a folder of readable files:

    memory.json              ids in order of choice, KL after each, counts per class, budget, seed
    exemplars_phase1.json    the exemplars of phase 1 as a COCO file, with that phase's classes only
    exemplars_given1.json    exemplars of an earlier run that came with the detector, where any did

`memory.json` is written last. It holds the digests of the other files and a hash of itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.sparse import csr_array

from cldetr.data.coco import CocoData, label_table
from cldetr.data.coco_writer import write_subset
from cldetr.data.exemplars import Selection
from cldetr.errors import InputError
from cldetr.files import read_sealed, sha256_file, write_sealed
from cldetr.scenario import AnnotatedSubset, Category, Scenario

FORMAT = 1
MEMORY_FILE = "memory.json"
_MAX_LISTED = 10  # differences named in a message; the rest is counted


@dataclass(frozen=True)
class ClassRecord:
    """One class of a phase and its objects, without crowd regions."""

    label: int
    name: str
    objects_in_data: int
    objects_in_exemplars: int


@dataclass(frozen=True)
class PhaseExemplars:
    """E_i and the record of its choice."""

    index: int
    source: str
    strategy: str
    note: str
    seed: int | None
    budget: int | float  # as it was given
    wanted: int  # R_i, what the budget came to
    shortfall: int  # images fewer than wanted
    classes: tuple[ClassRecord, ...]  # that are annotated: C_i, and old ones that it refreshes
    data_images: tuple[int, ...]  # images of D_i that hold 0, 1, 2, … objects of C_i
    exemplar_images: tuple[int, ...]  # the same of E_i
    image_ids: tuple[int, ...]  # in order of choice
    kl: tuple[float | None, ...]  # KL(p_D ‖ p_E) after each choice; None while a class is missing

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        index: int,
        counts: csr_array,
        selection: Selection,
        *,
        strategy: str,
        budget: float,
        seed: int | None = None,
    ) -> PhaseExemplars:
        """Records what was selected from `counts`, the counts of phase `index`."""
        phase = scenario.phase(index)
        chosen = counts[selection.indices]
        in_data, in_exemplars = counts.sum(axis=0).tolist(), chosen.sum(axis=0).tolist()
        return cls(
            index=index,
            source=phase.source,
            strategy=strategy,
            note=selection.note,
            seed=seed,
            budget=budget,
            wanted=selection.budget,
            shortfall=selection.shortfall,
            classes=tuple(
                ClassRecord(label, scenario.categories[label].name, in_data[c], in_exemplars[c])
                for c, label in enumerate(phase.annotated)
            ),
            data_images=tuple(np.bincount(counts.sum(axis=1)).tolist()),
            exemplar_images=tuple(np.bincount(chosen.sum(axis=1)).tolist()),
            image_ids=tuple(phase.image_ids[index] for index in selection.indices),
            kl=tuple(value if math.isfinite(value) else None for value in selection.kl.tolist()),
        )

    def subset(self) -> AnnotatedSubset:
        """E_i with its annotations."""
        labels = tuple(record.label for record in self.classes)
        return AnnotatedSubset(self.source, self.image_ids, labels, self.index)


@dataclass(frozen=True)
class ExemplarMemory:
    """E_1:i = E_1 ∪ … ∪ E_i, over the categories and data sets of a scenario."""

    categories: tuple[Category, ...]  # a label is an index of this list
    fingerprints: tuple[tuple[str, str], ...]  # (source, fingerprint of its annotation file)
    phases: tuple[PhaseExemplars, ...]

    @classmethod
    def empty(cls, scenario: Scenario) -> ExemplarMemory:
        """The memory before the first phase."""
        return cls(scenario.categories, scenario.fingerprints, ())

    def add(self, phase: PhaseExemplars) -> ExemplarMemory:
        """E_1:i from E_1:i−1 and E_i (Algorithm 2, last line)."""
        if phase.index != len(self.phases) + 1:
            raise ValueError(f"phase {phase.index} cannot follow phase {len(self.phases)}")
        return replace(self, phases=(*self.phases, phase))

    @property
    def image_ids(self) -> dict[int, tuple[int, ...]]:
        """Phase index → image ids in order of choice: what `Scenario.exemplars` takes."""
        return {phase.index: phase.image_ids for phase in self.phases}

    def save(
        self,
        folder: str | os.PathLike[str],
        data: Mapping[str, CocoData],
        given: Sequence[AnnotatedSubset] = (),
    ) -> list[Path]:
        """Writes the memory and its COCO files; returns the files, the memory last.

        Args:
            folder: where to.
            data: the data sets by source.
            given: exemplars that came with the detector of the first phase.
        """
        folder = Path(folder)
        subsets = {f"phase{phase.index}": phase.subset() for phase in self.phases}
        subsets |= {f"given{index}": subset for index, subset in enumerate(given, start=1)}
        files = []
        for name, subset in subsets.items():
            files.append(folder / f"exemplars_{name}.json")
            source = data[subset.source]
            write_subset(files[-1], subset, source, self.categories)
        self.write(folder / MEMORY_FILE, {file.name: sha256_file(file) for file in files})
        return [*files, folder / MEMORY_FILE]

    def write(self, path: str | os.PathLike[str], files: Mapping[str, str] | None = None) -> None:
        """Writes the memory alone, atomically; `files` are digests of others in its folder."""
        content = {"format": FORMAT, "files": dict(files or {}), **msgspec.to_builtins(self)}
        for phase, stored in zip(self.phases, content["phases"], strict=True):
            stored["objects_per_image"] = {  # for the reader: it follows from the rest
                "data": objects_per_image(phase.data_images),
                "exemplars": objects_per_image(phase.exemplar_images),
            }
        write_sealed(path, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ExemplarMemory:
        """Reads a memory from its folder or its file; where anything was changed, it is refused."""
        path = Path(path)
        path = path / MEMORY_FILE if path.is_dir() else path
        fix = "restore it, or take the one that a run's select stage or `cldetr exemplars` wrote"
        content = read_sealed(path, "exemplar memory", FORMAT, fix)
        try:
            memory = msgspec.convert(content, cls)
            files = msgspec.convert(content.get("files"), dict[str, str])
        except msgspec.ValidationError as error:
            raise InputError(f"{path} is not a valid exemplar memory ({error}): {fix}") from None
        for name, digest in files.items():
            file = path.parent / Path(name).name
            if not file.is_file() or sha256_file(file) != digest:
                state = "was changed after it was written" if file.exists() else "is missing"
                raise InputError(f"{file}, a part of the memory {path}, {state}: {fix}")
        return memory

    def check(self, scenario: Scenario, data: Mapping[str, CocoData]) -> None:
        """Stops where the memory does not fit the scenario and the data it is to be used with."""
        found = [*_scenario_differences(self, scenario), *_data_differences(self, data)]
        if not found:
            for phase in self.phases:
                found += _count_differences(phase, scenario, data[phase.source])
        if found:
            raise InputError.listing(
                f"the exemplar memory does not fit scenario {scenario.name} ({len(found)} "
                "differences); use the one that was chosen for it, or choose exemplars again:",
                found,
                limit=_MAX_LISTED,
            )


def exemplar_references(folder: Path) -> list[str]:
    """Data references, FILE.json:IMAGE_FOLDER, of the exemplars that a memory's folder holds."""
    references = []
    for path in sorted(folder.glob("exemplars_*.json")):
        try:
            content = msgspec.json.decode(path.read_bytes(), type=_ExemplarFile)
        except (OSError, msgspec.MsgspecError) as error:
            raise InputError(
                f"{path} does not say where its images are ({error}): give it as a data set, "
                f"DATASETS.EXEMPLARS \"['{path}:IMAGE_FOLDER']\""
            ) from None
        if content.images:
            references.append(f"{path}:{content.info.image_root}")
    return references


class _Info(msgspec.Struct):
    image_root: str


class _ExemplarFile(msgspec.Struct):
    info: _Info
    images: list[Any]


def phase_counts(scenario: Scenario, index: int, data: CocoData) -> csr_array:
    """Counts the objects of C_i in the images of D_i; crowd regions are not training targets."""
    phase = scenario.phase(index)
    own = [scenario.categories[label] for label in phase.annotated]
    order = np.full(len(data.image_ids), -1)  # index of each image in the phase
    order[data.indices_of(phase.image_ids)] = np.arange(len(phase.image_ids))
    images = np.repeat(order, np.diff(data.starts))  # (N,)
    labels = label_table(data, own, range(len(own)))[data.labels]  # (N,)
    kept = (images >= 0) & (labels >= 0) & ~data.crowd
    ones, shape = np.ones(kept.sum(), np.int64), (len(phase.image_ids), len(own))
    return csr_array((ones, (images[kept], labels[kept])), shape=shape)


def objects_per_image(images: tuple[int, ...]) -> float | None:
    """Mean number of objects over the images that hold any, from images with 0, 1, 2, … objects."""
    labelled = sum(images[1:])
    return sum(n * count for n, count in enumerate(images)) / labelled if labelled else None


def _scenario_differences(memory: ExemplarMemory, scenario: Scenario) -> Iterator[str]:
    pairs = zip_longest(memory.categories, scenario.categories)
    for label, (before, now) in enumerate(pairs):
        if before != now:
            yield f"label {label} is {before} in the memory, {now} in the scenario"
    for phase in memory.phases:
        if phase.index > len(scenario.phases):
            yield f"phase {phase.index} is not in the scenario"
            continue
        stored, current = phase.subset(), scenario.phase(phase.index).subset()
        for key in ("classes", "source"):
            before, now = getattr(stored, key), getattr(current, key)
            if before != now:
                yield f"phase {phase.index}: {key} {before!r} in the memory, here {now!r}"
        known = set(current.image_ids)
        for image in stored.image_ids:
            if image not in known:
                yield f"exemplar {image} of phase {phase.index} is not an image of that phase"


def _data_differences(memory: ExemplarMemory, sources: Mapping[str, CocoData]) -> Iterator[str]:
    for source, fingerprint in memory.fingerprints:
        if source not in sources:
            yield f"data set {source!r} is missing"
        elif (current := sources[source].fingerprint) != fingerprint:
            yield (
                f"the annotation file of data set {source!r} is {current[:12]}…, the memory was "
                f"chosen from {fingerprint[:12]}…"
            )


def _count_differences(phase: PhaseExemplars, scenario: Scenario, data: CocoData) -> Iterator[str]:
    counts = phase_counts(scenario, phase.index, data)
    chosen = np.isin(scenario.phase(phase.index).image_ids, phase.image_ids)
    in_exemplars = counts[np.flatnonzero(chosen)].sum(axis=0).tolist()
    totals = zip(counts.sum(axis=0).tolist(), in_exemplars, strict=True)
    for record, (objects, kept) in zip(phase.classes, totals, strict=True):
        if (record.objects_in_data, record.objects_in_exemplars) != (objects, kept):
            yield (
                f"phase {phase.index} has {objects} objects of {record.name!r}, {kept} of them in "
                f"exemplars; the memory says {record.objects_in_data} and "
                f"{record.objects_in_exemplars}"
            )
