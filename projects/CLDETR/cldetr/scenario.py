"""Scenarios: which classes and which images each phase of incremental training sees.

A class's *label* is its place in `Scenario.categories`, and it keeps that place for ever: labels
are what data sets, heads and checkpoints use. Categories stand in ascending id order for one base
data set (Detectron2's contiguous ids) and in order of arrival for phases from separate data sets.

Shuffles use `numpy.random.RandomState`: NumPy has frozen its streams for good, while those of the
newer `Generator` may change between versions, and with them every split. It is also what the
released code draws from, so its orders are those of seed 123 here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cldetr.errors import InputError
from cldetr.grouping import (
    Annotations,
    Category,
    class_order,
    named_groups,
    parse_sizes,
    random_state,
)

Protocol = Literal["strict", "traditional", "separate"]

BASE = "base"  # the source of every phase that is cut from one data set
RELEASED_SEED = 123

# Named settings of `make_scenario`. `paper`: Sec. 4.1, to be repeated over seeds. `released`: the
# authors' code. `erd`: the splits of earlier work, used in supplement A and in Fig. 4.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"protocol": "strict", "order": "seed"},
    "released": {"protocol": "strict", "order": "released"},
    "erd": {"protocol": "traditional", "order": "id"},
}


@dataclass(frozen=True)
class Part:
    """Images of one source with the labels that are annotated in them: what a view is made of."""

    source: str
    image_ids: tuple[int, ...]
    classes: tuple[int, ...]
    phase: int  # whose annotations these are; 0 where they are of several phases


@dataclass(frozen=True)
class Phase:
    """One phase: the classes C_i annotated in it and the images D_i that it sees."""

    index: int  # from 1, as the paper counts
    classes: tuple[int, ...]  # labels of C_i, in the order of the scenario's class order
    image_ids: tuple[int, ...]  # in the order drawn (strict) or in file order
    source: str = BASE  # which data set the images come from

    def part(self) -> Part:
        """D_i with annotations of C_i."""
        return Part(self.source, self.image_ids, self.classes, self.index)


@dataclass(frozen=True)
class Scenario:
    """All phases over a list of categories, with what is needed to make them again."""

    name: str  # as people say it: "70+10"
    protocol: Protocol
    categories: tuple[Category, ...]  # a class's label is its place here
    phases: tuple[Phase, ...]
    order: str  # "id", "seed", "released" or "list"
    class_seed: int | None
    data_seed: int | None
    fingerprints: tuple[tuple[str, str], ...]  # (source, fingerprint of its annotation file)

    def phase(self, index: int) -> Phase:
        """Phase number `index`, from 1."""
        if not 1 <= index <= len(self.phases):
            raise IndexError(f"{self.name} has phases 1 to {len(self.phases)}, not {index}")
        return self.phases[index - 1]

    def seen(self, index: int) -> tuple[int, ...]:
        """Labels of C_1 ∪ … ∪ C_index."""
        return tuple(label for phase in self.phases[:index] for label in phase.classes)

    def old(self, index: int) -> tuple[int, ...]:
        """Labels seen before phase `index`."""
        return self.seen(index - 1)

    def future(self, index: int) -> tuple[int, ...]:
        """Labels of the phases after `index`."""
        return tuple(label for phase in self.phases[index:] for label in phase.classes)

    def joint(self, index: int | None = None) -> tuple[Part, ...]:
        """The upper bound at phase `index` (the last by default), one part per source.

        All images of phases 1 to `index`, each once, with all classes seen so far annotated.
        """
        last = len(self.phases) if index is None else self.phase(index).index
        images: dict[str, dict[int, None]] = {}  # dictionaries keep the order and drop repeats
        for phase in self.phases[:last]:
            images.setdefault(phase.source, {}).update(dict.fromkeys(phase.image_ids))
        classes = self.seen(last)
        return tuple(Part(source, tuple(ids), classes, 0) for source, ids in images.items())

    def revealed(self, index: int) -> Part:
        """D_i with annotations of all classes seen so far: what the KD-oracle trains on."""
        phase = self.phase(index)
        return Part(phase.source, phase.image_ids, self.seen(index), 0)

    def exemplars(
        self, image_ids: Mapping[int, Sequence[int]], reveal: bool = False
    ) -> tuple[Part, ...]:
        """E_1 ∪ E_2 ∪ …: exemplars by phase, each with the classes of its own phase.

        Args:
            image_ids: phase index → the image ids of its exemplars, all of them in D_index.
            reveal: with all classes seen in these phases instead, which no method may know.
        """
        seen = self.seen(max(image_ids, default=1))
        parts, problems = [], []
        for index, ids in sorted(image_ids.items()):
            phase = self.phase(index)
            chosen = tuple(int(image) for image in ids)
            strangers = set(chosen) - set(phase.image_ids)
            problems += [
                f"image {image} is not in phase {index}" for image in chosen if image in strangers
            ]
            own = Part(phase.source, chosen, phase.classes, index)
            parts.append(Part(phase.source, chosen, seen, 0) if reveal else own)
        if problems:
            raise InputError.listing(
                f"{len(problems)} exemplars do not belong to scenario {self.name}; use the memory "
                "that was chosen with this scenario's manifest:",
                problems,
                most=10,
            )
        return tuple(parts)


def make_scenario(
    phases: str | Sequence[Sequence[str | int]],
    data: Annotations,
    *,
    protocol: str = "strict",
    order: str | Sequence[str | int] = "id",
    class_seed: int | None = None,
    data_seed: int | None = None,
    partial: bool = False,
) -> Scenario:
    """Divides a data set's categories and images into phases.

    Strict (Sec. 3.1): the images are shuffled by `data_seed` over their order in the file and cut
    into consecutive shares in proportion to the phases' class counts. For A+B that is A/(A+B) and
    B/(A+B), for 40+X×Y of 80 classes one half and then 1/(2Y) each: the paper's shares. Cuts are at
    ⌊images · classes so far / all classes⌋, so every image is in exactly one phase, images without
    annotations among them. Traditional (supplement A): a phase has every image with at least one
    object of its classes, crowd regions included; `data_seed` plays no part.

    The order `released` is what the authors' code does: both shuffles from seed 123 whatever seeds
    are given, and a phase of B of A+B classes gets ⌊images · B / (A+B)⌋, so that the last images of
    the shuffle may be lost (one of COCO's). That code further skips images without any annotation
    at all when it trains, and has two phases; here such images stay and more phases are cut alike.

    Args:
        phases: sizes as people say them ("70+10", "40+20x2", "15+1+1"), or the category names (or
            ids) of each phase.
        data: the data set to divide.
        protocol: "strict" or "traditional".
        order: of the classes, where `phases` gives sizes: "id" (ascending, as in ERD), "seed" (a
            shuffle by `class_seed`), "released", or a list of all names or ids. Phases given by
            name have their own.
        class_seed: of the order "seed"; 0 by default.
        data_seed: of the images in the strict protocol; 0 by default.
        partial: allow categories that no phase learns.
    """
    if protocol not in ("strict", "traditional"):
        raise InputError(f"protocol {protocol!r} is unknown: choose strict or traditional")
    released = isinstance(phases, str) and order == "released"
    if released:
        class_seed = data_seed = RELEASED_SEED
    if isinstance(phases, str):
        sizes, name = parse_sizes(phases, data, partial)
        labels = class_order(order, data, 0 if class_seed is None else class_seed)
        groups = [
            labels[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)
        ]
        order = order if isinstance(order, str) else "list"
    else:
        groups = named_groups(phases, data, partial)
        name, order = "+".join(str(len(group)) for group in groups), "list"

    if protocol == "traditional":
        data_seed = None
        numbers = [images_with(data, group) for group in groups]
    else:
        data_seed = 0 if data_seed is None else data_seed
        numbers = _cut([len(group) for group in groups], len(data.image_ids), data_seed, released)
    _refuse_empty(numbers, groups, data, protocol)
    return Scenario(
        name=name,
        protocol="strict" if protocol == "strict" else "traditional",
        categories=data.categories,
        phases=tuple(
            Phase(index, tuple(group), tuple(data.image_ids[chosen].tolist()))
            for index, (group, chosen) in enumerate(zip(groups, numbers, strict=True), start=1)
        ),
        order=order,
        class_seed=(class_seed or 0) if order in ("seed", "released") else None,
        data_seed=data_seed,
        fingerprints=((BASE, data.fingerprint),),
    )


def make_separate_scenario(datasets: Sequence[Annotations]) -> Scenario:
    """Makes one phase of each data set, in the order given, as when new categories arrive.

    Categories are matched by name. A category arrives with the first data set that has an object of
    it (where none has, with the first that lists it), and is learnt in that phase alone: later
    objects of it stay unannotated, as Sec. 3.1 has it, and the audit counts them. New categories
    take the next labels in ascending order of their ids; their ids in the scenario are label + 1,
    because the ids of separate files may collide.
    """
    problems = _separate_problems(datasets)
    listed: dict[str, int] = {}
    arrival: dict[str, int] = {}
    for place, data in enumerate(datasets):
        present = np.bincount(data.labels, minlength=len(data.categories)) > 0
        for category, has_objects in zip(data.categories, present, strict=True):
            listed.setdefault(category.name, place)
            if has_objects:
                arrival.setdefault(category.name, place)
    arrival = {name: arrival.get(name, place) for name, place in listed.items()}
    categories: list[Category] = []
    phases = []
    for place, data in enumerate(datasets):
        names = [category.name for category in data.categories if arrival[category.name] == place]
        if not names:
            problems.append(
                f"{data.name} brings no new category: add its images to the phase that knows them"
            )
        first = len(categories)
        categories += [Category(first + i + 1, name) for i, name in enumerate(names)]
        classes = tuple(range(first, len(categories)))
        phases.append(Phase(place + 1, classes, tuple(data.image_ids.tolist()), data.name))
    if problems:
        raise InputError.listing("these data sets do not make a scenario:", problems)
    return Scenario(
        name="+".join(str(len(phase.classes)) for phase in phases),
        protocol="separate",
        categories=tuple(categories),
        phases=tuple(phases),
        order="list",
        class_seed=None,
        data_seed=None,
        fingerprints=tuple((data.name, data.fingerprint) for data in datasets),
    )


def images_with(data: Annotations, labels: Sequence[int]) -> np.ndarray:
    """Numbers (places in the file) of the images with an object of `labels`, crowd included."""
    wanted = np.zeros(len(data.categories), dtype=bool)
    wanted[list(labels)] = True
    owners = np.repeat(np.arange(len(data.image_ids)), np.diff(data.starts))  # (N,)
    return np.unique(owners[wanted[data.labels]])


def _cut(sizes: Sequence[int], images: int, seed: int, released: bool) -> list[np.ndarray]:
    """Shuffles image numbers and cuts them in proportion to `sizes`, in integers (no rounding)."""
    shuffled = np.arange(images)
    random_state(seed).shuffle(shuffled)
    total = sum(sizes)
    if released:
        ends = np.cumsum([images * size // total for size in sizes])
    else:
        ends = np.array([images * int(so_far) // total for so_far in np.cumsum(sizes)])
    return np.split(shuffled, ends)[: len(sizes)]


def _refuse_empty(
    numbers: Sequence[np.ndarray], groups: Sequence[Sequence[int]], data: Annotations, protocol: str
) -> None:
    empty = [
        f"phase {index} ({len(group)} classes, {data.categories[group[0]].name} …) gets no image"
        for index, (chosen, group) in enumerate(zip(numbers, groups, strict=True), start=1)
        if len(chosen) == 0
    ]
    if empty:
        why = "no object of its classes" if protocol == "traditional" else "too few images"
        raise InputError.listing(
            f"{data.name} has {len(data.image_ids)} images; {why} for these phases:", empty
        )


def _separate_problems(datasets: Sequence[Annotations]) -> list[str]:
    problems = [] if datasets else ["no data set was given"]
    names: dict[str, int] = {}
    contents: dict[str, str] = {}
    spellings: dict[str, tuple[str, str]] = {}
    for place, data in enumerate(datasets, start=1):
        if data.name in names:
            problems.append(f"data sets {names[data.name]} and {place} are both named {data.name}")
        elif data.fingerprint in contents:
            problems.append(f"{data.name} and {contents[data.fingerprint]} are the same file")
        if len(data.image_ids) == 0:
            problems.append(f"{data.name} has no image")
        names.setdefault(data.name, place)
        contents.setdefault(data.fingerprint, data.name)
        for category in data.categories:
            # "Cat" and "cat " would quietly become two classes.
            known, where = spellings.setdefault(
                " ".join(category.name.split()).casefold(), (category.name, data.name)
            )
            if known != category.name:
                problems.append(
                    f"{data.name} says {category.name!r} where {where} says {known!r}: spell a "
                    "category in one way, or give different ones different names"
                )
    return problems
