"""The page of one run: what was run, what came out, what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cldetr.data.manifest import scenario_hash
from cldetr.evaluation.average_precision import METRICS
from cldetr.report.ap_plots import ap_over_phases, category_change_plot
from cldetr.report.page import (
    duration,
    embed_pictures,
    save_plots,
    show_value,
    thousands,
    write_page,
)
from cldetr.report.plotting import signed
from cldetr.report.rundir import Run
from cldetr.report.tables import Group, category_changes, settings_set
from cldetr.report.training_plots import distribution_plot, stages_plot, training_plot

_PARTS = {  # what the first word of a setting is about, in the order of the page
    "SCENARIO": "Scenario",
    "DATASETS": "Data",
    "METHOD": "Method",
    "MODEL": "Detector",
    "LAZY": "LazyConfig",
    "SCHEDULE": "Schedule",
    "SOLVER": "Optimizer",
    "INPUT": "Augmentation",
    "TEST": "Evaluation",
    "SEED": "Seed",
}


def write_run_page(run: Run, folder: Path) -> Path:
    """Writes the page and the plots as files into a folder; returns the page."""
    drawn = [
        ap_over_phases([Group(run.method, (run,))]),
        category_change_plot(run),
        distribution_plot(run),
        training_plot(run),
        stages_plot(run),
    ]
    plots = {plot.name: plot for plot in save_plots(drawn, folder / "figures")}
    problems = list(run.problems)
    return write_page(
        folder / "index.html",
        "run.html",
        title=f"{run.method}, {run.scenario_name}",
        run=run,
        plots=plots,
        pictures=embed_pictures(run.pictures, problems),
        diagnostics=embed_pictures(run.diagnostics, problems),
        problems=problems,
        summary=_summary(run),
        tiles=_tiles(run.results),
        metrics=list(METRICS),
        results=_result_rows(run.results),
        changes=_change_rows(run.results),
        stages=_stage_rows(run),
        settings=_settings(run),
        provenance=_provenance(run),
    )


def _summary(run: Run) -> str:
    """One sentence about what was run."""
    parts = []
    if run.scenario is not None:
        sizes = " + ".join(str(len(phase.classes)) for phase in run.scenario.phases)
        images = sum(len(phase.image_ids) for phase in run.scenario.phases)
        parts.append(
            f"{sizes} categories, {images:,} training images, {run.scenario.protocol} protocol"
        )
    data = run.settings.get("DATASETS.TRAIN", ())
    if data:
        parts.append(", ".join(str(x).partition(".json:")[0].rsplit("/", 1)[-1] for x in data))
    if run.seconds:
        given = " (phase 1 was given)" if run.first_phase_given else ""
        parts.append(f"{duration(run.seconds)} in all stages{given}")
    return "; ".join(parts) + "." if parts else ""


def _tiles(results: dict[str, Any] | None) -> list[tuple[str, float | None, str]]:
    if results is None:
        return []
    last = results["phases"][-1]
    after = f"after phase {last['phase']}"
    tiles = [("AP, all categories", last["all"], after)]
    if last["old"] is not None:
        tiles += [("AP, old", last["old"], after), ("AP, new", last["new"], after)]
    tiles.append(("FPP", results["fpp"], "points lost on phase 1"))
    tiles.append(("gap to joint", results["gap_to_joint"], "points of AP"))
    return [(name, scores.get("AP"), what) for name, scores, what in tiles if scores is not None]


def _result_rows(results: dict[str, Any] | None) -> list[list[str]]:
    if results is None:
        return []
    rows = []
    for entry in results["phases"]:
        for name in ("all",) if entry["old"] is None else ("all", "old", "new"):
            label = f"after phase {entry['phase']}" if name == "all" else ""
            rows.append((label, name, entry[name]))
    rows += [("FPP", "phase 1", results["fpp"]), ("gap to joint", "all", results["gap_to_joint"])]
    return [
        [label, name, *(signed(scores.get(metric)) for metric in METRICS)]
        for label, name, scores in rows
        if scores is not None
    ]


def _change_rows(results: dict[str, Any] | None) -> list[list[object]]:
    return [
        [x.name, x.phase, signed(x.first), signed(x.last), signed(x.difference, plus=True)]
        for x in (category_changes(results) if results else ())
    ]


def _stage_rows(run: Run) -> list[list[str]]:
    rows = []
    for stage in run.stages:
        seconds, memory = stage.number("seconds"), stage.number("memory_mb")
        images = stage.number("images")
        rows.append(
            [
                f"phase {stage.phase}",
                f"{stage.name} (given)" if stage.facts.get("given") else stage.name,
                thousands(images) if images else "",
                thousands(stage.steps) if stage.steps else "",
                duration(seconds),
                f"{seconds / stage.steps:.3f}" if seconds and stage.steps else "",
                f"{memory / 1024:.2f} GB" if memory else "",
            ]
        )
    return rows


def _settings(run: Run) -> dict[str, Any] | None:
    """What is set, part by part, and everything as YAML."""
    if not run.settings:
        return None
    found = [(key.partition(".")[0], key, *values) for key, *values in settings_set(run.settings)]
    order = [*_PARTS, *(part for part, *_ in found)]
    rows: list[list[str]] = []
    shown = None
    for part, key, default, value in sorted(found, key=lambda item: order.index(item[0])):
        name = _PARTS.get(part, part) if part != shown else ""
        rows.append([name, key, show_value(default), show_value(value)])
        shown = part
    text = yaml.safe_dump(run.settings, sort_keys=False, allow_unicode=True)
    return {"rows": rows, "text": text}


def _provenance(run: Run) -> list[list[str]]:
    rows: list[list[str]] = [["Run directory", str(run.folder.resolve())]]
    if run.scenario is not None:
        rows.append(["Manifest", scenario_hash(run.scenario)])
        rows += [[f"Annotations ({name})", digest] for name, digest in run.scenario.fingerprints]
    if run.memory is not None:
        chosen = [
            f"phase {phase.index}: {len(phase.image_ids):,} images by {phase.strategy!r}"
            for phase in run.memory.phases
        ]
        rows.append(["Exemplars", ", ".join(chosen)])
    for index, start in enumerate(run.starts):
        versions = ", ".join(f"{name} {x}" for name, x in start["versions"].items() if x)
        processes = start["processes"]
        how = f"{start['device']}, {processes} process{'es' if processes > 1 else ''}"
        text = f"{start['time']} on {how}; {versions}"
        rows.append(["Resumed" if index else "Started", text])
    return rows
