"""Scenarios: which classes and which images each phase of incremental training sees.

A class's *label* is its index in `Scenario.categories`, and it never changes: labels are what data
sets, heads and checkpoints use. Categories are in ascending id order for one base
data set (Detectron2's contiguous ids) and in order of arrival for phases from separate data sets.

Shuffles use `numpy.random.RandomState`: NumPy has frozen its streams for good, while those of the
newer `Generator` may change between versions, and with them every split. It is also what the
released code draws from, so its orders are those of seed 123 here.
"""

from __future__ import annotations

import difflib
import itertools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np

from cldetr.errors import InputError
from cldetr.grouping import Annotations, Category, random_state, resolve_phases
from cldetr.published import check_published, is_published

Protocol = Literal["strict", "traditional", "loco", "separate", "extend", "domains"]

BASE = "base"  # the source of every phase that is cut from one data set
DETECTOR = (
    "the detector"  # the source of a first phase that is a trained detector: it has no images
)
RELEASED_SEED = 123
LOCO_SEED = 42


@dataclass(frozen=True)
class AnnotatedSubset:
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
    refreshed: tuple[int, ...] = ()  # labels of old classes that are annotated in D_i, too

    @property
    def annotated(self) -> tuple[int, ...]:
        """Labels whose objects are annotated in D_i: C_i and the old classes it refreshes."""
        return (*self.classes, *self.refreshed)

    @property
    def taught(self) -> tuple[int, ...]:
        """Labels that the phase is about: C_i, or all annotated ones where it is a new domain."""
        return self.classes or self.refreshed

    def subset(self) -> AnnotatedSubset:
        """D_i with its annotations."""
        return AnnotatedSubset(self.source, self.image_ids, self.annotated, self.index)


@dataclass(frozen=True)
class Scenario:
    """All phases over a list of categories, with what is needed to make them again."""

    name: str  # as people say it: "70+10"
    protocol: Protocol
    categories: tuple[Category, ...]  # a class's label is its index here
    phases: tuple[Phase, ...]
    order: str  # "id", "seed", "released", a published order such as "psedet", or "list"
    class_seed: int | None
    data_seed: int | None
    fingerprints: tuple[tuple[str, str], ...]  # (source, fingerprint of its annotation file)
    # Images that came with the detector of the first phase: exemplars of earlier runs with the
    # labels annotated in them, and unlabelled ones with none.
    given: tuple[AnnotatedSubset, ...] = ()

    def phase(self, index: int) -> Phase:
        """The phase with this index, from 1."""
        if not 1 <= index <= len(self.phases):
            raise IndexError(f"{self.name} has phases 1 to {len(self.phases)}, not {index}")
        return self.phases[index - 1]

    def seen(self, index: int) -> tuple[int, ...]:
        """Labels of C_1 ∪ … ∪ C_index."""
        return tuple(label for phase in self.phases[:index] for label in phase.classes)

    def old(self, index: int) -> tuple[int, ...]:
        """Labels seen before phase `index`."""
        return self.seen(index - 1)

    def hides_seen(self, index: int) -> bool:
        """Whether an image of phases 1 to `index` may show a class seen by then unannotated.

        It is so wherever classes arrive phase by phase. In domains that annotate all classes there
        is nothing to pseudo-label.
        """
        seen = set(self.seen(index))
        return any(seen - set(phase.annotated) for phase in self.phases[:index])

    def future(self, index: int) -> tuple[int, ...]:
        """Labels of the phases after `index`."""
        return tuple(label for phase in self.phases[index:] for label in phase.classes)

    def joint(self, index: int | None = None) -> tuple[AnnotatedSubset, ...]:
        """The upper bound at phase `index` (the last by default), one subset per source.

        All images of phases 1 to `index`, each once, with all classes seen so far annotated.
        """
        last = len(self.phases) if index is None else self.phase(index).index
        images: dict[str, dict[int, None]] = {}  # dictionaries keep the order and drop repeats
        for phase in self.phases[:last]:
            images.setdefault(phase.source, {}).update(dict.fromkeys(phase.image_ids))
        classes = self.seen(last)
        return tuple(
            AnnotatedSubset(source, tuple(ids), classes, 0) for source, ids in images.items()
        )

    def revealed(self, index: int) -> AnnotatedSubset:
        """D_i with annotations of all classes seen so far: what the KD-oracle trains on."""
        phase = self.phase(index)
        return AnnotatedSubset(phase.source, phase.image_ids, self.seen(index), 0)

    def exemplars(
        self, image_ids: Mapping[int, Sequence[int]], reveal: bool = False
    ) -> tuple[AnnotatedSubset, ...]:
        """E_1 ∪ E_2 ∪ …: exemplars by phase, each with the classes of its own phase.

        Those that came with the detector of the first phase are the first.

        Args:
            image_ids: phase index → the image ids of its exemplars, all of them in D_index.
            reveal: with all classes seen in these phases instead, which no method may know.
        """
        seen = self.seen(max(image_ids, default=1))
        subsets = [subset for subset in self.given if subset.classes]
        problems = []
        for index, ids in sorted(image_ids.items()):
            phase, chosen = self.phase(index), tuple(map(int, ids))
            known = set(phase.image_ids)
            problems += [f"image {i} is not in phase {index}" for i in chosen if i not in known]
            classes, whose = (seen, 0) if reveal else (phase.annotated, index)
            subsets.append(AnnotatedSubset(phase.source, chosen, classes, whose))
        if problems:
            raise InputError.listing(
                f"{len(problems)} exemplars do not belong to scenario {self.name}; use the memory "
                "that was chosen with this scenario's manifest:",
                problems,
                limit=10,
            )
        return tuple(subsets)

    def unlabelled(self) -> tuple[AnnotatedSubset, ...]:
        """Images that came with the detector of the first phase without any label."""
        return tuple(subset for subset in self.given if not subset.classes)


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
    the shuffle may be lost (one of COCO's). That code has two phases; here more are cut alike. It
    trains without the images that have no annotation of any class, as
    DATALOADER.FILTER_EMPTY_ANNOTATIONS does.

    LoCo (LoCo-COCO): every image with objects is in one phase, drawn among those of its objects;
    images without objects are in none.

    Args:
        phases: sizes as people say them ("70+10", "40+20x2", "15+1+1"), a published scenario
            ("voc/19+1"), or the category names (or ids) of each phase.
        data: the data set to divide.
        protocol: "strict", "traditional" or "loco".
        order: of the classes, where `phases` gives sizes: "id" (ascending, as in ERD), "seed" (a
            shuffle by `class_seed`), "released", a published one ("psedet"), or a list of all names
            or ids. Phases given by name have their own.
        class_seed: of the order "seed"; 0 by default.
        data_seed: of the images in the strict protocol; 0 by default.
        partial: allow categories that no phase learns.
    """
    if protocol not in ("strict", "traditional", "loco"):
        raise InputError(f"protocol {protocol!r} is unknown: choose strict, traditional or loco")
    if isinstance(phases, str) and is_published(phases):
        check_published(phases, protocol, order)
    released = isinstance(phases, str) and order == "released"
    if released:
        class_seed = data_seed = RELEASED_SEED
    groups, name = resolve_phases(phases, order, data, class_seed or 0, partial)
    by_name = not isinstance(phases, str) or not isinstance(order, str) or is_published(phases)
    shuffled = not by_name and order in ("seed", "released")
    if protocol == "traditional":
        data_seed, indices = None, [images_with(data, group) for group in groups]
    elif protocol == "loco":
        data_seed, indices = LOCO_SEED, _draw_phases(data, groups)
    else:
        data_seed = data_seed or 0
        indices = _cut([len(group) for group in groups], len(data.image_ids), data_seed, released)
    return Scenario(
        name=name,
        protocol=cast(Protocol, protocol),
        categories=data.categories,
        phases=_make_phases(data, groups, indices, protocol),
        order="list" if by_name else str(order),
        class_seed=class_seed or 0 if shuffled else None,
        data_seed=data_seed,
        fingerprints=((BASE, data.fingerprint),),
    )


def _make_phases(
    data: Annotations,
    groups: Sequence[Sequence[int]],
    indices: Sequence[np.ndarray],
    protocol: str,
) -> tuple[Phase, ...]:
    """Phases of labels and indices of images; one without an image is refused."""
    made = tuple(
        Phase(index, tuple(group), tuple(data.image_ids[chosen].tolist()))
        for index, (group, chosen) in enumerate(zip(groups, indices, strict=True), start=1)
    )
    empty = [
        f"phase {phase.index} ({len(phase.classes)} classes, "
        f"{data.categories[phase.classes[0]].name} …) gets no image"
        for phase in made
        if not phase.image_ids
    ]
    if empty:
        why = "too few images" if protocol == "strict" else "no object of its classes"
        raise InputError.listing(
            f"{data.name} has {len(data.image_ids)} images; {why} for these phases:", empty
        )
    return made


def make_separate_scenario(datasets: Sequence[Annotations]) -> Scenario:
    """Makes one phase of each data set, in the order given, as when new categories arrive.

    Categories are matched by name. A category arrives with the first data set that has an object of
    it (where none has, with the first that lists it), and is learnt in that phase alone: later
    objects of it stay unannotated, as Sec. 3.1 has it, and the audit counts them. New categories
    take the next labels in ascending order of their ids; their ids in the scenario are label + 1,
    because the ids of separate files may collide.
    """
    problems = _separate_problems(datasets)
    listed: dict[str, int] = {}  # category name → the first data set that lists it
    shown: dict[str, int] = {}  # and the first that has an object of it
    for index, data in enumerate(datasets):
        present = np.bincount(data.labels, minlength=len(data.categories)) > 0
        for category, has_objects in zip(data.categories, present, strict=True):
            listed.setdefault(category.name, index)
            if has_objects:
                shown.setdefault(category.name, index)
    arrival = {**listed, **shown}
    categories: list[Category] = []
    phases = []
    for index, data in enumerate(datasets):
        names = [category.name for category in data.categories if arrival[category.name] == index]
        if not names:
            problems.append(
                f"{data.name} brings no new category: add its images to the phase that knows them, "
                "or set SCENARIO.PROTOCOL to domains where it is a new domain"
            )
        first = len(categories)
        categories += [Category(first + i + 1, name) for i, name in enumerate(names)]
        classes = tuple(range(first, len(categories)))
        phases.append(Phase(index + 1, classes, tuple(data.image_ids.tolist()), data.name))
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


def make_domain_scenario(datasets: Sequence[Annotations]) -> Scenario:
    """Makes one phase of each data set: the same categories in images of another kind, a domain.

    Categories are matched by name; labels and ids are those of the first data set, whose phase
    learns them all. Later domains bring no new class. They annotate all categories that they list,
    which may be fewer.
    """
    problems = _separate_problems(datasets, same_content=True)
    if len(datasets) < 2:
        problems.append("a single domain is ordinary training: give a data set for each domain")
    categories = datasets[0].categories if datasets else ()
    labels = {category.name: label for label, category in enumerate(categories)}
    phases: list[Phase] = []
    for index, data in enumerate(datasets, start=1):
        names = [category.name for category in data.categories]
        if new := [name for name in names if name not in labels]:
            problems.append(
                f"{data.name} has {_some(new)}, unknown to {datasets[0].name}: domains have the "
                "same categories. To learn new ones, set SCENARIO.PROTOCOL to strict, with which "
                "each data set brings its own"
            )
        elif not names:
            problems.append(f"{data.name} has no category")
        known = tuple(labels[name] for name in names if name in labels)
        classes, refreshed = (known, ()) if index == 1 else ((), known)
        images = tuple(data.image_ids.tolist())
        phases.append(Phase(index, classes, images, data.name, refreshed))
    if problems:
        raise InputError.listing("these data sets are not domains of one task:", problems)
    return Scenario(
        name=f"{len(phases)} domains",
        protocol="domains",
        categories=tuple(categories),
        phases=tuple(phases),
        order="list",
        class_seed=None,
        data_seed=None,
        fingerprints=tuple((data.name, data.fingerprint) for data in datasets),
    )


def make_extension(
    detector: Annotations,
    datasets: Sequence[Annotations],
    *,
    refresh: bool = False,
    exemplars: Sequence[Annotations] = (),
    unlabelled: Sequence[Annotations] = (),
) -> Scenario:
    """Adds categories to a detector that is there: its data are not needed.

    The first phase is the detector itself: the categories that it knows, with their labels, and no
    image. Each data set is one more phase, whose classes are the categories with an object in it
    that are not known before it. Categories are matched by name. Objects of known ones stay
    unannotated, as Sec. 3.1 has it, or refresh their class.

    Args:
        detector: a data set without images, whose categories are those that the detector knows.
        datasets: the new data, in the order in which they are learnt.
        refresh: train known classes on their annotations in the new data, too.
        exemplars: labelled images of known categories, replayed in every phase: those that an
            earlier run kept. All objects of the categories that such a data set lists are
            annotated in it.
        unlabelled: images that show known categories, without annotations.
    """
    problems = [] if datasets else ["no new data set was given"]
    categories = [*detector.categories]
    phases = [Phase(1, tuple(range(len(categories))), (), detector.name)]
    for data in datasets:
        problems += _name_problems(data, categories)
        labels = {category.name: label for label, category in enumerate(categories)}
        present = np.bincount(data.labels, minlength=len(data.categories)) > 0
        shown = [data.categories[label].name for label in np.flatnonzero(present)]
        new = [name for name in shown if name not in labels]
        if len(data.image_ids) == 0:
            problems.append(f"{data.name} has no image: give images of the new category")
        elif not new:
            objects = f"objects of {', '.join(shown)} alone" if shown else "no object at all"
            problems.append(
                f"{data.name} brings no new category, it has {objects}; the detector knows "
                f"{_some(labels)}: annotate objects of a new category in these images"
            )
        next_id = max((category.id for category in categories), default=0) + 1
        first = len(categories)
        categories += [Category(next_id + i, name) for i, name in enumerate(new)]
        phases.append(
            Phase(
                index=len(phases) + 1,
                classes=tuple(range(first, len(categories))),
                image_ids=tuple(data.image_ids.tolist()),
                source=data.name,
                refreshed=tuple(labels[name] for name in shown if name in labels and refresh),
            )
        )
    given = []
    labels = {category.name: label for label, category in enumerate(detector.categories)}
    for data in (*exemplars, *unlabelled):
        names = [category.name for category in data.categories]
        if unknown := [name for name in names if name not in labels]:
            problems.append(
                f"the exemplars of {data.name} show {', '.join(unknown)}, which the detector does "
                "not know: give those of a run that ended in this detector"
            )
            continue
        classes = tuple(labels[name] for name in names)
        given.append(AnnotatedSubset(data.name, tuple(data.image_ids.tolist()), classes, 1))
    if problems:
        raise InputError.listing("these data cannot extend the detector:", problems)
    return Scenario(
        name="+".join(str(len(phase.classes)) for phase in phases),
        protocol="extend",
        categories=tuple(categories),
        phases=tuple(phases),
        order="list",
        class_seed=None,
        data_seed=None,
        fingerprints=tuple(
            (data.name, data.fingerprint) for data in (detector, *datasets, *exemplars, *unlabelled)
        ),
        given=tuple(given),
    )


def hold_out(scenario: Scenario, share: float, seed: int) -> tuple[Scenario, Scenario]:
    """Divides the images of each phase; returns the scenario without the held-out ones, and theirs.

    At least one image of each phase is held out. An image that several phases have, as in the
    traditional protocol, is held out of all of them.

    Args:
        scenario: its phases may have no image: a detector that is given has none.
        share: of each phase's images that is held out.
        seed: of the draw.
    """
    drawn: set[tuple[str, int]] = set()
    for phase in scenario.phases:
        images = [(phase.source, image) for image in phase.image_ids]
        free = [image for image in images if image not in drawn]
        random_state(seed).shuffle(free)
        wanted = max(round(share * len(images)), 1) - (len(images) - len(free))
        drawn.update(free[: max(wanted, 0)])

    def part(phase: Phase, held: bool) -> Phase:
        ids = phase.image_ids
        return replace(
            phase, image_ids=tuple(i for i in ids if ((phase.source, i) in drawn) == held)
        )

    rest, held = (
        replace(scenario, phases=tuple(part(phase, held) for phase in scenario.phases))
        for held in (False, True)
    )
    for phase in scenario.phases:
        if phase.image_ids and not rest.phase(phase.index).image_ids:
            raise InputError(
                f"phase {phase.index} has {len(phase.image_ids)} images: too few to hold some of "
                f"them out (a share of {share:g})"
            )
    return rest, held


def _name_problems(data: Annotations, known: Sequence[Category]) -> list[str]:
    """Names that differ from the detector's in spelling alone."""
    spellings = {spelling(category.name): category.name for category in known}
    names = {category.name for category in known}
    problems = []
    for category in data.categories:
        same = spellings.get(spelling(category.name))
        if category.name not in names and same is not None:
            problems.append(
                f"{data.name} says {category.name!r} where the detector says {same!r}: spell the "
                "category as the detector does, or give a different one a different name"
            )
    return problems


def similar_names(scenario: Scenario) -> list[tuple[str, str]]:
    """(new, known) names of an extension that look alike, as after a typing error."""
    known = [scenario.categories[label].name for label in scenario.phases[0].classes]
    later = [scenario.categories[label].name for label in scenario.future(1)]
    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in later}
    return [(name, found[0]) for name, found in near.items() if found]


def spelling(name: str) -> str:
    """A name without what spellings of it may differ in: case, spaces, _ and -."""
    return " ".join(re.split(r"[\s_-]+", name)).strip().casefold()


def _some(names: Iterable[str], limit: int = 10) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + ", …" * (len(names) > limit)


def images_with(data: Annotations, labels: Sequence[int]) -> np.ndarray:
    """Indices of the images with an object of `labels`, crowd regions included."""
    owners = np.repeat(np.arange(len(data.image_ids)), np.diff(data.starts))  # (N,)
    return np.unique(owners[np.isin(data.labels, labels)])


def _cut(sizes: Sequence[int], images: int, seed: int, released: bool) -> list[np.ndarray]:
    """Shuffles image indices and cuts them in proportion to `sizes`, in integers (no rounding)."""
    shuffled = np.arange(images)
    random_state(seed).shuffle(shuffled)
    shares, total = np.array(sizes), sum(sizes)
    ends = np.cumsum(images * shares // total) if released else images * np.cumsum(shares) // total
    return np.split(shuffled, ends)[: len(sizes)]


def _draw_phases(data: Annotations, groups: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Draws one phase for each image among those that it shows objects of, as LoCo-COCO does.

    Images are gone through in file order and phases drawn by Python's `random` from seed 42.
    Objects that were dropped at loading (boxes without area) count as well: the release drops none,
    and every later draw depends on those before it.
    """
    phase_of = {label: index for index, group in enumerate(groups) for label in group}
    labels, starts = data.labels.tolist(), data.starts.tolist()
    shown = [
        {phase_of.get(label) for label in labels[first:last]}
        for first, last in itertools.pairwise(starts)
    ]
    report = getattr(data, "report", None)
    if report is not None and report.dropped:
        index_of = {image: index for index, image in enumerate(data.image_ids.tolist())}
        label_of = {category.id: label for label, category in enumerate(data.categories)}
        for _, image, category in report.dropped:
            if image in index_of:  # not held out
                shown[index_of[image]].add(phase_of.get(label_of[category]))
    generator = random.Random(LOCO_SEED)
    chosen: list[list[int]] = [[] for _ in groups]
    for index, phases in enumerate(shown):
        if present := sorted(phase for phase in phases if phase is not None):
            chosen[generator.choice(present)].append(index)
    return [np.array(indices, dtype=np.int64) for indices in chosen]


def _separate_problems(datasets: Sequence[Annotations], same_content: bool = False) -> list[str]:
    """What keeps data sets from being phases; `same_content`: images alone may differ."""
    problems = [] if datasets else ["no data set was given"]
    names: dict[str, int] = {}
    contents: dict[str, str] = {}
    spellings: dict[str, tuple[str, str]] = {}
    for index, data in enumerate(datasets, start=1):
        if data.name in names:
            problems.append(f"data sets {names[data.name]} and {index} are both named {data.name}")
        elif data.fingerprint in contents and not same_content:
            problems.append(f"{data.name} and {contents[data.fingerprint]} are the same file")
        if len(data.image_ids) == 0:
            problems.append(f"{data.name} has no image")
        names.setdefault(data.name, index)
        contents.setdefault(data.fingerprint, data.name)
        for category in data.categories:
            # "Cat" and "cat " would silently become two classes.
            known, where = spellings.setdefault(spelling(category.name), (category.name, data.name))
            if known != category.name:
                problems.append(
                    f"{data.name} says {category.name!r} where {where} says {known!r}: spell a "
                    "category in one way, or give different ones different names"
                )
    return problems
