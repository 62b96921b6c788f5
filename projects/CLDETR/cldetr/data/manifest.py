"""Manifests: a scenario as a file, so that a run can prove which data it saw.

The file is plain JSON. Its `hash` covers all the rest, so any later change is noticed; its
fingerprints tie it to the content of the annotation files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from cldetr.errors import InputError
from cldetr.files import read_sealed, sha256_json, write_sealed
from cldetr.scenario import DETECTOR, Category, Scenario

FORMAT = 2
_MAX_LISTED = 10  # differences named in a message; the rest is counted
_FIX = "take the one that `cldetr split` or the run wrote, or make it again with `cldetr split`"


def manifest_content(scenario: Scenario) -> dict[str, Any]:
    """The manifest of a scenario as plain values, without its hash."""
    content = {"format": FORMAT, **msgspec.to_builtins(scenario)}
    for phase in content["phases"]:  # for the reader: it follows from the labels
        phase["class_names"] = _names(scenario, phase["classes"] or phase["refreshed"])
    for node, key in (*((phase, "refreshed") for phase in content["phases"]), (content, "given")):
        if not node.get(key):  # only extensions of a detector and new domains have these
            node.pop(key, None)
    return content


def scenario_hash(scenario: Scenario) -> str:
    """The hash that the scenario's manifest carries."""
    return sha256_json(manifest_content(scenario))


def save_manifest(scenario: Scenario, path: str | os.PathLike[str]) -> str:
    """Writes a scenario's manifest, atomically, and returns its hash."""
    return write_sealed(path, manifest_content(scenario))


def load_manifest(path: str | os.PathLike[str]) -> Scenario:
    """Reads a manifest; one that was changed, cut off or contradicts itself is refused."""
    content = read_sealed(path, "manifest", FORMAT, _FIX)
    try:
        scenario = msgspec.convert(content, Scenario)
    except msgspec.ValidationError as error:
        raise InputError(f"{path} is not a valid manifest ({error}): {_FIX}") from None
    problems = _contradictions(scenario)
    if not problems and scenario_hash(scenario) != sha256_json(content):
        problems = ["it has unknown keys, or class_names do not fit the classes"]
    if problems:
        raise InputError.listing(f"the manifest {path} contradicts itself:", problems)
    return scenario


def differences(expected: Scenario, found: Scenario) -> list[str]:
    """Says in which ways two scenarios differ, the most telling first; none if they are equal."""
    lines = []
    for key in ("name", "protocol", "order", "class_seed", "data_seed", "fingerprints"):
        before, now = getattr(expected, key), getattr(found, key)
        if before != now:
            lines.append(f"{key}: {before!r} → {now!r}")
    for label, (before, now) in enumerate(zip_longest(expected.categories, found.categories)):
        if before != now:
            lines.append(f"label {label}: {_named(before)} → {_named(now)}")
    for index, (before, now) in enumerate(zip_longest(expected.phases, found.phases), start=1):
        if before is None or now is None:
            lines.append(f"phase {index}: {'new' if before is None else 'gone'}")
            continue
        if before.classes != now.classes:
            names = (_names(expected, before.classes), _names(found, now.classes))
            lines.append(f"phase {index}: {_set_difference(*names, 'classes')}")
        for key in ("source", "refreshed"):
            one, other = getattr(before, key), getattr(now, key)
            if one != other:
                lines.append(f"phase {index}: {key} {one!r} → {other!r}")
        if before.image_ids != now.image_ids:
            lines.append(
                f"phase {index}: {_set_difference(before.image_ids, now.image_ids, 'images')}"
            )
    if expected.given != found.given:
        lines.append("the images that came with the detector")
    return lines


def check_same(expected: Scenario, found: Scenario, what: str) -> None:
    """Stops where `found` is not the scenario `expected`; `what` names the two, for the message."""
    if lines := differences(expected, found):
        raise InputError.listing(f"{what} differ:", lines, limit=_MAX_LISTED)


def _contradictions(scenario: Scenario) -> list[str]:
    sources = [source for source, _ in scenario.fingerprints]
    problems = []
    for key in ("name", "id"):
        if _repeats([getattr(category, key) for category in scenario.categories]):
            problems.append(f"category {key}s are used twice")
    if _repeats(sources):
        problems.append("a data set is listed twice")
    if not scenario.phases:
        problems.append("there is no phase")
    first_class: dict[int, int] = {}
    first_image: dict[tuple[str, int], int] = {}
    for index, phase in enumerate(scenario.phases, start=1):
        if phase.index != index:
            problems.append(f"phase {phase.index} is where phase {index} should be")
        if phase.source not in sources:
            problems.append(f"phase {index} is of the data set {phase.source!r}, not listed")
        later_domain = scenario.protocol == "domains" and index > 1  # it brings no new class
        labels = phase.refreshed if later_domain else phase.classes
        if not labels or not set(phase.annotated) <= set(range(len(scenario.categories))):
            problems.append(f"phase {index}: classes are not indices of the categories")
        if not phase.image_ids and phase.source != DETECTOR:
            problems.append(f"phase {index} has no image")
        if _repeats(phase.image_ids):
            problems.append(f"phase {index} has an image twice")
        if _repeats(phase.annotated):
            problems.append(f"phase {index} has a class twice")
        for label in phase.classes:
            if (first := first_class.setdefault(label, index)) != index:
                problems.append(f"class {label} is in phases {first} and {index}")
        for image in phase.image_ids if scenario.protocol in ("strict", "loco") else ():
            if (first := first_image.setdefault((phase.source, image), index)) != index:
                problems.append(f"image {image} is in phases {first} and {index}")
    return problems


def _repeats(values: Sequence[Any]) -> bool:
    return len(set(values)) < len(values)


def _set_difference(before: Sequence[Any], now: Sequence[Any], what: str) -> str:
    gone, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    if not gone and not new:
        return f"the same {what} in another order"
    few = [f"−{one}" for one in gone[:3]] + [f"+{one}" for one in new[:3]]
    rest = ", …" if len(gone) > 3 or len(new) > 3 else ""
    return f"{len(gone)} {what} gone, {len(new)} new ({', '.join(few)}{rest})"


def _names(scenario: Scenario, labels: Sequence[int]) -> list[str]:
    return [scenario.categories[label].name for label in labels]


def _named(category: Category | None) -> str:
    return "nothing" if category is None else f"{category.name!r} (id {category.id})"
