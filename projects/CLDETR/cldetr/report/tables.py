"""The numbers that pages and plots show, as plain data."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from cldetr.config import default_config, identity
from cldetr.report.plotting import signed
from cldetr.report.rundir import Run, Stage
from cldetr.report.sweep_table import mean_interval, value_of

SETS = ("all", "old", "new")
_SEEDS = ("SEED", "SCENARIO.CLASS_SEED", "SCENARIO.DATA_SEED")
_WEIGHTS = ("MODEL.WEIGHTS", "MODEL.DETECTOR")


@dataclass(frozen=True)
class Change:
    """AP of a category after the phase that taught it and after the last phase, in percent."""

    name: str
    phase: int  # in which it was learnt
    first: float | None
    last: float | None

    @property
    def difference(self) -> float | None:
        """What later phases did to it: negative where it was forgotten."""
        return None if self.first is None or self.last is None else self.last - self.first


def category_changes(results: Mapping[str, Any] | None) -> list[Change]:
    """What became of each category from its first appearance to the end, in order of learning."""
    phases = results["phases"] if results else []
    found: dict[str, Change] = {}
    for entry in phases:
        for name, scores in entry["per_category"].items():
            end = phases[-1]["per_category"].get(name, {}).get("AP")
            found.setdefault(name, Change(name, entry["phase"], scores["AP"], end))
    return list(found.values())


@dataclass(frozen=True)
class ConfusedPair:
    """Objects of one category that are detected as another."""

    true: str
    true_phase: int
    detected: str
    detected_phase: int
    count: int
    share: float  # of the objects of the true category, in percent


def largest_confusions(confusion: Mapping[str, Any] | None, limit: int = 10) -> list[ConfusedPair]:
    """The pairs of categories with the most confused objects."""
    if confusion is None:
        return []
    names, phases, counts = (confusion[key] for key in ("categories", "phases", "counts"))
    pairs = [
        ConfusedPair(
            names[i], phases[i], names[j], phases[j], counts[i][j], 100 * counts[i][j] / sum(row)
        )
        for i, row in enumerate(counts[:-1])
        for j in range(len(names))
        if i != j and counts[i][j]
    ]
    return sorted(pairs, key=lambda pair: (-pair.count, -pair.share))[:limit]


@dataclass
class CategoryCounts:
    """How often a category occurs; None where the run does not say."""

    name: str
    phase: int
    data: int  # labelled objects in its phase, or in all domains
    exemplars: int | None = None  # of these, those that are kept
    pseudo: float | None = None  # pseudo-labels in one pass over the images of each later phase


def category_counts(run: Run) -> list[CategoryCounts]:
    """The distribution of categories over data, exemplars and pseudo-labels, phase by phase."""
    if run.domains:
        return _domain_counts(run)
    found: dict[str, CategoryCounts] = {}
    for phase in run.memory.phases if run.memory else ():
        for kept in phase.classes:
            counts = (kept.objects_in_data, kept.objects_in_exemplars)
            found[kept.name] = CategoryCounts(kept.name, phase.index, *counts)
    for entry in run.audit["phases"] if run.audit else ():
        for name, count in entry["instances_per_class"].items():
            found.setdefault(name, CategoryCounts(name, entry["index"], count))
    pseudo = pseudo_per_pass(run.stages)
    last = max((x.phase for x in found.values()), default=0)  # its classes were never old
    for x in found.values():
        if pseudo is not None and x.phase < last:
            x.pseudo = pseudo.get(x.name, 0.0)
    return list(found.values())


def _domain_counts(run: Run) -> list[CategoryCounts]:
    """The distribution over all domains together: their categories are the same."""
    data: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for entry in run.audit["phases"] if run.audit else ():
        data.update(entry["instances_per_class"])
    for phase in run.memory.phases if run.memory else ():
        kept.update({x.name: x.objects_in_exemplars for x in phase.classes})
    return [
        CategoryCounts(name, 1, count, kept[name] if run.memory else None)
        for name, count in data.items()
    ]


def pseudo_per_pass(stages: Sequence[Stage]) -> dict[str, float] | None:
    """Pseudo-labels by category in one pass over each phase's images, summed over the phases.

    A stage counts them on the images it saw since its start, each as often as it saw it.
    """
    total: defaultdict[str, float] | None = None
    for stage in stages:
        pseudo, images = stage.facts.get("pseudo"), stage.number("images")
        if stage.name == "train" and images and isinstance(pseudo, dict) and pseudo.get("images"):
            total = total or defaultdict(float)
            for name, count in pseudo.get("per_category", {}).items():
                total[name] += count / pseudo["images"] * images
    return total


@dataclass(frozen=True)
class Span:
    """The training steps of a stage within the whole run."""

    phase: int
    stage: str
    first: int
    last: int


def training_spans(run: Run) -> list[Span]:
    """Where the curves of each training stage lie; the last may be under way."""
    spans, first = [], 0
    for stage in run.stages:
        if stage.steps:
            spans.append(Span(stage.phase, stage.name, first, first + stage.span))
            first += stage.span
    reached = int(run.curve[-1]["iteration"]) + 1 if run.curve else 0
    if run.under_way and reached > first:
        spans.append(Span(*run.under_way, first, reached))
    return spans


def curve_of(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """A logged quantity: the steps at which it is known and finite, and its values."""
    steps = np.array([int(point["iteration"]) + 1 for point in run.curve])
    values = np.array([point.get(key, math.nan) for point in run.curve])
    known = np.isfinite(values)
    return steps[known], values[known]


def settings_in_use(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run obeys; those that another one overrules are dropped.

    Such as the settings of a part that is not enabled, the schedule of a first phase that was
    taken over, or the class counts where the categories of each phase are listed.
    """
    off = [
        key.removesuffix("ENABLED")
        for key, value in settings.items()
        if key.endswith(".ENABLED") and not value
    ]
    unused = ["MODEL.DETR.NUM_CLASSES"]  # it follows from the data
    if "METHOD.CALIBRATE." in off:
        unused.append("SCHEDULE.CALIBRATE.")
    if settings.get("MODEL.DETECTOR"):
        unused.append("SCHEDULE.FIRST.")
    if settings.get("SCENARIO.PHASES"):
        unused += ["SCENARIO.NAME", "SCENARIO.ORDER"]
    if len(settings.get("DATASETS.TRAIN", ())) > 1:  # a data set for each phase
        domains = settings.get("SCENARIO.PROTOCOL") == "domains"
        kept = ("SCENARIO.PROTOCOL",) if domains else ()
        unused += [key for key in settings if key.startswith("SCENARIO.") and key not in kept]
    if any(key.startswith("LAZY.model.") for key in settings):
        unused += [key for key in settings if key.startswith("MODEL.") and key not in _WEIGHTS]
    return {
        key: value
        for key, value in settings.items()
        if not key.startswith(tuple(unused))
        if not any(key.startswith(part) and key != f"{part}ENABLED" for part in off)
    }


def settings_set(settings: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Settings in use that are not the defaults, as (key, default, the run's value)."""
    defaults = identity(default_config())
    used = settings_in_use(settings).items()
    return [(key, defaults.get(key), value) for key, value in used if value != defaults.get(key)]


def settings_that_differ(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Settings in which runs differ, as key → each run's value, None where it is not in use.

    Seeds, and the file of a first phase that was taken over, are no differences.
    """
    used = [settings_in_use(settings) for settings in runs]
    keys = dict.fromkeys(key for one in used for key in one)
    table = {key: [one.get(key) for one in used] for key in keys}
    return {
        key: values
        for key, values in table.items()
        if key not in (*_SEEDS, "MODEL.DETECTOR", "METHOD.NAME")
        if len({json.dumps(value) for value in values if value is not None}) > 1
    }


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seeds, shown as one with its spread."""

    label: str
    runs: tuple[Run, ...]

    def curve(self, name: str) -> list[tuple[int, float]]:
        """AP of "all", "old" or "new" by phase, as (phase, mean over runs).

        The curve of "old" begins with the first phase's own AP: what there is to forget. Only the
        runs that have come furthest count, so that every point is a mean over the same ones.
        """
        evaluated = [run.results["phases"] for run in self.runs if run.results]
        furthest = max((len(phases) for phases in evaluated), default=0)
        values: defaultdict[int, list[float]] = defaultdict(list)
        for phases in evaluated:
            for entry in phases if len(phases) == furthest else ():
                scores = entry["all"] if name == "old" and entry["phase"] == 1 else entry[name]
                if scores is not None and scores["AP"] is not None:
                    values[entry["phase"]].append(scores["AP"])
        return [(phase, fmean(found)) for phase, found in sorted(values.items())]

    @property
    def finished(self) -> list[Run]:
        """Those of its runs that have come to their end."""
        return [run for run in self.runs if run.finished]

    def finals(self, column: str) -> list[float]:
        """A metric (see `value_of`) of each finished run that has it."""
        values = [value_of(results, column) for results in self._results()]
        return [value for value in values if value is not None]

    def final_by_category(self) -> dict[str, float]:
        """The mean AP of each category after the last phase, over the finished runs."""
        values: defaultdict[str, list[float]] = defaultdict(list)
        for results in self._results():
            for name, scores in results["phases"][-1]["per_category"].items():
                values[name] += [] if scores["AP"] is None else [scores["AP"]]
        return {name: fmean(found) for name, found in values.items() if found}

    def final_by_domain(self, names: Sequence[str]) -> list[list[float]]:
        """AP on each domain after the last phase, their mean and what was lost, of each run."""
        found: list[list[float]] = [[] for _ in (*names, "mean", "forgetting")]
        for domains in (run.domains for run in self.finished if run.domains):
            final = dict(zip(domains["names"], domains["matrix"][-1], strict=True))
            row = [*map(final.get, names), domains["mean"][-1], domains["mean_forgetting"]]
            for values, value in zip(found, row, strict=True):
                values += [] if value is None else [value]
        return found

    def confused(self, objects: str, key: str) -> list[float]:
        """Of the "old" or "new" objects those that are "correct", "as_new" and so on, in percent.

        After the last phase of each finished run that has such objects; where the phases are
        domains, no category is old or new.
        """
        counted = [run for run in self.finished if not run.domains]
        summaries = [run.confusion["summary"] for run in counted if run.confusion]
        found = [summary[objects] for summary in summaries]
        return [100 * counts[key] / counts["objects"] for counts in found if counts["objects"]]

    def _results(self) -> list[dict[str, Any]]:
        return [run.results for run in self.finished if run.results]


def mean_of(values: Sequence[float]) -> tuple[float, float | None] | None:
    """The mean and the half width of its 95% interval; None without values.

    Two values have no interval here: Student's t makes it twelve times their deviation.
    """
    if not values:
        return None
    mean, half = mean_interval(values)
    return mean, half if len(values) > 2 else None


def mean_text(values: Sequence[float]) -> str:
    """The mean and its interval as people write them."""
    mean, half = mean_of(values) or (None, None)
    return signed(mean) if half is None else f"{signed(mean)} ± {signed(half)}"


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Puts together runs that differ in nothing but their seeds, and names each group."""
    members: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        # Where the first phase is shared, each seed has a file of its own.
        rest = {k: v for k, v in run.settings.items() if k not in (*_SEEDS, "MODEL.DETECTOR")}
        members[json.dumps(rest, sort_keys=True) if rest else str(run.folder)].append(run)
    groups: list[Sequence[Run]] = []
    for found in members.values():
        seeds = {tuple(run.settings.get(key) for key in _SEEDS) for run in found}
        groups += [found] if len(seeds) == len(found) else [[run] for run in found]
    labels = [group[0].method for group in groups]
    if len({run.scenario_name for run in runs}) > 1:
        labels = [f"{group[0].method}, {group[0].scenario_name}" for group in groups]
    folders = [group[0].folder.resolve() for group in groups]
    ends = _distinct_ends(  # a sweep has the seeds of a config in one folder
        [x.parent if len(group) > 1 else x for x, group in zip(folders, groups, strict=True)]
    )
    return [
        Group(f"{label} ({end})" if labels.count(label) > 1 else label, tuple(group))
        for label, end, group in zip(labels, ends, groups, strict=True)
    ]


def _distinct_ends(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        ends = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(ends)) == len(ends):
            break
    return ends
