"""The page that compares runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cldetr.report.ap_plots import ap_over_phases, comparison_by_category, final_ap
from cldetr.report.figures import save_plot
from cldetr.report.markup import Markup, tag
from cldetr.report.page import (
    Section,
    duration,
    number,
    show_plot,
    show_problems,
    show_value,
    table,
    write_page,
)
from cldetr.report.rundir import Run
from cldetr.report.tables import Group, group_runs, mean_of, settings_that_differ


def write_comparison(runs: Sequence[Run], folder: Path) -> Path:
    """Writes the page and the plots as files into a folder; returns the page."""
    groups = group_runs(runs)
    drawn = [final_ap(groups), ap_over_phases(groups), comparison_by_category(groups)]
    plots = [plot for plot in drawn if plot is not None]
    for plot in plots:
        save_plot(plot, folder / "figures")
    names = sorted({run.scenario_name for run in runs})
    title = f"{len(groups)} methods on {', '.join(names)}" if len(groups) > 1 else groups[0].label
    problems = [f"{run.folder.name}: {problem}" for run in runs for problem in run.problems]
    head = [
        tag("h1", title),
        tag("p", _summary(runs, groups), class_="muted"),
        show_problems(problems),
    ]
    sections = [
        Section("results", "Results", _results(groups)),
        *(
            Section(plot.name, plot.title, show_plot(plot, "comparison", heading=False))
            for plot in plots
        ),
        _settings(groups),
        Section("runs", "Runs", _runs(runs, groups)),
    ]
    path = folder / "index.html"
    write_page(path, title, head, sections)
    return path


def _summary(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    ended = sum(run.finished for run in runs)
    text = f"{len(runs)} runs, {ended} of them finished."
    if len(runs) > len(groups):
        text += (
            " Runs that differ in their seeds alone are taken together: mean, and with three or "
            "more of them its 95% interval."
        )
    if len({run.scenario_name for run in runs}) > 1:
        text += " They are of different scenarios, so their numbers are not of the same task."
    return text


def _results(groups: Sequence[Group]) -> Markup:
    header = ["", "runs", "AP", "AP50", "AP75", "old AP", "new AP", "FPP", "average AP", "time"]
    rows = []
    for group in groups:
        ended = [run for run in group.runs if run.finished]
        count = str(len(ended))
        if len(ended) < len(group.runs):
            count = f"{len(ended)} of {len(group.runs)}"
        times = [sum(stage.number("seconds") or 0.0 for stage in run.stages) for run in ended]
        stages = [stage for run in ended for stage in run.stages]
        given = "*" if any(stage.facts.get("given") for stage in stages) else ""
        rows.append(
            [
                group.label,
                count,
                *(_mean(group.finals("all", metric)) for metric in ("AP", "AP50", "AP75")),
                _mean(group.finals("old")),
                _mean(group.finals("new")),
                _mean(group.numbers("fpp")),
                _mean(group.numbers("average_AP")),
                duration(sum(times) / len(times)) + given if times else "",
            ]
        )
    text = (
        "In percent, after the last phase of finished runs. FPP: points that the categories of the "
        "first phase lost since they were learnt, so less is better. Average AP: the mean over "
        "phases of the AP on the categories seen by then. Time: of one run, all "
        "its stages; * without the first phase, which it took over."
    )
    return Markup(table(header, rows) + tag("p", text, class_="muted"))


def _mean(values: Sequence[float]) -> str:
    found = mean_of(values)
    if found is None:
        return "n/a"
    mean, half = found
    return number(mean) if half is None else f"{number(mean)} ± {number(half)}"


def _settings(groups: Sequence[Group]) -> Section | None:
    """Settings in which the groups differ, a column for each."""
    identities = [group.runs[0].identity for group in groups]
    known = [identity for identity in identities if identity is not None]
    if len(known) < 2:
        return None
    rows = [
        [
            tag("td", tag("code", key), class_="text"),
            *(tag("td", "" if v is None else show_value(v), class_="value") for v in values),
        ]
        for key, values in settings_that_differ(known).items()
    ]
    if not rows:
        return None
    labels = [group.label for group, identity in zip(groups, identities, strict=True) if identity]
    content = table(["setting", *labels], rows, 1 + len(labels))
    return Section("settings", "In what they differ", content)


def _runs(runs: Sequence[Run], groups: Sequence[Group]) -> Markup:
    label = {id(run): group.label for group in groups for run in group.runs}
    rows = [
        [
            tag("td", label[id(run)], class_="text"),
            tag("td", str(run.folder.resolve()), class_="value"),
            tag("td", _state(run), class_="text"),
        ]
        for run in runs
    ]
    return table(["", "directory", "state"], rows, 3)


def _state(run: Run) -> str:
    if run.finished:
        return "finished"
    return f"phase {run.under_way[0]}, {run.under_way[1]}" if run.under_way else "not finished"
