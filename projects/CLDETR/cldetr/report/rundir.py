"""Reads a run directory, finished or not, as plain data for tables and plots.

What a run has not written yet is absent. What cannot be read is named in `Run.problems`, and the
rest is shown without it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cldetr.data.manifest import load_manifest
from cldetr.data.memory import ExemplarMemory
from cldetr.engine.ledger import STAGES, read_identity, read_json
from cldetr.errors import InputError
from cldetr.evaluation.average_precision import METRICS, RECALLS
from cldetr.evaluation.results import load_results, summarise
from cldetr.scenario import Scenario

Pictures = list[tuple[Path, str]]  # files with their captions


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

    @property
    def span(self) -> int:
        """Steps of the run's count that the stage takes up, those that an early stop spared too."""
        return int(self.number("planned_steps") or self.steps)

    def number(self, key: str) -> float | None:
        """A fact that is a number, if it is there."""
        value = self.facts.get(key)
        return value if isinstance(value, (int, float)) else None


@dataclass(frozen=True)
class Run:
    """What a run directory says."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)  # identity.json: METHOD.NAME …
    scenario: Scenario | None = None  # manifest.json
    audit: dict[str, Any] | None = None  # audit.json
    starts: list[dict[str, Any]] = field(default_factory=list)  # starts.json
    stages: list[Stage] = field(default_factory=list)  # finished ones, in order
    under_way: tuple[int, str] | None = None  # the phase and stage that is not finished
    results: dict[str, Any] | None = None  # of the phases that are evaluated
    confusion: dict[str, Any] | None = None  # confusion.json of the last phase
    curves: dict[int, dict[str, Any]] = field(
        default_factory=dict
    )  # precision_recall.json by phase
    memory: ExemplarMemory | None = None  # the newest
    curve: list[dict[str, float]] = field(default_factory=list)  # metrics.json, by iteration
    pictures: Pictures = field(default_factory=list)
    diagnostics: Pictures = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def method(self) -> str:
        """What the run calls its method."""
        named = self.results["method"] if self.results else "run"
        return str(self.settings.get("METHOD.NAME", named))

    @property
    def scenario_name(self) -> str:
        """What the run calls its scenario."""
        if self.scenario is not None:
            return self.scenario.name
        return str(self.results["scenario"]) if self.results else "unknown scenario"

    @property
    def domains(self) -> dict[str, Any] | None:
        """AP per domain, where the phases are domains (`summarise_domains`)."""
        return (self.results or {}).get("domains")

    @property
    def finished(self) -> bool:
        """Whether all phases are evaluated."""
        done = len(self.results["phases"]) if self.results else 0
        return done > 0 and (self.scenario is None or done >= len(self.scenario.phases))

    @property
    def state(self) -> str:
        """Where the run is, in words."""
        if self.finished:
            return "finished"
        where = ": phase {}, {}".format(*self.under_way) if self.under_way else ""
        return f"not finished{where}"

    @property
    def seconds(self) -> float:
        """The time of all finished stages."""
        return sum(stage.number("seconds") or 0.0 for stage in self.stages)

    @property
    def first_phase_given(self) -> bool:
        """Whether the first phase was not trained, but taken over from another run."""
        return any(stage.facts.get("given") for stage in self.stages)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories that paths are or, as those of a sweep or a demo, contain."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise InputError(f"{path} is not a folder: give run directories (OUTPUT_DIR of a run)")
        inside = [path] if _is_run(path) else sorted(_runs_below(path, depth=3), key=_natural)
        if not inside:
            raise InputError(
                f"{path} contains no run: give the OUTPUT_DIR of a run, or a folder of runs"
            )
        found += [run for run in inside if run not in found]
    return found


def read_run(folder: Path) -> Run:
    """Reads all that a run directory has."""
    if not _is_run(folder):
        raise InputError(f"{folder} is not a run directory: give the OUTPUT_DIR of a run")
    reader = _Reader(folder)
    settings = reader.read("identity.json", read_identity) or {}
    scenario = reader.read("manifest.json", load_manifest)
    matches = (re.fullmatch(r"phase(\d+)", path.name) for path in folder.iterdir())
    phases = sorted(int(match[1]) for match in matches if match)
    memories = [
        reader.read(f"phase{phase}/select/memory.json", ExemplarMemory.load) for phase in phases
    ]
    stages, under_way = [], None
    for phase, name in itertools.product(phases, STAGES):
        stage = reader.read(f"phase{phase}/{name}/stage.json", _stage)
        if stage is not None:
            stages.append(stage)
        elif (folder / f"phase{phase}" / name).is_dir():
            under_way = (phase, name)
    starts = reader.read("starts.json", kind=_STARTS) or {"starts": []}
    curves = {
        phase: reader.read(f"phase{phase}/evaluate/precision_recall.json", _curves)
        for phase in phases
    }
    confusions = [
        reader.read(f"phase{phase}/evaluate/confusion.json", _confusion) for phase in phases
    ]
    return Run(
        folder=folder,
        settings=settings,
        scenario=scenario,
        audit=reader.read("audit.json", kind=_AUDIT),
        starts=starts["starts"],
        stages=stages,
        under_way=under_way,
        results=reader.results(phases, settings, scenario),
        confusion=_newest(confusions),
        curves={phase: curve for phase, curve in curves.items() if curve is not None},
        memory=_newest(memories),
        curve=reader.read("metrics.json", reader.curve) or [],
        pictures=reader.pictures("pictures"),
        diagnostics=reader.pictures("diagnostics"),
        problems=reader.problems,
    )


class _Reader:
    """Reads the files of one directory and gathers what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def read(self, name: str, load: Callable[[Path], Any] = read_json, kind: Any = Any) -> Any:
        """What a file holds; None where it is absent or has not at least the fields of `kind`."""
        path = self.folder / name
        if not path.exists():
            return None
        try:
            content = load(path)
            msgspec.convert(content, kind)
            return content
        except (InputError, msgspec.MsgspecError, OSError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            reason = reason.replace(str(path), name)  # the page may be read on another machine
            self.problems.append(reason if name in reason else f"{name}: {reason}")
            return None

    def results(
        self, phases: Sequence[int], settings: dict[str, Any], scenario: Scenario | None
    ) -> dict[str, Any] | None:
        """results.json, or of an unfinished run the same from the phases that are evaluated."""
        whole: dict[str, Any] | None = self.read("results.json", load_results, _RESULTS)
        entries: list[dict[str, Any]] = []
        for phase in phases:
            entry = self.read(f"phase{phase}/evaluate/metrics.json", kind=_Entry)
            if entry is None or entry["phase"] != len(entries) + 1:
                break
            entries.append(entry)
        if not entries or (whole is not None and len(whole["phases"]) >= len(entries)):
            return whole
        name = "unknown scenario" if scenario is None else scenario.name
        return summarise(entries, scenario=name, method=str(settings.get("METHOD.NAME", "run")))

    def curve(self, path: Path) -> list[dict[str, float]]:
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
                bad += line.endswith("\n")  # the last line may be incomplete: it is being written
        if bad:
            self.problems.append(f"{path.name}: {bad} of {len(lines)} lines cannot be read")
        return [points[iteration] for iteration in sorted(points)]

    def pictures(self, name: str) -> Pictures:
        """The pictures of a folder with their captions, those of the last phase first."""
        captions = self.read(f"{name}/captions.json") or {}
        files = sorted((self.folder / name).glob("*.png"), key=_latest_first)
        return [
            (file, str(captions.get(file.name, re.sub(r"[_\W]+", " ", file.stem).strip())))
            for file in files
        ]


def _shape(name: str, optional: Mapping[str, Any] | None = None, /, **fields: Any) -> Any:
    others = [(key, kind | None, None) for key, kind in (optional or {}).items()]
    return msgspec.defstruct(name, [*fields.items(), *others])


# What pages read of the files; these may hold more, and a metric that they lack is "n/a".
_OTHERS = [(metric, float | None, None) for metric in METRICS if metric != "AP"]
_Scores: Any = msgspec.defstruct("Scores", [("AP", float | None), *_OTHERS])
_Entry: Any = _shape(
    "Entry",
    {"domains": dict[str, _Scores]},
    **{"phase": int, "all": _Scores, "old": _Scores | None, "new": _Scores},
    **{"groups": list[_Scores], "per_category": dict[str, _Scores]},
)
_Domains: Any = _shape(
    "Domains",
    **{"names": list[str], "matrix": list[list[float | None]], "mean": list[float | None]},
    **{"forgetting": list[float | None], "mean_forgetting": float | None},
)
_RESULTS = _shape(
    "Results",
    {"domains": _Domains},
    **{"scenario": str, "method": str, "phases": list[_Entry], "matrix": list[list[float | None]]},
    **dict.fromkeys(("fpp", "gap_to_joint"), _Scores | None),
    **dict.fromkeys(("average_AP", "forgetting", "backward_transfer"), float | None),
)
_COUNTS = ("index", "classes", "images", "annotated", "empty", "instances", "crowd")
_Phase: Any = _shape(
    "Phase",
    **dict.fromkeys(_COUNTS, int),
    **dict.fromkeys(("hidden", "instances_per_class"), dict[str, int]),
)
_AUDIT = _shape("Audit", phases=list[_Phase], overlap=list[dict[str, Any]])
_Start: Any = _shape("Start", time=str, device=str, processes=int, versions=dict[str, str | None])
_STARTS = _shape("Starts", starts=list[_Start])


_CLASSES = {"phase": int, "categories": list[str], "phases": list[int]}
_Counts: Any = _shape(
    "Counts", **dict.fromkeys(("objects", "correct", "as_old", "as_new", "missed"), int)
)
_Summary: Any = _shape("Summary", old=_Counts, new=_Counts, background=dict[str, int])
_CONFUSION = _shape(
    "Confusion", **_CLASSES, min_score=float, counts=list[list[int]], summary=_Summary
)
_CURVES = _shape("Curves", **_CLASSES, **dict.fromkeys(("AP50", "AP"), list[list[float] | None]))


def _confusion(path: Path) -> dict[str, Any]:
    content = read_json(path)
    msgspec.convert(content, _CONFUSION)
    count = len(content["categories"])
    lengths = {len(row) for row in content["counts"]}
    if len(content["counts"]) != count + 1 or lengths != {count + 1}:
        raise ValueError(f"its matrix does not have {count + 1} rows and columns")
    return _check_phases(content)


def _curves(path: Path) -> dict[str, Any]:
    content = read_json(path)
    msgspec.convert(content, _CURVES)
    for name in ("AP50", "AP"):
        lengths = {len(curve) for curve in content[name] if curve is not None}
        if len(content[name]) != len(content["categories"]) or not lengths <= {len(RECALLS)}:
            raise ValueError(f"{name} does not have {len(RECALLS)} values for each category")
    return _check_phases(content)


def _check_phases(content: dict[str, Any]) -> dict[str, Any]:
    if not content["phases"] or len(content["phases"]) != len(content["categories"]):
        raise ValueError("it does not have a phase for each category")
    return content


def _newest(found: Sequence[Any]) -> Any:
    return next((each for each in reversed(found) if each is not None), None)


def _stage(path: Path) -> Stage:
    return msgspec.convert({**read_json(path), "name": path.parent.name}, Stage)


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("identity.json", "results.json"))


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
