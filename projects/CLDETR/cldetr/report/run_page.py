"""The page of one run: what was run, what came out, what it cost."""

from __future__ import annotations

from pathlib import Path

from cldetr.evaluation.average_precision import METRICS
from cldetr.report.ap_plots import ap_over_phases, category_change_plot
from cldetr.report.page import MAX_PICTURES, embed_pictures, save_plots, write_page
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
    problems = list(run.problems)
    found = [(key.partition(".")[0], key, *values) for key, *values in settings_set(run.settings)]
    order = [*_PARTS, *(part for part, *_ in found)]
    found.sort(key=lambda row: order.index(row[0]))
    return write_page(
        folder / "index.html",
        "run.html",
        run=run,
        plots=save_plots(drawn, folder / "figures"),
        pictures=embed_pictures(run.pictures[:MAX_PICTURES], problems),
        diagnostics=embed_pictures(run.diagnostics[:MAX_PICTURES], problems),
        problems=problems,
        metrics=list(METRICS),
        changes=category_changes(run.results),
        settings=[(_PARTS.get(part, part), *row) for part, *row in found],
    )
