"""Plots of what a run was trained on, how it went and what it took."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from cldetr.report import plotting
from cldetr.report.plotting import COLOURS, LINE, MUTED, Key, Panel, Plot, short_count
from cldetr.report.rundir import Run
from cldetr.report.tables import CategoryCounts, Span, category_counts, curve_of, training_spans

_SOURCES = {
    "data": Key("labelled objects of its phase", COLOURS[0], "o"),
    "exemplars": Key("of these, in exemplars", COLOURS[1], "D"),
    "pseudo": Key("pseudo-labels in one pass over later phases' images", COLOURS[2], "^"),
}
_CURVES = {  # logged quantities by panel, with their names in its legend
    "Loss (sum over all layers)": {"total_loss": ""},
    "Loss of the last layer": {
        "loss_cls": "class",
        "loss_bbox": "box L1",
        "loss_giou": "box GIoU",
    },
    "AP in the course of training (in %)": {  # TEST.EVAL_PERIOD, SCHEDULE.EARLY_STOP
        "held_out/AP": "held-out images",
        "all/AP": "all",
        "old/AP": "old",
        "new/AP": "new",
    },
    "Learning rate": {"lr": ""},
    "Labels per image": {
        "pseudo/truth_per_image": "ground truth",
        "pseudo/per_image": "pseudo-labels",
    },
    **{
        f"Share of {kind} that each decoder layer matches": {
            **{f"matched/{key}_{layer}": str(layer + 1) for layer in range(11)},
            f"matched/{key}": "last",
        }
        for key, kind in (("new", "new labels"), ("pseudo", "pseudo-labels"))
    },
}
_Curve = tuple[str, np.ndarray, np.ndarray]  # name, steps and values


def distribution_plot(run: Run) -> Plot:
    """How often each category occurs in data, exemplars and pseudo-labels."""
    counts = category_counts(run)
    counts.sort(key=lambda count: (count.phase, -(count.data or 0), count.name))
    shown = [name for name in _SOURCES if any(getattr(x, name) is not None for x in counts)]
    top = max((getattr(count, name) or 0 for count in counts for name in shown), default=0)
    draw = functools.partial(_draw_counts, shown, top)
    panels = plotting.row_panels("Objects of each category", counts, draw)
    return Plot("category_distribution", panels, [_SOURCES[name] for name in shown])


def training_plot(run: Run) -> Plot:
    """Losses, learning rate and pseudo-labels over the steps of all stages."""
    spans = training_spans(run)
    panels = []
    for title, keys in _CURVES.items():
        curves = [(name, *curve_of(run, key)) for key, name in keys.items()]
        curves = [curve for curve in curves if len(curve[1])]
        if curves:
            panels.append(Panel(title, functools.partial(_draw_curves, curves, spans)))
    return Plot("training", panels)


def stages_plot(run: Run) -> Plot:
    """Time and memory of each stage."""
    seconds, memory = (
        [(f"phase {x.phase}, {x.name}", v) for x in run.stages if (v := x.number(key)) is not None]
        for key in ("seconds", "memory_mb")
    )
    unit, size = "minutes", 60.0
    if max((value for _, value in seconds), default=0) < 90:
        unit, size = "seconds", 1.0
    times, sizes = (
        [(name, value / scale) for name, value in rows]
        for rows, scale in ((seconds, size), (memory, 1024))
    )
    panels = plotting.bar_panels(f"Time ({unit})", times, plotting.amount)
    panels += plotting.bar_panels("Peak memory (GB)", sizes, plotting.amount)
    return Plot("time_and_memory", panels)


def _draw_counts(
    sources: Sequence[str], top: float, rows: Sequence[CategoryCounts], ax: Axes
) -> None:
    for name in sources:
        key = _SOURCES[name]
        plotting.mark_rows(ax, [getattr(count, name) for count in rows], key.colour, key.marker)
    ax.set_xscale("symlog", linthresh=1, linscale=0.4)
    ax.set(xlim=(-0.3, max(top, 1) * 1.8), xlabel="objects")
    ax.xaxis.set_major_formatter(short_count)
    ax.xaxis.set_minor_locator(NullLocator())
    for row in range(1, len(rows)):
        if rows[row].phase != rows[row - 1].phase:
            ax.axhline(row - 0.5, color=MUTED, linewidth=0.8, linestyle=":")
    plotting.name_rows(ax, [count.name for count in rows], guides=True)


def _draw_curves(curves: Sequence[_Curve], spans: Sequence[Span], ax: Axes) -> None:
    log = ax.get_title(loc="left") == "Learning rate"
    ends = [span.last for span in spans]
    for index, (name, steps, values) in enumerate(curves):
        colour, marker = plotting.style_of(index)
        style: dict[str, Any] = {"color": colour, "linewidth": 1.5}
        style |= {"drawstyle": "steps-post"} if log else {}
        style |= {"marker": marker, "markersize": 4} if len(steps) < 12 else {}
        cuts = np.searchsorted(steps, ends, side="right")  # no line crosses to the next stage
        for part in zip(np.split(steps, cuts), np.split(values, cuts), strict=True):
            ax.plot(*part, **style)
        if name:
            ax.plot([], [], label=name, **style)
    ax.set_xlim(0, max([2, *(steps[-1] for _, steps, _ in curves), *ends]))
    every = np.concatenate([values for _, _, values in curves])
    if log:
        known = every[every > 0]
        ax.set(yscale="log", ylim=(known.min() / 3, known.max() * 3))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.set_ylim(0, (every.max() or 1.0) * 1.2)
    ax.set_xlabel("training step")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.xaxis.set_major_formatter(short_count)
    _mark_stages(ax, spans)
    if len(curves) > 1:
        ax.legend(ncols=len(curves))


def _mark_stages(ax: Axes, spans: Sequence[Span]) -> None:
    """Phases with their numbers above the axes, calibration shaded."""
    ax.set_title(ax.get_title(loc="left"), pad=19)
    for index, span in enumerate(spans):
        if span.stage == "calibrate":
            ax.axvspan(span.first, span.last, color=LINE, alpha=0.6, linewidth=0, zorder=0)
        if index == 0 or span.phase != spans[index - 1].phase:
            end = max(other.last for other in spans if other.phase == span.phase)
            wide = (end - span.first) / max(spans[-1].last, 1) > 0.25
            text = f"phase {span.phase}" if wide else str(span.phase)
            above = ax.get_xaxis_transform()
            ax.text(span.first, 1.01, text, transform=above, fontsize=9.5, color=MUTED)
            if index:
                ax.axvline(span.first, color=MUTED, linewidth=0.9, linestyle=":")
