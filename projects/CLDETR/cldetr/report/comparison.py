"""The page that compares runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cldetr.report.ap_plots import ap_over_phases, comparison_by_category, final_ap
from cldetr.report.page import save_plots, write_page
from cldetr.report.rundir import Run
from cldetr.report.tables import group_runs, settings_that_differ


def write_comparison(runs: Sequence[Run], folder: Path) -> Path:
    """Writes the page and the plots as files into a folder; returns the page."""
    groups = group_runs(runs)
    known = [group for group in groups if group.runs[0].settings]
    drawn = [final_ap(groups), ap_over_phases(groups), comparison_by_category(groups)]
    return write_page(
        folder / "index.html",
        "comparison.html",
        runs=runs,
        groups=groups,
        plots=save_plots(drawn, folder / "figures"),
        problems=[f"{run.folder.name}: {problem}" for run in runs for problem in run.problems],
        known=known,
        differences=settings_that_differ([group.runs[0].settings for group in known]),
    )
