"""Which classes belong to which phase: sizes, orders and names, as people write them."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cldetr.errors import InputError
from cldetr.published import find_published, is_published, match_spelling, published_orders

_ALLOW = "SCENARIO.PARTIAL True, --partial"  # how a config and a command say `partial`


@dataclass(frozen=True)
class Category:
    """A category as the annotation file names it."""

    id: int
    name: str


class Annotations(typing.Protocol):
    """What a scenario needs of a data set; `cldetr.data.coco.CocoData` is one."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def categories(self) -> tuple[Category, ...]:
        """In ascending order of their ids."""

    @property
    def image_ids(self) -> np.ndarray:
        """(I,), in the order of the file."""

    @property
    def starts(self) -> np.ndarray:
        """(I + 1,): the objects of image i are rows starts[i]:starts[i + 1]."""

    @property
    def labels(self) -> np.ndarray:
        """(N,): the index of each object's category in `categories`."""

    @property
    def fingerprint(self) -> str:
        """The digest of the annotation file's content."""


def resolve_phases(
    phases: str | Sequence[Sequence[str | int]],
    order: str | Sequence[str | int],
    data: Annotations,
    seed: int,
    partial: bool,
) -> tuple[list[list[int]], str]:
    """The labels of each phase and the scenario's name (see `cldetr.scenario.make_scenario`)."""
    name = ""
    if isinstance(phases, str) and is_published(phases):
        name, known = phases, [category.name for category in data.categories]
        phases = [match_spelling(names, known) for names in find_published(name).phases]
    if isinstance(phases, str):
        sizes, name = parse_sizes(phases)
        _check_total(name, sum(sizes), data, partial)
        labels = _class_order(order, data, seed)
        groups = [labels[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
        return groups, name
    groups = _resolve(phases, data)
    if not groups or not all(groups):
        raise InputError("a phase has no category: every phase needs at least one")
    if (rest := _missing(data, [label for group in groups for label in group])) and not partial:
        raise InputError.listing(
            f"{len(rest)} categories of {data.name} are in no phase; name them, or allow "
            f"categories that are never learnt ({_ALLOW}):",
            rest,
        )
    return groups, name or "+".join(str(len(group)) for group in groups)


def parse_sizes(text: str) -> tuple[list[int], str]:
    """Reads "40+20 × 2" as [40, 20, 20] and "40+20x2", the name of the scenario."""
    name = re.sub(r"[×X*]", "x", re.sub(r"\s+", "", text))
    terms = [re.fullmatch(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?", term) for term in name.split("+")]
    if not all(terms):
        raise InputError(
            f"scenario {text!r} is not understood: write class counts as in 70+10, 40+20x2 (40, "
            "then two phases of 20) or 15+1+1"
        )
    pairs = [(int(term[1]), int(term[2] or 1)) for term in terms if term]
    return [size for size, times in pairs for _ in range(times)], name


def _check_total(name: str, total: int, data: Annotations, partial: bool) -> None:
    """Compares the sum of a scenario's sizes with the number of categories."""
    available = len(data.categories)
    if total > available or (total < available and not partial):
        hint = f", or allow categories that are never learnt ({_ALLOW})"
        hint = "" if total > available else hint
        raise InputError(
            f"scenario {name} needs {total} categories but {data.name} has {available}: choose "
            f"sizes that add up to {available}{hint}"
        )


def _class_order(order: str | Sequence[str | int], data: Annotations, seed: int) -> list[int]:
    """Orders all labels: "id", "seed" or "released" (shuffles by `seed`), or a list of names.

    The name of a published order is such a list.
    """
    labels = list(range(len(data.categories)))  # ascending id
    published = published_orders()
    if isinstance(order, str) and order in published:
        order = match_spelling(published[order], [category.name for category in data.categories])
    if not isinstance(order, str):
        [labels] = _resolve([order], data)
        if missing := _missing(data, labels):
            raise InputError.listing("the class order lacks categories; add them:", missing)
    elif order in ("seed", "released"):
        random_state(seed).shuffle(labels)
    elif order != "id":
        known = ", ".join(("id", "seed", "released", *published))
        raise InputError(f"class order {order!r} is unknown: choose {known} or a list")
    return labels


def _missing(data: Annotations, labels: Sequence[int]) -> list[str]:
    named = set(labels)
    return [category.name for label, category in enumerate(data.categories) if label not in named]


def _resolve(groups: Sequence[Sequence[str | int]], data: Annotations) -> list[list[int]]:
    """Turns names or ids into labels; unknown and repeated ones make one error."""
    by_name = {category.name: label for label, category in enumerate(data.categories)}
    by_id = {category.id: label for label, category in enumerate(data.categories)}
    problems: list[str] = []
    first_list: dict[int, int] = {}
    resolved: list[list[int]] = []
    for index, group in enumerate(groups, start=1):
        if isinstance(group, str):
            raise InputError(f"phase {index} is one text, {group!r}: give a list of names")
        resolved.append([])
        for word in group:
            label = by_name.get(word) if isinstance(word, str) else by_id.get(word)
            if label is None:
                near = difflib.get_close_matches(str(word), by_name, n=1)
                hint = f"; do you mean {near[0]!r}?" if near else ""
                problems.append(f"{word!r} (list {index}) is not a category of {data.name}{hint}")
            elif label in first_list:
                problems.append(f"{word!r} is named twice (lists {first_list[label]} and {index})")
            else:
                first_list[label] = index
                resolved[-1].append(label)
    if problems:
        raise InputError.listing("the categories of the phases do not fit the data set:", problems)
    return resolved


def random_state(seed: int) -> np.random.RandomState:
    """A generator whose shuffles never change (see `cldetr.scenario`)."""
    if not 0 <= seed < 2**32:
        raise InputError(f"a seed must be between 0 and {2**32 - 1}, not {seed}")
    return np.random.RandomState(seed)
