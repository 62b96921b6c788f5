"""Plots of a diagnosis: how good pseudo-labels are by setting and by class."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from cldetr.analysis.diagnose import Diagnosis
from cldetr.analysis.pictures import add_captions
from cldetr.report import plotting
from cldetr.report.plotting import COLOURS, INK, MUTED, Key, Panel, Plot

_RATES = {"precision": COLOURS[0], "recall": COLOURS[1], "F1": INK}


def write_diagnosis_plots(diagnoses: Sequence[Diagnosis], folder: Path) -> None:
    """Draws diagnoses into `diagnostics`, with `captions.json` beside the plots."""
    captions = {}
    for plot, text in (draw(x) for x in diagnoses for draw in (_settings, _classes)):
        plotting.save_plot(plot, folder / "diagnostics")
        captions[f"{plot.name}.png"] = text
    add_captions(folder / "diagnostics", captions)


def _settings(diagnosis: Diagnosis) -> tuple[Plot, str]:
    """Precision, recall and F1 by score, K and λ, each from the recommended setting; a caption."""
    grid, rule = diagnosis.grid, diagnosis.rule
    topk = rule.select == "topk"
    foreground = rule.foreground if topk and not diagnosis.softmax else None
    axes: list[tuple[str, int, Sequence[float], float | None]] = [
        ("least score", 2, grid.score, foreground),
        ("K", 0, grid.k, rule.k if topk else None),
        ("λ", 1, grid.iou, rule.iou),
    ]
    panels = [
        Panel(f"By {axis[0]}", functools.partial(_draw_axis, diagnosis, *axis)) for axis in axes
    ]
    text = (
        f"How good the pseudo-labels of phase {diagnosis.phase} are by score, K and λ, on "
        f"{diagnosis.counts.images} images. Each curve changes one of them from the recommended "
        "setting (wide line); the dashed line is the run's own value."
    )
    legend = [Key(name, colour) for name, colour in _RATES.items()]
    return Plot(f"phase{diagnosis.phase}_settings", panels, legend), text


def _classes(diagnosis: Diagnosis) -> tuple[Plot, str]:
    """Precision and recall of each class at the recommended setting, and a caption."""
    hidden = diagnosis.counts.hidden
    labels = sorted(diagnosis.names, key=lambda label: -hidden[label])
    panels = plotting.row_panels("Old classes", labels, functools.partial(_draw_classes, diagnosis))
    text = (
        f"Pseudo-labels of phase {diagnosis.phase} by class, at the recommended setting "
        f"({diagnosis.recommended_text}), against the hidden objects, whose number is given."
    )
    wide = [Panel(x.title, x.draw, round(1.3 * x.height), 2 * plotting.WIDTH) for x in panels]
    legend = [Key(name, _RATES[name], "s") for name in ("precision", "recall")]
    return Plot(f"phase{diagnosis.phase}_classes", wide, legend), text


def _draw_axis(
    diagnosis: Diagnosis,
    name: str,
    axis: int,
    values: Sequence[float],
    own: float | None,
    ax: Axes,
) -> None:
    counts, best = diagnosis.counts, diagnosis.best
    index: list[Any] = [*best[:axis], slice(None), *best[axis + 1 :]]
    rates = counts.rates()
    for rate, colour in _RATES.items():
        ax.plot(values, rates[rate.lower()][tuple(index)], color=colour, marker="o", markersize=3.5)
    ax.axvline(values[best[axis]], color=MUTED, alpha=0.35, linewidth=5)
    if own is not None:
        ax.axvline(own, color=MUTED, linestyle="--", linewidth=1)
    if name == "K":
        ax.set_xscale("log")
        ticks = [value for value in (1, 2, 5, 10, 20, 50, 100, 300) if value <= max(values)]
        ax.set_xticks(ticks, [str(tick) for tick in ticks])
        ax.minorticks_off()
    ax.set(ylim=(0, 1.02), xlabel=f"{name} (recommended: {values[best[axis]]:g})")


def _draw_classes(diagnosis: Diagnosis, labels: Sequence[int], ax: Axes) -> None:
    for row, label in enumerate(labels):
        rates = diagnosis.counts.rates([label])
        for shift, name in ((-0.19, "precision"), (0.19, "recall")):
            value = np.nan_to_num(rates[name][diagnosis.best])
            ax.barh(row + shift, value, 0.36, color=_RATES[name])
    hidden = diagnosis.counts.hidden
    plotting.name_rows(ax, [f"{diagnosis.names[label]} ({hidden[label]})" for label in labels])
    ax.set_xlim(0, 1)
