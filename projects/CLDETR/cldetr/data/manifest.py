"""Manifests: a scenario written down, so that a run can prove which data it saw.

The file is plain JSON. Its `hash` covers all the rest in canonical form, so any later change is
noticed; its fingerprints tie it to the content of the annotation files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cldetr.errors import InputError
from cldetr.files import sha256_json, write_json
from cldetr.scenario import BASE, Annotations, Category, Phase, Protocol, Scenario

FORMAT = 1
DIFFERENCES = 10  # named in a message; the rest is counted


class _Category(msgspec.Struct, forbid_unknown_fields=True):
    id: int
    name: str


class _Phase(msgspec.Struct, forbid_unknown_fields=True):
    index: int
    source: str
    classes: list[str]
    class_ids: list[int]
    image_ids: list[int]


class _Source(msgspec.Struct, forbid_unknown_fields=True):
    source: str
    fingerprint: str


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    name: str
    protocol: Protocol
    order: str
    class_seed: int | None
    data_seed: int | None
    data: list[_Source]
    categories: list[_Category]
    phases: list[_Phase]
    hash: str


def manifest_content(scenario: Scenario) -> dict[str, Any]:
    """The manifest of a scenario as plain values, with its hash."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "name": scenario.name,
        "protocol": scenario.protocol,
        "order": scenario.order,
        "class_seed": scenario.class_seed,
        "data_seed": scenario.data_seed,
        "data": [
            {"source": source, "fingerprint": fingerprint}
            for source, fingerprint in scenario.fingerprints
        ],
        "categories": [
            {"id": category.id, "name": category.name} for category in scenario.categories
        ],
        "phases": [
            {
                "index": phase.index,
                "source": phase.source,
                "classes": [scenario.categories[label].name for label in phase.classes],
                "class_ids": [scenario.categories[label].id for label in phase.classes],
                "image_ids": list(phase.image_ids),
            }
            for phase in scenario.phases
        ],
    }
    return {**content, "hash": sha256_json(content)}


def scenario_hash(scenario: Scenario) -> str:
    """The hash that the scenario's manifest carries."""
    return str(manifest_content(scenario)["hash"])


def save_manifest(scenario: Scenario, path: str | os.PathLike[str]) -> str:
    """Writes a scenario's manifest, atomically, and returns its hash."""
    content = manifest_content(scenario)
    write_json(path, content)
    return str(content["hash"])


def load_manifest(path: str | os.PathLike[str]) -> Scenario:
    """Reads a manifest; one that was changed, cut off or contradicts itself is refused."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"the manifest {path} cannot be read: {error.strerror}") from None
    try:
        version = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).get("format")
        if version is not None and bytes(version) != str(FORMAT).encode():
            raise InputError(
                f"the manifest {path} has format {bytes(version).decode()[:20]}, this version of "
                f"cldetr reads {FORMAT}: use the version that wrote it, or make it again"
            )
        manifest = msgspec.json.decode(text, type=_Manifest)
        content = msgspec.to_builtins(manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            f"{path} is not a manifest ({error}): take the one that `cldetr split` or the run wrote"
        ) from None
    stated = content.pop("hash")
    if sha256_json(content) != stated:
        raise InputError(
            f"the manifest {path} was changed after it was written (its hash does not match): "
            "restore it, or make the scenario again with `cldetr split`"
        )
    if problems := _contradictions(manifest):
        raise InputError.listing(f"the manifest {path} contradicts itself:", problems)
    label = {category.name: place for place, category in enumerate(manifest.categories)}
    return Scenario(
        name=manifest.name,
        protocol=manifest.protocol,
        categories=tuple(Category(category.id, category.name) for category in manifest.categories),
        phases=tuple(
            Phase(
                phase.index,
                tuple(label[name] for name in phase.classes),
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


def check_source(scenario: Scenario, source: str, data: Annotations) -> None:
    """Stops where one of a scenario's data sets is not the one that it was made from."""
    if found := list(_data_differences(scenario, source, data)):
        raise InputError.listing(
            f"scenario {scenario.name} was made from other data ({len(found)} differences); give "
            "the annotation file that it was made from, or make it again:",
            found,
            limit=DIFFERENCES,
        )


def differences(expected: Scenario, found: Scenario) -> list[str]:
    """Says in which ways two scenarios differ, the most telling first; none if they are equal."""
    lines = []
    for key in ("name", "protocol", "order", "class_seed", "data_seed", "fingerprints"):
        before, now = getattr(expected, key), getattr(found, key)
        if before != now:
            lines.append(f"{key}: {before!r} → {now!r}")
    for label, (before, now) in enumerate(_pairs(expected.categories, found.categories)):
        if before != now:
            lines.append(f"label {label}: {_named(before)} → {_named(now)}")
    for index, (before, now) in enumerate(_pairs(expected.phases, found.phases), start=1):
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
        raise InputError.listing(f"{what} differ:", lines, limit=DIFFERENCES)


def _data_differences(scenario: Scenario, source: str, data: Annotations) -> Iterable[str]:
    fingerprint = dict(scenario.fingerprints).get(source)
    if fingerprint is None:
        yield f"data set {source!r} is not in the scenario"
    elif data.fingerprint != fingerprint:
        yield (
            f"{data.name}: the annotation file's content is {data.fingerprint[:12]}…, it was "
            f"{fingerprint[:12]}…"
        )
    if source == BASE:
        for label, (before, now) in enumerate(_pairs(scenario.categories, data.categories)):
            if before != now:
                yield f"{data.name}: label {label} is {_named(now)}, it was {_named(before)}"
    phases = [phase for phase in scenario.phases if phase.source == source]
    names = {category.name for category in data.categories}
    known = np.append(np.sort(data.image_ids), -1)  # the last one catches ids beyond all
    for phase in phases:
        for label in phase.classes:
            if scenario.categories[label].name not in names:
                yield f"{data.name}: no category {scenario.categories[label].name!r}"
        ids = np.array(phase.image_ids, dtype=np.int64)
        for image in ids[known[np.searchsorted(known[:-1], ids)] != ids].tolist():
            yield f"{data.name}: image {image} of phase {phase.index} is not in the file"


def _contradictions(manifest: _Manifest) -> list[str]:
    ids = {category.name: category.id for category in manifest.categories}
    sources = [source.source for source in manifest.data]
    problems = []
    if len(ids) < len(manifest.categories) or len(set(ids.values())) < len(ids):
        problems.append("categories are named or numbered twice")
    if len(set(sources)) < len(sources):
        problems.append("a data set is listed twice")
    if not manifest.phases:
        problems.append("there is no phase")
    learnt: dict[str, int] = {}
    shown: dict[tuple[str, int], int] = {}
    for place, phase in enumerate(manifest.phases, start=1):
        if phase.index != place:
            problems.append(f"phase {phase.index} stands where phase {place} should")
        if phase.source not in sources:
            problems.append(f"phase {place} is of the data set {phase.source!r}, not listed")
        if [ids.get(name) for name in phase.classes] != phase.class_ids or not phase.classes:
            problems.append(f"phase {place}: classes and class_ids do not fit the categories")
        if not phase.image_ids:
            problems.append(f"phase {place} has no image")
        if len(set(phase.image_ids)) < len(phase.image_ids):
            problems.append(f"phase {place} has an image twice")
        for name in phase.classes:
            if learnt.setdefault(name, place) != place:
                problems.append(f"class {name!r} is in phases {learnt[name]} and {place}")
        if len(set(phase.classes)) < len(phase.classes):
            problems.append(f"phase {place} has a class twice")
        if manifest.protocol == "strict":
            for image in phase.image_ids:
                first = shown.setdefault((phase.source, image), place)
                if first != place:
                    problems.append(f"image {image} is in phases {first} and {place}")
    return problems


def _set_difference(before: tuple[Any, ...], now: tuple[Any, ...], what: str) -> str:
    gone, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    if not gone and not new:
        return f"the same {what} in another order"
    few = [f"−{one}" for one in gone[:3]] + [f"+{one}" for one in new[:3]]
    rest = ", …" if len(gone) > 3 or len(new) > 3 else ""
    return f"{len(gone)} {what} gone, {len(new)} new ({', '.join(few)}{rest})"


def _names(scenario: Scenario, labels: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(scenario.categories[label].name for label in labels)


def _pairs(before: tuple[Any, ...], now: tuple[Any, ...]) -> Iterable[tuple[Any, Any]]:
    return itertools.zip_longest(before, now)


def _named(category: Category | None) -> str:
    return "nothing" if category is None else f"{category.name!r} (id {category.id})"
