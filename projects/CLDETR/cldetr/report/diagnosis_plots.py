"""Plots of a diagnosis: how good pseudo-labels are by setting and by class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from cldetr.report.diagnostics import Diagnosis

_MOST_CLASSES = 40  # in a plot
_COLORS = {"precision": "#1b6ca8", "recall": "#c8553d", "F1": "#2f2f2f"}


def draw_settings(diagnosis: Diagnosis) -> Figure:
    """Precision, recall and F1 by score, K and λ, each from the recommended setting."""
    counts, best = diagnosis.counts, diagnosis.best
    grid, rule = counts.grid, diagnosis.rule
    figure, axes = _figure(10.5, 3.6, 3)
    curves = {"precision": counts.precision(), "recall": counts.recall(), "F1": counts.f1()}
    topk = rule.select == "topk"
    own = {2: rule.foreground if topk and not diagnosis.softmax else None, 0: None, 1: rule.iou}
    own[0] = rule.k if topk else None
    panels = ((2, "least score", grid.score), (0, "K", grid.k), (1, "λ", grid.iou))
    for axes_, (axis, title, values) in zip(axes, panels, strict=True):
        for name, values_3d in curves.items():
            index: list[Any] = list(best)
            index[axis] = slice(None)
            axes_.plot(
                values,
                values_3d[tuple(index)],
                color=_COLORS[name],
                marker="o",
                markersize=3.5,
                linewidth=2.2 if name == "F1" else 1.4,
                label=name,
            )
        chosen = values[best[axis]]
        axes_.axvline(chosen, color="#2f2f2f", alpha=0.25, linewidth=5)
        if own[axis] is not None:
            axes_.axvline(own[axis], color="#7a7a7a", linestyle="--", linewidth=1)
        axes_.set_xlabel(f"{title} (recommended: {chosen:g})")
        axes_.grid(alpha=0.3)
        if axis == 0:
            axes_.set_xscale("log")
            ticks = [value for value in (1, 2, 5, 10, 20, 50, 100, 300) if value <= max(values)]
            axes_.set_xticks(ticks, [str(tick) for tick in ticks])
            axes_.minorticks_off()
    axes[0].set_ylim(0, 1.02)
    axes[0].set_ylabel("against the hidden objects")
    axes[-1].legend(loc="lower right", framealpha=0.9)
    figure.suptitle(
        f"Pseudo-labels on {counts.images} images of phase {diagnosis.phase}", fontsize=12
    )
    return figure


def draw_classes(diagnosis: Diagnosis) -> Figure:
    """Precision and recall of each class at the recommended setting."""
    counts, best = diagnosis.counts, diagnosis.best
    labels = sorted(diagnosis.names, key=lambda label: -counts.hidden[label])[:_MOST_CLASSES]
    rows = np.arange(len(labels))
    figure, (axes,) = _figure(7.5, 1.4 + 0.34 * len(labels))
    right, given = counts.right[best][labels], counts.given[best][labels]
    hidden = counts.hidden[labels]
    rates = {"precision": right / np.maximum(given, 1), "recall": right / np.maximum(hidden, 1)}
    for shift, (name, values) in zip((-0.19, 0.19), rates.items(), strict=True):
        axes.barh(rows + shift, values, 0.36, color=_COLORS[name], label=name)
    texts = [f"{diagnosis.names[x]}  ({count})" for x, count in zip(labels, hidden, strict=True)]
    axes.set_yticks(rows, texts)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    few = f" ({len(labels)} of {len(diagnosis.names)} classes)"
    axes.set_xlabel(
        "against the hidden objects, whose number is given"
        + few * (len(labels) < len(diagnosis.names))
    )
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    figure.suptitle(
        f"Phase {diagnosis.phase}, {setting_text(diagnosis.setting(best))}",
        fontsize=12,
        x=0.02,
        ha="left",
    )
    return figure


def setting_text(setting: Mapping[str, float]) -> str:
    """A setting in words."""
    return f"K {setting['k']}, λ {setting['iou']:g}, score > {setting['score']:g}"


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False, sharey=True)[0]
    return figure, list(axes)
