"""The page that compares runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cldetr.report.ap_plots import ap_over_phases, comparison_by_category, final_ap
from cldetr.report.page import duration, save_plots, show_value, write_page
from cldetr.report.plotting import signed
from cldetr.report.rundir import Run
from cldetr.report.tables import Group, group_runs, mean_of, settings_that_differ


def write_comparison(runs: Sequence[Run], folder: Path) -> Path:
    """Writes the page and the plots as files into a folder; returns the page."""
    groups = group_runs(runs)
    drawn = [final_ap(groups), ap_over_phases(groups), comparison_by_category(groups)]
    names = sorted({run.scenario_name for run in runs})
    several = f"{len(groups)} methods on {', '.join(names)}"
    label = {id(run): group.label for group in groups for run in group.runs}
    return write_page(
        folder / "index.html",
        "comparison.html",
        title=several if len(groups) > 1 else groups[0].label,
        runs=runs,
        groups=groups,
        plots=save_plots(drawn, folder / "figures"),
        problems=[f"{run.folder.name}: {problem}" for run in runs for problem in run.problems],
        results=[_result_row(group) for group in groups],
        settings=_settings(groups),
        directories=[[label[id(run)], run.folder.resolve(), run.state] for run in runs],
    )


def _result_row(group: Group) -> list[str]:
    ended = [run for run in group.runs if run.finished]
    few = f" of {len(group.runs)}" if len(ended) < len(group.runs) else ""
    given = "*" if any(run.first_phase_given for run in ended) else ""
    time = duration(sum(run.seconds for run in ended) / len(ended)) + given if ended else ""
    columns = [group.finals("all", metric) for metric in ("AP", "AP50", "AP75")]
    columns += [group.finals("old"), group.finals("new")]
    columns += [group.numbers("fpp"), group.numbers("average_AP")]
    return [group.label, f"{len(ended)}{few}", *(_mean(values) for values in columns), time]


def _mean(values: Sequence[float]) -> str:
    mean, half = mean_of(values) or (None, None)
    return signed(mean) if half is None else f"{signed(mean)} ± {signed(half)}"


def _settings(groups: Sequence[Group]) -> dict[str, Any] | None:
    """Settings in which the groups differ, a column for each."""
    known = [group for group in groups if group.runs[0].settings]
    found = settings_that_differ([group.runs[0].settings for group in known])
    rows = [[key, *map(show_value, values)] for key, values in found.items()]
    return {"labels": [group.label for group in known], "rows": rows} if rows else None
