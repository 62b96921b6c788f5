"""Published scenarios and class orders by name, such as `voc/19+1` and the order `psedet`.

They are data, in scenarios.json: the categories of each phase, the protocol that divides the images
and the source. Categories are matched with those of a data set whatever its spelling.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cldetr.errors import InputError


@dataclass(frozen=True)
class PublishedScenario:
    """A benchmark as its authors define it."""

    name: str  # "voc/19+1"
    phases: tuple[tuple[str, ...], ...]  # category names of each phase
    protocol: str  # how images are divided, see `cldetr.scenario.make_scenario`
    data: str  # the data set, in words
    metric: str  # what its tables show, in words
    source: str  # where the class lists are from
    note: str


@functools.cache
def published_scenarios() -> dict[str, PublishedScenario]:
    """All published scenarios by name."""
    found = {}
    for family, entry in _content()["families"].items():
        texts = {key: entry[key] for key in ("protocol", "data", "metric", "source", "note")}
        sizes = entry.get("sizes", {})
        cuts = {setting: _cut(entry["order"], counts) for setting, counts in sizes.items()}
        for setting, phases in {**cuts, **entry.get("phases", {})}.items():
            name = f"{family}/{setting}"
            found[name] = PublishedScenario(name, tuple(map(tuple, phases)), **texts)
    return found


@functools.cache
def published_orders() -> dict[str, tuple[str, ...]]:
    """Published orders of all categories of a data set, by name."""
    return {name: tuple(entry["order"]) for name, entry in _content()["orders"].items()}


def order_source(name: str) -> str:
    """Where a published order is from."""
    return _content()["orders"][name]["source"]


def is_published(name: object) -> bool:
    """Whether a scenario is named as the published ones are, FAMILY/SETTING."""
    return isinstance(name, str) and "/" in name


def find_published(name: str) -> PublishedScenario:
    """The published scenario of that name; an unknown one is refused."""
    known = published_scenarios()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"do you mean {' or '.join(near)}?" if near else "check the name"
        raise InputError(
            f"no published scenario is called {name!r}: {hint} (`cldetr split --list` lists all; "
            "phases of your own are SCENARIO.PHASES, --phases)"
        )
    return known[name]


def check_published(name: str, protocol: str, order: object) -> None:
    """Refuses a protocol or a class order that a published scenario does not have."""
    scenario = find_published(name)
    if protocol != scenario.protocol:
        raise InputError(
            f"scenario {name} is published with the {scenario.protocol} protocol, not with "
            f"{protocol}: set SCENARIO.PROTOCOL {scenario.protocol} (--protocol), or give the "
            "categories of each phase yourself (SCENARIO.PHASES, --phases)"
        )
    if order not in ("id", "seed"):  # the defaults, which order nothing here
        raise InputError(
            f"scenario {name} has its own class order: remove SCENARIO.ORDER (--order) {order!r}"
        )


def match_spelling(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """Spells categories as a data set does: "sofa" as its "couch"; unknown ones stay as they are.

    Case, spaces, _ and - make no difference, so that "pottedplant" is "potted plant".
    """
    spelt = {_key(name): name for name in known}
    same = {_key(word): words for words in _content()["spellings"] for word in words}
    matched = []
    for name in names:
        words = [name, *same.get(_key(name), ())]
        found = [spelt[_key(word)] for word in words if _key(word) in spelt]
        matched.append(name if name in known or not found else found[0])
    return matched


@functools.cache
def _content() -> dict[str, Any]:
    path = importlib.resources.files("cldetr") / "scenarios.json"
    return json.loads(path.read_text(encoding="utf-8"))


def _cut(order: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
    """Cuts an order of categories into consecutive phases of these sizes."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [list(order[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _key(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()
