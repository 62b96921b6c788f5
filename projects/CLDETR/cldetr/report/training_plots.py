"""Plots of what a run was trained on, how it went and what it took."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from cldetr.report.plotting import (
    COLOURS,
    LINE,
    MUTED,
    Key,
    Panel,
    Plot,
    draw_amounts,
    mark_rows,
    name_rows,
    row_panels,
    short_count,
    style_of,
)
from cldetr.report.rundir import Run
from cldetr.report.tables import CategoryCounts, Span, category_counts, curve_of, training_spans

_SOURCES = (
    ("data", "labelled objects of its phase", COLOURS[0], "o"),
    ("exemplars", "of these, in exemplars", COLOURS[1], "D"),
    ("pseudo", "pseudo-labels in one pass over later phases' images", COLOURS[2], "^"),
)


def distribution_plot(run: Run) -> Plot | None:
    """How often each category occurs in data, exemplars and pseudo-labels."""
    counts = category_counts(run)
    counts.sort(key=lambda count: (count.phase, -(count.data or 0), count.name))
    shown = [
        source for source in _SOURCES if any(getattr(c, source[0]) is not None for c in counts)
    ]
    if not shown:
        return None
    top = max(getattr(count, name) or 0 for count in counts for name, *_ in shown)
    panels = row_panels(
        "Objects of each category", counts, lambda rows, ax: _draw_counts(rows, shown, top, ax)
    )
    text = "On a logarithmic scale, ordered by phase, the most frequent first."
    if any(count.exemplars is not None for count in counts):
        text += (
            " Exemplars that follow the distribution of the data stand at the same distance from "
            "it in every row of a phase."
        )
    legend = [Key(label, colour, marker) for _, label, colour, marker in shown]
    return Plot("category_distribution", "How categories are distributed", text, panels, legend)


def training_plot(run: Run) -> Plot | None:
    """Losses, learning rate and pseudo-labels over the steps of all stages."""
    spans = training_spans(run)
    panels = []
    for title, keys, log in (
        ("Loss (sum over all layers)", ("total_loss",), False),
        ("Loss of the last layer", ("loss_cls", "loss_bbox", "loss_giou"), False),
        ("Learning rate", ("lr",), True),
        ("Labels per image", ("pseudo/truth_per_image", "pseudo/per_image"), False),
    ):
        curves = {key: curve_of(run, key) for key in keys}
        curves = {key: curve for key, curve in curves.items() if curve[0]}
        if curves:
            panels.append(Panel(title, functools.partial(_draw_curves, curves, spans, log)))
    if not panels:
        return None
    text = "Over the training steps of all phases, whose numbers stand above. Shaded: calibration."
    return Plot("training", "Training", text, panels)


def stages_plot(run: Run) -> Plot | None:
    """Time and memory of each stage."""
    panels = []
    for title, key, scale in (("Time", "seconds", 60.0), ("Peak memory", "memory_mb", 1024.0)):
        rows = [
            (f"phase {stage.phase}, {stage.name}", value / scale)
            for stage in run.stages
            if (value := stage.number(key)) is not None
        ]
        if rows:
            unit = "minutes" if key == "seconds" else "GB"
            if key == "seconds" and max(value for _, value in rows) < 1.5:
                rows, unit = [(name, value * 60) for name, value in rows], "seconds"
            panels.append(
                Panel(
                    f"{title} ({unit})",
                    functools.partial(draw_amounts, rows),
                    70 + 20 * len(rows),
                )
            )
    if not panels:
        return None
    text = "Memory is the highest of the process, or of the GPU where there is one, up to then."
    return Plot("time_and_memory", "Time and memory", text, panels)


def _draw_counts(
    rows: Sequence[CategoryCounts], sources: Sequence[tuple[str, ...]], top: float, ax: Axes
) -> None:
    for name, _, colour, marker in sources:
        mark_rows(ax, [getattr(count, name) for count in rows], colour, marker)
    ax.set_xscale("symlog", linthresh=1, linscale=0.4)
    ax.set_xlim(-0.3, max(top, 1) * 1.8)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    ax.xaxis.set_minor_locator(NullLocator())
    phases = [count.phase for count in rows]
    for index in range(1, len(rows)):
        if phases[index] != phases[index - 1]:
            ax.axhline(index - 0.5, color=MUTED, linewidth=0.8, linestyle=":")
    name_rows(ax, [count.name for count in rows], guides=True)
    ax.set_xlabel("objects")


def _draw_curves(
    curves: dict[str, tuple[list[int], list[float]]], spans: Sequence[Span], log: bool, ax: Axes
) -> None:
    names = {
        "total_loss": "",
        "lr": "",
        "loss_cls": "class",
        "loss_bbox": "box L1",
        "loss_giou": "box GIoU",
        "pseudo/truth_per_image": "ground truth",
        "pseudo/per_image": "pseudo-labels",
    }
    for index, (key, (steps, values)) in enumerate(curves.items()):
        colour, marker = style_of(index)
        few: dict[str, Any] = {"marker": marker, "markersize": 4} if len(steps) < 12 else {}
        for part in _apart(steps, spans):
            x, y = [steps[i] for i in part], [values[i] for i in part]
            shape: Any = "steps-post" if log else "default"
            ax.plot(x, y, color=colour, linewidth=1.5, drawstyle=shape, **few)
        if names[key]:
            ax.plot([], [], color=colour, label=names[key], **few)
    last = max(steps[-1] for steps, _ in curves.values())
    end = max([last, *(span.last for span in spans)])
    ax.set_xlim(0, max(end, 2))
    if log:
        known = [value for _, values in curves.values() for value in values if value > 0]
        ax.set_yscale("log")
        ax.set_ylim(min(known) / 3, max(known) * 3)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        top = max(max(values) for _, values in curves.values())
        ax.set_ylim(0, (top or 1.0) * 1.2)
    ax.set_xlabel("training step")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    _mark_stages(ax, spans)
    if len(curves) > 1:
        ax.legend(ncols=len(curves))


def _mark_stages(ax: Axes, spans: Sequence[Span]) -> None:
    """Phases with their numbers above the axes, calibration shaded."""
    above = ax.get_xaxis_transform()
    ax.set_title(ax.get_title(loc="left"), pad=19)
    for index, span in enumerate(spans):
        if span.stage == "calibrate":
            ax.axvspan(span.first, span.last, color=LINE, alpha=0.6, linewidth=0, zorder=0)
        if index == 0 or span.phase != spans[index - 1].phase:
            end = max(other.last for other in spans if other.phase == span.phase)
            wide = (end - span.first) / max(spans[-1].last, 1) > 0.25
            text = f"phase {span.phase}" if wide else str(span.phase)
            ax.text(span.first, 1.01, text, transform=above, fontsize=9.5, color=MUTED)
            if index:
                ax.axvline(span.first, color=MUTED, linewidth=0.9, linestyle=":")


def _apart(steps: Sequence[int], spans: Sequence[Span]) -> list[list[int]]:
    """Indices of points, stage by stage: a line must not cross from one stage to the next."""
    parts: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        stage = sum(step > span.last for span in spans)
        parts.setdefault(stage, []).append(index)
    return list(parts.values())
