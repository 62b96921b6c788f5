"""Reads a run directory, finished or not, as plain data for tables and plots.

What a run has not written yet is absent. What cannot be read is named in `Run.problems`, and the
rest is shown without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cldetr.data.manifest import load_manifest
from cldetr.data.memory import ExemplarMemory
from cldetr.engine.average_precision import METRICS, Scores
from cldetr.engine.ledger import STAGES, read_json
from cldetr.engine.results import load_results, summarise
from cldetr.errors import InputError
from cldetr.scenario import Scenario

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """A finished stage, with what it noted about itself."""

    phase: int
    name: str
    facts: dict[str, Any]

    @property
    def steps(self) -> int:
        """Training steps; none in stages that do not train."""
        return int(self.number("steps") or 0)

    def number(self, key: str) -> float | None:
        """A fact that is a number, if it is there."""
        value = self.facts.get(key)
        return value if isinstance(value, (int, float)) else None


@dataclass(frozen=True)
class Run:
    """What a run directory says."""

    folder: Path
    identity: dict[str, Any] | None = None  # recipe.json
    scenario: Scenario | None = None  # manifest.json
    audit: dict[str, Any] | None = None  # audit.json
    starts: list[dict[str, Any]] = field(default_factory=list)  # starts.json
    stages: list[Stage] = field(default_factory=list)  # finished ones, in order
    under_way: tuple[int, str] | None = None  # the phase and stage that is not finished
    results: dict[str, Any] | None = None  # of the phases that are evaluated
    memory: ExemplarMemory | None = None  # the newest
    curve: list[dict[str, float]] = field(default_factory=list)  # metrics.json, by iteration
    pictures: list[tuple[Path, str]] = field(default_factory=list)  # files with captions
    diagnostics: list[tuple[Path, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def method(self) -> str:
        """What the run calls its method."""
        if self.identity is not None:
            return str(self.identity["method"].get("name", "run"))
        return str(self.results["method"]) if self.results else "run"

    @property
    def scenario_name(self) -> str:
        """What the run calls its scenario."""
        if self.scenario is not None:
            return self.scenario.name
        return str(self.results["scenario"]) if self.results else "unknown scenario"

    @property
    def finished(self) -> bool:
        """Whether all phases are evaluated."""
        done = len(self.results["phases"]) if self.results else 0
        return done > 0 and (self.scenario is None or done >= len(self.scenario.phases))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories that paths are or, as those of a sweep or a demo, contain."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise InputError(f"{path} is no folder: give run directories (OUTPUT_DIR of a run)")
        inside = [path] if _is_run(path) else sorted(_runs_below(path, depth=3), key=_natural)
        if not inside:
            raise InputError(
                f"{path} holds no run: give the OUTPUT_DIR of a run, or a folder of runs"
            )
        found += [run for run in inside if run not in found]
    return found


def read_run(folder: Path) -> Run:
    """Reads all that a run directory has."""
    if not _is_run(folder):
        raise InputError(f"{folder} holds no run: give the OUTPUT_DIR of a run")
    return _Reader(folder).read()


class _Reader:
    """Reads the parts of one directory and gathers what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        numbers = (re.fullmatch(r"phase(\d+)", path.name) for path in folder.iterdir())
        self.phases = sorted(int(match[1]) for match in numbers if match)

    def read(self) -> Run:
        identity = self._attempt(_identity, "recipe.json")
        scenario = self._attempt(load_manifest, "manifest.json")
        memories = [
            self._attempt(ExemplarMemory.load, f"phase{phase}/select/memory.json")
            for phase in self.phases
        ]
        stages, under_way = self._stages()
        run = Run(
            folder=self.folder,
            identity=identity,
            scenario=scenario,
            audit=self._attempt(_audit, "audit.json"),
            starts=self._attempt(_starts, "starts.json") or [],
            stages=stages,
            results=self._results(identity, scenario),
            memory=next((memory for memory in reversed(memories) if memory is not None), None),
            curve=self._attempt(self._curve, "metrics.json") or [],
            pictures=self._pictures("pictures"),
            diagnostics=self._pictures("diagnostics"),
            problems=self.problems,
            under_way=under_way,
        )
        return run

    def _attempt(self, read: Callable[[Path], T], name: str) -> T | None:
        """What a reader makes of a file; None where it is absent or not as it should be."""
        path = self.folder / name
        if not path.exists():
            return None
        try:
            return read(path)
        except (InputError, msgspec.MsgspecError, OSError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            reason = reason.replace(str(path), name)  # the page may be read on another machine
            self.problems.append(reason if name in reason else f"{name}: {reason}")
            return None

    def _stages(self) -> tuple[list[Stage], tuple[int, str] | None]:
        stages, under_way = [], None
        for phase in self.phases:
            for name in STAGES:
                stage = self._attempt(_stage, f"phase{phase}/{name}/stage.json")
                if stage is not None:
                    stages.append(stage)
                elif (self.folder / f"phase{phase}" / name).is_dir():
                    under_way = (phase, name)
        return stages, under_way

    def _results(
        self, identity: dict[str, Any] | None, scenario: Scenario | None
    ) -> dict[str, Any] | None:
        """results.json, or of an unfinished run the same from the phases that are evaluated."""
        whole = self._attempt(_whole_results, "results.json")
        entries = []
        for number, phase in enumerate(self.phases, start=1):
            entry = self._attempt(_entry, f"phase{phase}/evaluate/metrics.json")
            if entry is None or entry["phase"] != number:
                break
            entries.append(entry)
        if whole is not None and len(whole["phases"]) >= len(entries):
            return whole
        if not entries:
            return None
        return summarise(
            entries,
            scenario="unknown scenario" if scenario is None else scenario.name,
            method="run" if identity is None else str(identity["method"].get("name", "run")),
        )

    def _curve(self, path: Path) -> list[dict[str, float]]:
        """The lines of metrics.json by iteration; where a run was resumed, the later ones count."""
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        points: dict[float, dict[str, float]] = {}
        bad = 0
        for line in lines:
            try:
                point = json.loads(line)
                points.setdefault(point["iteration"], {}).update(
                    {k: v for k, v in point.items() if isinstance(v, (int, float))}
                )
            except (ValueError, TypeError, KeyError, AttributeError):
                bad += line.endswith("\n")  # the last line may still be in the writing
        if bad:
            self.problems.append(f"{path.name}: {bad} of {len(lines)} lines cannot be read")
        return [points[iteration] for iteration in sorted(points)]

    def _pictures(self, name: str) -> list[tuple[Path, str]]:
        captions = self._attempt(read_json, f"{name}/captions.json") or {}
        files = sorted((self.folder / name).glob("*.png"), key=_latest_first)
        plain = re.compile(r"[_\W]+")
        return [
            (file, str(captions.get(file.name, plain.sub(" ", file.stem).strip())))
            for file in files
        ]


class _Entry(msgspec.Struct):
    phase: int
    all: Scores
    old: Scores | None
    new: Scores
    groups: list[Scores]
    per_category: dict[str, Scores]
    stage: str | None = None


class _Results(msgspec.Struct):
    scenario: str
    method: str
    phases: list[_Entry]
    fpp: Scores | None
    matrix: list[list[float | None]]
    average_AP: float | None  # noqa: N815 - the file's name for it
    forgetting: float | None
    backward_transfer: float | None
    gap_to_joint: Scores | None


class _AuditPhase(msgspec.Struct):
    index: int
    classes: int
    images: int
    annotated: int
    empty: int
    instances: int
    crowd: int
    left_out: int
    hidden: dict[str, int]
    images_with_hidden: int
    instances_per_class: dict[str, int]


class _Audit(msgspec.Struct):
    scenario: str
    protocol: str
    phases: list[_AuditPhase]
    overlap: list[dict[str, Any]]
    unused_images: int
    repeated_files: int
    classes_never_learnt: list[str]
    classes_without_instances: list[dict[str, Any]]


class _Start(msgspec.Struct):
    time: str
    device: str
    processes: int
    versions: dict[str, str | None]


def _stage(path: Path) -> Stage:
    record = read_json(path)
    return msgspec.convert({**record, "name": path.parent.name}, Stage)


def _identity(path: Path) -> dict[str, Any]:
    identity = msgspec.convert(read_json(path).get("identity"), dict[str, Any])
    msgspec.convert(identity.get("method"), dict[str, Any])
    return identity


def _whole_results(path: Path) -> dict[str, Any]:
    results = load_results(path)
    _check_scores(msgspec.convert(results, _Results).phases)
    return results


def _entry(path: Path) -> dict[str, Any]:
    entry = read_json(path)
    _check_scores([msgspec.convert(entry, _Entry)])
    return entry


def _check_scores(entries: Sequence[_Entry]) -> None:
    for entry in entries:
        sets = [entry.all, entry.new, *entry.groups, *entry.per_category.values()]
        for scores in sets if entry.old is None else [*sets, entry.old]:
            if missing := [metric for metric in METRICS if metric not in scores]:
                raise ValueError(f"no {missing[0]} in the scores of phase {entry.phase}")


def _audit(path: Path) -> dict[str, Any]:
    audit = read_json(path)
    msgspec.convert(audit, _Audit)
    return audit


def _starts(path: Path) -> list[dict[str, Any]]:
    starts = msgspec.convert(read_json(path).get("starts"), list[_Start])
    return msgspec.to_builtins(starts)


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("recipe.json", "results.json"))


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            if _is_run(child):
                yield child
            elif depth > 1:
                yield from _runs_below(child, depth - 1)


def _latest_first(path: Path) -> tuple[int, list[tuple[str, int]]]:
    """Sorts pictures of the last phase to the front: they tell most."""
    phase = re.match(r"phase(\d+)", path.name)
    return -int(phase[1]) if phase else 0, _natural(path)


def _natural(path: Path) -> list[tuple[str, int]]:
    """Sorts seed10 behind seed9."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", str(path))]
