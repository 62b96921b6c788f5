"""Manifests: a scenario as a file, so that a run can prove which data it saw.

The file is plain JSON. Its `hash` covers all the rest, so any later change is noticed; its
fingerprints tie it to the content of the annotation files.
"""

from __future__ import annotations

import os
from itertools import zip_longest
from typing import Any

import msgspec

from cldetr.errors import InputError
from cldetr.files import read_sealed, sha256_json, write_sealed
from cldetr.scenario import Category, Phase, Protocol, Scenario

FORMAT = 1
_MAX_LISTED = 10  # differences named in a message; the rest is counted
_FIX = "take the one that `cldetr split` or the run wrote, or make it again with `cldetr split`"


class _Source(msgspec.Struct):
    source: str
    fingerprint: str


class _Phase(msgspec.Struct):
    index: int
    source: str
    classes: list[str]
    class_ids: list[int]
    image_ids: list[int]


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    name: str
    protocol: Protocol
    order: str
    class_seed: int | None
    data_seed: int | None
    data: list[_Source]
    categories: list[Category]
    phases: list[_Phase]


def manifest_content(scenario: Scenario) -> dict[str, Any]:
    """The manifest of a scenario as plain values, without its hash."""
    manifest = _Manifest(
        format=FORMAT,
        name=scenario.name,
        protocol=scenario.protocol,
        order=scenario.order,
        class_seed=scenario.class_seed,
        data_seed=scenario.data_seed,
        data=[_Source(*pair) for pair in scenario.fingerprints],
        categories=list(scenario.categories),
        phases=[
            _Phase(
                phase.index,
                phase.source,
                [scenario.categories[label].name for label in phase.classes],
                [scenario.categories[label].id for label in phase.classes],
                list(phase.image_ids),
            )
            for phase in scenario.phases
        ],
    )
    return dict(msgspec.to_builtins(manifest))


def scenario_hash(scenario: Scenario) -> str:
    """The hash that the scenario's manifest carries."""
    return sha256_json(manifest_content(scenario))


def save_manifest(scenario: Scenario, path: str | os.PathLike[str]) -> str:
    """Writes a scenario's manifest, atomically, and returns its hash."""
    return write_sealed(path, manifest_content(scenario))


def load_manifest(path: str | os.PathLike[str]) -> Scenario:
    """Reads a manifest; one that was changed, cut off or contradicts itself is refused."""
    try:
        manifest = msgspec.convert(read_sealed(path, "manifest", FORMAT, _FIX), _Manifest)
    except msgspec.ValidationError as error:
        raise InputError(f"{path} is not a valid manifest ({error}): {_FIX}") from None
    if problems := _contradictions(manifest):
        raise InputError.listing(f"the manifest {path} contradicts itself:", problems)
    labels = {category.name: label for label, category in enumerate(manifest.categories)}
    return Scenario(
        name=manifest.name,
        protocol=manifest.protocol,
        categories=tuple(manifest.categories),
        phases=tuple(
            Phase(
                phase.index,
                tuple(labels[name] for name in phase.classes),
                tuple(phase.image_ids),
                phase.source,
            )
            for phase in manifest.phases
        ),
        order=manifest.order,
        class_seed=manifest.class_seed,
        data_seed=manifest.data_seed,
        fingerprints=tuple((source.source, source.fingerprint) for source in manifest.data),
    )


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
        if before.source != now.source:
            lines.append(f"phase {index}: data set {before.source!r} → {now.source!r}")
        if before.image_ids != now.image_ids:
            lines.append(
                f"phase {index}: {_set_difference(before.image_ids, now.image_ids, 'images')}"
            )
    return lines


def check_same(expected: Scenario, found: Scenario, what: str) -> None:
    """Stops where `found` is not the scenario `expected`; `what` names the two, for the message."""
    if lines := differences(expected, found):
        raise InputError.listing(f"{what} differ:", lines, limit=_MAX_LISTED)


def _contradictions(manifest: _Manifest) -> list[str]:
    ids = {category.name: category.id for category in manifest.categories}
    sources = [source.source for source in manifest.data]
    problems = []
    if len(ids) < len(manifest.categories) or _repeats(list(ids.values())):
        problems.append("category names or ids are used twice")
    if _repeats(sources):
        problems.append("a data set is listed twice")
    if not manifest.phases:
        problems.append("there is no phase")
    first_class: dict[str, int] = {}
    first_image: dict[tuple[str, int], int] = {}
    for index, phase in enumerate(manifest.phases, start=1):
        if phase.index != index:
            problems.append(f"phase {phase.index} is where phase {index} should be")
        if phase.source not in sources:
            problems.append(f"phase {index} is of the data set {phase.source!r}, not listed")
        if [ids.get(name) for name in phase.classes] != phase.class_ids or not phase.classes:
            problems.append(f"phase {index}: classes and class_ids do not fit the categories")
        if not phase.image_ids:
            problems.append(f"phase {index} has no image")
        if _repeats(phase.image_ids):
            problems.append(f"phase {index} has an image twice")
        if _repeats(phase.classes):
            problems.append(f"phase {index} has a class twice")
        for name in phase.classes:
            if (first := first_class.setdefault(name, index)) != index:
                problems.append(f"class {name!r} is in phases {first} and {index}")
        for image in phase.image_ids if manifest.protocol == "strict" else ():
            if (first := first_image.setdefault((phase.source, image), index)) != index:
                problems.append(f"image {image} is in phases {first} and {index}")
    return problems


def _repeats(values: list[Any]) -> bool:
    return len(set(values)) < len(values)


def _set_difference(before: tuple[Any, ...], now: tuple[Any, ...], what: str) -> str:
    gone, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    if not gone and not new:
        return f"the same {what} in another order"
    few = [f"−{one}" for one in gone[:3]] + [f"+{one}" for one in new[:3]]
    rest = ", …" if len(gone) > 3 or len(new) > 3 else ""
    return f"{len(gone)} {what} gone, {len(new)} new ({', '.join(few)}{rest})"


def _names(scenario: Scenario, labels: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(scenario.categories[label].name for label in labels)


def _named(category: Category | None) -> str:
    return "nothing" if category is None else f"{category.name!r} (id {category.id})"
