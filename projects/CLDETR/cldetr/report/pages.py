"""Pages of runs and splits: HTML files that hold their plots and pictures and load nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from cldetr import __version__
from cldetr.data.manifest import scenario_hash
from cldetr.evaluation.confusion import total_confusions
from cldetr.evaluation.results import metric_names
from cldetr.files import atomic_path
from cldetr.report import ap_plots, detection_plots, tables, training_plots
from cldetr.report.plotting import Panel, Plot, bar_panels, panel_svg, save_plot, signed
from cldetr.report.rundir import Run
from cldetr.report.sweep_table import title, voc_columns
from cldetr.scenario import Scenario

_MAX_PICTURES = 24  # on a page
_MAX_WIDTH = 1600  # pixels of an embedded picture


def write_run_page(run: Run, folder: Path) -> Path:
    """Writes the page of one run, and its plots as files, into a folder; returns the page."""
    drawn = [
        ap_plots.ap_over_phases([tables.Group(run.method, (run,))]),
        ap_plots.domains_plot(run),
        ap_plots.category_change_plot(run),
        detection_plots.confusion_plot(run),
        detection_plots.precision_recall_plot(run),
        training_plots.distribution_plot(run),
        training_plots.training_plot(run),
        training_plots.stages_plot(run),
    ]
    one_group = run.domains and run.confusion
    problems = list(run.problems)
    return _write_page(
        folder / "index.html",
        "run.html",
        run=run,
        plots=_save_plots(drawn, folder),
        pictures=_embed(run.pictures, problems),
        diagnostics=_embed(run.diagnostics, problems),
        problems=problems,
        changes=tables.category_changes(run.results),
        confusions=tables.largest_confusions(run.confusion),
        confused_in_all=total_confusions(one_group["summary"]) if one_group else None,
        settings=tables.settings_set(run.settings),
    )


def write_comparison(runs: Sequence[Run], folder: Path) -> Path:
    """Writes the page that compares runs, and its plots as files; returns the page."""
    groups = tables.group_runs(runs)
    known = [group for group in groups if group.runs[0].settings]
    drawn = [
        ap_plots.final_ap(groups),
        ap_plots.ap_over_phases(groups),
        ap_plots.comparison_by_category(groups),
    ]
    return _write_page(
        folder / "index.html",
        "comparison.html",
        runs=runs,
        groups=groups,
        plots=_save_plots(drawn, folder),
        known=known,
        voc=voc_columns(run.results for run in runs if run.finished and run.results),
        confused=[group for group in groups if group.confused("old", "correct")],
        differences=tables.settings_that_differ([group.runs[0].settings for group in known]),
    )


def write_audit_page(scenario: Scenario, audit: Mapping[str, Any], path: Path) -> None:
    """Writes the page of a split, and its plot as files beside it."""
    panels: list[Panel] = []
    for phase in audit["phases"]:
        ranked = sorted(phase["instances_per_class"].items(), key=lambda item: (-item[1], item[0]))
        panels += bar_panels(f"Phase {phase['index']}", ranked, _thousands)
    plots = _save_plots([Plot("categories_per_phase", panels)], path.parent)
    _write_page(path, "split.html", scenario=scenario, audit=audit, plots=plots)


def _write_page(path: Path, template: str, **content: Any) -> Path:
    """Renders a template of `templates/` and writes it, atomically; returns the path.

    All values are escaped; only the SVG of plots is markup.
    """
    environment = Environment(
        loader=PackageLoader("cldetr.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": signed,
        "cells": lambda scores, metrics: [signed(scores.get(metric)) for metric in metrics],
        "mean": tables.mean_text,
        "column_title": title,
        "thousands": _thousands,
        "share": lambda x, key: f"{signed(100 * x[key] / x['objects'])}% ({_thousands(x[key])})",
        "duration": _duration,
        "setting": _show_value,
        "yaml": lambda data: yaml.safe_dump(data, sort_keys=False, allow_unicode=True),
        "scenario_hash": scenario_hash,
    }
    environment.globals |= {
        "panel_svg": panel_svg,
        "max_pictures": _MAX_PICTURES,
        "metric_names": metric_names,
        "version": __version__,
    }
    text = environment.get_template(template).render(content)
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")
    return path


def _save_plots(plots: Iterable[Plot], folder: Path) -> dict[str, Plot]:
    """Writes plots that have something to show into `figures`, and returns them by name."""
    drawn = {plot.name: plot for plot in plots if plot.panels}
    for plot in drawn.values():
        save_plot(plot, folder / "figures")
    return drawn


def _embed(pictures: Sequence[tuple[Path, str]], problems: list[str]) -> list[dict[str, Any]]:
    """The first picture files, as WebP of a width that a page can show, with their captions.

    Those that cannot be read are added to `problems`.
    """
    shown = []
    for path, caption in pictures[:_MAX_PICTURES]:
        stream = io.BytesIO()
        try:
            with Image.open(path) as image:
                small = image.convert("RGB")
            small.thumbnail((_MAX_WIDTH, small.height), Image.Resampling.LANCZOS)
            small.save(stream, "WEBP", quality=82)
        except (OSError, ValueError, SyntaxError) as error:
            problems.append(f"{path.parent.name}/{path.name}: {error}")
            continue
        source = f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}"
        broad = small.width > 1.5 * small.height
        shown.append({"source": source, "caption": caption, "broad": broad})
    return shown


def _thousands(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}"


def _duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _show_value(value: object) -> str:
    """A setting as people write it; nothing for one that is not used."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        parts = [f"[{_show_value(x)}]" if isinstance(x, list) else _show_value(x) for x in value]
        return ", ".join(parts) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"
