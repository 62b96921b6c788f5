"""The page of one run: what was run, what came out, what it cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cldetr.data.manifest import scenario_hash
from cldetr.engine.average_precision import METRICS
from cldetr.engine.from_yaml import recipe_from_yaml
from cldetr.report.ap_plots import ap_over_phases, category_change_plot
from cldetr.report.audit_page import leakage, phase_table
from cldetr.report.figures import save_plot
from cldetr.report.markup import Markup, tag
from cldetr.report.page import (
    Section,
    duration,
    metric_cells,
    number,
    show_pictures,
    show_plot,
    show_problems,
    show_value,
    table,
    table_row,
    write_page,
)
from cldetr.report.plotting import Plot
from cldetr.report.rundir import Run
from cldetr.report.tables import Group, category_changes, differences_from
from cldetr.report.training_plots import distribution_plot, stages_plot, training_plot

_PAPER = Path(__file__).parents[4] / "configs/70_10.yaml"
_PARTS = {  # what the first word of a setting is about, in the order of the page
    "scenario": "Scenario",
    "data": "Data",
    "method": "Method",
    "model": "Detector",
    "schedule": "Schedule",
    "optimizer": "Optimizer",
    "augmentation": "Augmentation",
    "seed": "Seed",
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
    plots = {plot.name: plot for plot in drawn if plot is not None}
    for plot in plots.values():
        save_plot(plot, folder / "figures")
    problems = list(run.problems)
    pictures = show_pictures(run.pictures, problems)
    diagnostics = show_pictures(run.diagnostics, problems)
    head = [_title(run), _summary(run), show_problems(problems), _tiles(run)]
    sections = [
        _results(run),
        _plotted("phases", "AP over phases", plots.get("ap_over_phases")),
        _categories(run, plots.get("category_change")),
        _plotted("distribution", "Category distribution", plots.get("category_distribution")),
        Section("pictures", "Pictures", pictures) if run.pictures else None,
        Section("diagnostics", "Pseudo-label diagnostics", diagnostics)
        if run.diagnostics
        else None,
        _plotted("training", "Training curves", plots.get("training")),
        _stages(run, plots.get("time_and_memory")),
        _data(run),
        _settings(run),
        _provenance(run),
    ]
    path = folder / "index.html"
    write_page(path, f"{run.method}, {run.scenario_name}", head, sections)
    return path


def _title(run: Run) -> Markup:
    if run.finished:
        status = "finished"
    elif run.under_way:
        status = f"not finished: phase {run.under_way[0]}, {run.under_way[1]}"
    else:
        status = "not finished"
    return tag("h1", f"{run.method}, {run.scenario_name}", tag("span", status, class_="badge"))


def _summary(run: Run) -> Markup:
    """One sentence about what was run."""
    parts = []
    if run.scenario is not None:
        sizes = " + ".join(str(len(phase.classes)) for phase in run.scenario.phases)
        images = sum(len(phase.image_ids) for phase in run.scenario.phases)
        parts.append(
            f"{sizes} categories, {images:,} training images, {run.scenario.protocol} protocol"
        )
    identity = run.identity or {}
    data = identity.get("data", {}).get("train") or []
    if data:
        parts.append(", ".join(_file_name(str(one)) for one in data))
    seconds = sum(stage.number("seconds") or 0.0 for stage in run.stages)
    if seconds:
        given = any(stage.facts.get("given") for stage in run.stages)
        parts.append(f"{duration(seconds)} in all stages" + " (phase 1 was given)" * given)
    return tag("p", "; ".join(parts) + "." if parts else None, class_="muted")


def _file_name(reference: str) -> str:
    return reference.partition(".json:")[0].rsplit("/", 1)[-1]


def _tiles(run: Run) -> Markup:
    if run.results is None:
        return tag("p", "No phase is evaluated yet.")
    last = run.results["phases"][-1]
    after = f"after phase {last['phase']}"
    tiles = [("AP, all categories", last["all"]["AP"], after)]
    if last["old"] is not None:
        tiles += [("AP, old", last["old"]["AP"], after), ("AP, new", last["new"]["AP"], after)]
    if run.results["fpp"] is not None:
        tiles.append(("FPP", run.results["fpp"]["AP"], "points lost on phase 1"))
    if run.results["gap_to_joint"] is not None:
        tiles.append(("gap to joint", run.results["gap_to_joint"]["AP"], "points of AP"))
    return tag(
        "ul",
        [
            tag("li", tag("span", name), tag("b", number(v)), tag("span", what))
            for name, v, what in tiles
        ],
        class_="tiles",
    )


def _results(run: Run) -> Section | None:
    if run.results is None:
        return None
    rows = []
    for entry in run.results["phases"]:
        names = ("all",) if entry["old"] is None else ("all", "old", "new")
        for name in names:
            label = f"after phase {entry['phase']}" if name == names[0] else ""
            cells = [label, name, *metric_cells(entry[name], METRICS)]
            rows.append(table_row(cells, 2, "first" if label else None))
    for label, group, field in (
        ("FPP", "phase 1", "fpp"),
        ("gap to joint", "all", "gap_to_joint"),
    ):
        if run.results[field] is not None:
            cells = [label, group, *metric_cells(run.results[field], METRICS)]
            rows.append(table_row(cells, 2, "first strong"))
    content = [
        table(["", "categories", *METRICS], rows, 2, grouped=True),
        tag(
            "p",
            "In percent, as COCO computes them; n/a: no such object to find. FPP, forgetting "
            "percentage points: what the categories of the first phase lost since they were "
            "learnt, so less is better.",
            class_="muted",
        ),
    ]
    if len(run.results["phases"]) > 2:
        content += [_matrix(run.results), _run_numbers(run.results)]
    return Section("results", "Results", Markup("".join(content)))


def _matrix(results: dict[str, Any]) -> Markup:
    """AP after each phase on the categories of each phase, shaded by value."""
    matrix = results["matrix"]
    highest = max((ap for row in matrix for ap in row if ap is not None), default=0.0) or 1.0
    rows = []
    for i, row in enumerate(matrix):
        cells: list[Markup | str] = [f"after phase {i + 1}"]
        for j, ap in enumerate(row):
            strength = 0.0 if ap is None else 0.42 * ap / highest
            text = number(ap) if j <= i else ""
            cells.append(tag("td", text, style=f"background:rgba(var(--heat),{strength:.2f})"))
        rows.append(cells)
    header = ["AP on categories of", *(f"phase {j + 1}" for j in range(len(matrix)))]
    return Markup(tag("h3", "Each phase's categories over time") + table(header, rows))


def _run_numbers(results: dict[str, Any]) -> Markup:
    numbers = (
        ("Average AP over phases", "average_AP"),
        ("Average forgetting (Chaudhry et al., 2018)", "forgetting"),
        ("Backward transfer (Lopez-Paz and Ranzato, 2017)", "backward_transfer"),
    )
    return table(["", "points"], [[name, number(results[key])] for name, key in numbers])


def _categories(run: Run, plot: Plot | None) -> Section | None:
    if run.results is None or plot is None:
        return None
    changes = category_changes(run.results)
    rows = [
        [
            change.name,
            change.phase,
            number(change.first),
            number(change.last),
            number(change.difference, plus=True),
        ]
        for change in changes
    ]
    header = ["category", "phase", "AP when learnt", "AP at the end", "change"]
    listed = tag("details", tag("summary", "All categories as a table"), table(header, rows))
    content = Markup(show_plot(plot, "run", heading=False) + listed)
    return Section("categories", "What was forgotten, what was learnt", content)


def _plotted(name: str, title: str, plot: Plot | None) -> Section | None:
    return None if plot is None else Section(name, title, show_plot(plot, "run", heading=False))


def _stages(run: Run, plot: Plot | None) -> Section | None:
    if not run.stages:
        return None
    rows = []
    for stage in run.stages:
        seconds, memory = stage.number("seconds"), stage.number("memory_mb")
        images = stage.number("images")
        rows.append(
            [
                f"phase {stage.phase}",
                f"{stage.name} (given)" if stage.facts.get("given") else stage.name,
                f"{images:,.0f}" if images else "",
                f"{stage.steps:,}" if stage.steps else "",
                duration(seconds),
                f"{seconds / stage.steps:.3f}" if seconds and stage.steps else "",
                f"{memory / 1024:.2f} GB" if memory else "",
            ]
        )
    header = ["", "stage", "images", "steps", "time", "s/step", "peak memory"]
    listed = table(header, rows, 2)
    if plot is not None:
        listed = tag("details", tag("summary", "All stages as a table"), listed)
        listed = Markup(show_plot(plot, "run", heading=False) + listed)
    return Section("stages", "Time and memory", listed)


def _data(run: Run) -> Section | None:
    if run.audit is None:
        return None
    content = Markup(phase_table(run.audit) + leakage(run.audit))
    return Section("data", "Data and split", content)


def _settings(run: Run) -> Section | None:
    if run.identity is None or not _PAPER.is_file():
        return None
    reference = recipe_from_yaml(str(_PAPER)).identity()
    found = differences_from(reference, run.identity)
    order = list(_PARTS)
    found.sort(key=lambda item: order.index(p) if (p := item[0].partition(".")[0]) in order else 99)
    rows = []
    part_before = None
    for key, paper, ours in found:
        part, _, rest = key.partition(".")
        name = _PARTS.get(part, part) if part != part_before else ""
        cells = [
            name,
            tag("td", tag("code", rest or part), class_="text"),
            tag("td", show_value(paper), class_="value"),
            tag("td", show_value(ours), class_="value"),
        ]
        rows.append(table_row(cells, 1, "first" if name else None))
        part_before = part
    content = [
        tag(
            "p",
            "Settings in which this run differs from the paper's 70+10 on COCO 2017 "
            "(configs/70_10.yaml); all others are the same."
            if rows
            else "The settings are those of the paper's 70+10 on COCO 2017.",
            class_="muted",
        )
    ]
    if rows:
        content.append(table(["", "setting", "paper", "this run"], rows, 4, grouped=True))
    whole = json.dumps(run.identity, indent=1, ensure_ascii=False)
    content.append(
        tag(
            "details", tag("summary", "All settings"), tag("pre", tag("code", whole), class_="wide")
        )
    )
    return Section("settings", "Settings", Markup("".join(content)))


def _provenance(run: Run) -> Section:
    rows: list[list[str]] = [["Run directory", str(run.folder.resolve())]]
    if run.scenario is not None:
        rows.append(["Manifest", scenario_hash(run.scenario)])
        for source, fingerprint in run.scenario.fingerprints:
            rows.append([f"Annotations ({source})", fingerprint])
    if run.memory is not None:
        rows.append(["Exemplars", ", ".join(_exemplars(run))])
    for place, start in enumerate(run.starts):
        versions = ", ".join(
            f"{name} {version}" for name, version in start["versions"].items() if version
        )
        processes = start["processes"]
        how = f"{start['device']}, {processes} process{'es' if processes > 1 else ''}"
        name = "Started" if place == 0 else "Resumed"
        rows.append([name, f"{start['time']} on {how}; {versions}"])
    body = [
        [tag("td", name, class_="text"), tag("td", value, class_="value")] for name, value in rows
    ]
    content = table(["", ""], body, 2)
    return Section("provenance", "Where it comes from", content)


def _exemplars(run: Run) -> list[str]:
    assert run.memory is not None
    return [
        f"phase {chosen.index}: {len(chosen.image_ids):,} images by {chosen.strategy!r}"
        for chosen in run.memory.phases
    ]
