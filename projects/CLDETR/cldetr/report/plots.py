"""What the plots show and how they look; `figures.py` turns them into SVG and PNG.

A plot is a row of panels. A page shows each panel as an SVG of its own, so that panels stand side
by side on a desk and one below the other on a phone; a file has them all in one figure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from cldetr.report.rundir import Run
from cldetr.report.tables import (
    SETS,
    CategoryCounts,
    Change,
    Group,
    Span,
    category_changes,
    category_counts,
    curve_of,
    training_spans,
)

INK, LINE, MUTED = "#24292f", "#d8dee4", "#8c959f"  # pages replace them to follow their theme
# Apart for colour-blind readers too (after Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6a00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LOST, GAINED = "#c2410c", "#0072b2"
ROW = 17  # pixels of a row in charts with a row for each category
MOST_ROWS = 42  # in one panel
WIDTH, HEIGHT = 360, 250


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    draw: Callable[[Axes], None]
    height: int = HEIGHT
    width: int = WIDTH


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    label: str
    colour: str
    marker: str = "o"


@dataclass(frozen=True)
class Plot:
    """A row of panels with a legend."""

    name: str  # of its files
    title: str
    text: str  # how to read it
    panels: list[Panel]
    legend: list[Key] = field(default_factory=list)


def run_plots(run: Run) -> list[Plot]:
    """All plots of one run for which it has data."""
    plots: list[Plot | None] = [
        ap_over_phases([Group(run.method, (run,))]),
        category_change_plot(run),
        distribution_plot(run),
        training_plot(run),
        stages_plot(run),
    ]
    return [plot for plot in plots if plot is not None]


def comparison_plots(groups: Sequence[Group]) -> list[Plot]:
    """All plots of several runs for which they have data."""
    plots = [final_ap(groups), ap_over_phases(groups), comparison_by_category(groups)]
    return [plot for plot in plots if plot is not None]


def ap_over_phases(groups: Sequence[Group]) -> Plot | None:
    """AP of all, old and new categories after each phase; None where nothing is evaluated."""
    most = max((phase for group in groups for phase, _, _ in group.curve("all")), default=0)
    if most == 0:
        return None
    panels = [
        Panel(f"AP on {name} categories", functools.partial(_draw_phases, groups, name, most))
        for name in SETS
        if any(group.curve(name) for group in groups)
    ]
    if most == 1:  # nothing is old yet and all is new
        panels = panels[:1]
    text = (
        "After each phase, in percent. New: learnt in this phase. Old: learnt in earlier ones; the "
        "curve begins with what the first phase reached."
    )
    if any(len(group.runs) > 1 for group in groups):
        text += " Several seeds: mean, and 95% interval as band."
    return Plot("ap_over_phases", "AP over phases", text, panels, _legend(groups))


def final_ap(groups: Sequence[Group]) -> Plot | None:
    """Bars of the AP that runs end with, and of what they forgot."""
    measures: list[tuple[str, list[tuple[float, float | None] | None]]] = [
        (f"Final AP, {name} categories", [group.final(name) for group in groups]) for name in SETS
    ]
    measures.append(("Forgetting (FPP, less is better)", [group.number("fpp") for group in groups]))
    height = 70 + 30 * len(groups)
    panels = [
        Panel(title, functools.partial(_draw_bars, groups, values), height)
        for title, values in measures
        if any(value is not None for value in values)
    ]
    if not panels:
        return None
    text = (
        "AP in percent after the last phase; FPP: points that the categories of the first phase "
        "lost since."
    )
    if any(len(group.runs) > 1 for group in groups):
        text += " Several seeds: mean and 95% interval."
    return Plot("final_ap", "Where the runs end", text, panels)


def category_change_plot(run: Run) -> Plot | None:
    """Per category: what later phases did to its AP, and the AP of those learnt last."""
    if run.results is None:
        return None
    changes = category_changes(run.results)
    last = max(change.phase for change in changes)
    old = [change for change in changes if change.phase < last and change.difference is not None]
    new = [change for change in changes if change.phase == last and change.last is not None]
    old.sort(key=lambda change: (change.difference, change.name))
    new.sort(key=lambda change: (-(change.last or 0.0), change.name))
    limit = max((abs(change.difference or 0.0) for change in old), default=0.0)
    panels = [
        Panel(
            _numbered("Change of AP since learnt", place, old),
            functools.partial(_draw_changes, rows, limit),
            _rows_height(rows),
        )
        for place, rows in enumerate(_chunks(old))
    ]
    top = max((change.last or 0.0 for change in new), default=0.0)
    panels += [
        Panel(
            _numbered(f"AP of categories of phase {last}", place, new),
            functools.partial(_draw_learnt, rows, top),
            _rows_height(rows),
        )
        for place, rows in enumerate(_chunks(new))
    ]
    if not panels:
        return None
    text = (
        "Forgotten and learnt: AP after the last phase less the AP after the phase that taught the "
        "category, in points; those of the last phase with their AP."
        if old
        else "AP after the first phase, in percent."
    )
    return Plot("category_change", "What was forgotten, what was learnt", text, panels)


def comparison_by_category(groups: Sequence[Group]) -> Plot | None:
    """The AP that each run ends with, category by category."""
    finals: list[dict[str, float]] = []
    for group in groups:
        values: dict[str, list[float]] = {}
        for run in group.runs:
            if run.results and run.finished:
                for name, scores in run.results["phases"][-1]["per_category"].items():
                    if scores["AP"] is not None:
                        values.setdefault(name, []).append(scores["AP"])
        finals.append({name: sum(found) / len(found) for name, found in values.items()})
    names = sorted({name for final in finals for name in final})
    # The categories on which the runs differ most come first.
    spread = {
        name: max(known) - min(known)
        for name in names
        if (known := [final[name] for final in finals if name in final])
    }
    names.sort(key=lambda name: (-spread[name], name))
    if not names or len(groups) < 2:
        return None
    panels = [
        Panel(
            _numbered("Final AP by category", place, names),
            functools.partial(_draw_category_dots, groups, finals, rows),
            _rows_height(rows),
        )
        for place, rows in enumerate(_chunks(names))
    ]
    text = "AP in percent after the last phase; categories on which the runs differ most first."
    return Plot("final_ap_by_category", "Category by category", text, panels, _legend(groups))


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
    panels = [
        Panel(
            _numbered("Objects of each category", place, counts),
            functools.partial(_draw_counts, rows, shown, top),
            _rows_height(rows),
        )
        for place, rows in enumerate(_chunks(counts))
    ]
    text = (
        "On a logarithmic scale: exemplars that follow the distribution of the data stand at the "
        "same distance from it in every row. Ordered by phase, the most frequent first."
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
                    functools.partial(_draw_amounts, rows),
                    70 + 20 * len(rows),
                )
            )
    if not panels:
        return None
    text = "Memory is the highest of the process, or of the GPU where there is one, up to then."
    return Plot("time_and_memory", "Time and memory", text, panels)


def phase_distribution_plot(audit: dict[str, Any]) -> Plot:
    """Objects of each category of each phase, as the audit of a split counts them."""
    panels = []
    for phase in audit["phases"]:
        ranked = sorted(phase["instances_per_class"].items(), key=lambda item: (-item[1], item[0]))
        top = ranked[0][1] if ranked else 0
        for place, rows in enumerate(_chunks(ranked)):
            panels.append(
                Panel(
                    _numbered(f"Phase {phase['index']}", place, ranked),
                    functools.partial(_draw_amounts, rows, whole=True, top=top),
                    _rows_height(rows),
                )
            )
    text = "Labelled objects of each phase's categories in its images, crowd regions included."
    return Plot("categories_per_phase", "Categories of each phase", text, panels)


# How panels are drawn.


def _draw_phases(groups: Sequence[Group], name: str, most: int, ax: Axes) -> None:
    highest = 0.0
    for place, group in enumerate(groups):
        points = group.curve(name)
        if not points:
            continue
        phases, means = [p for p, _, _ in points], [m for _, m, _ in points]
        colour, marker = _style(place)
        ax.plot(phases, means, color=colour, marker=marker, markersize=5, linewidth=1.8)
        half = [width or 0.0 for _, _, width in points]
        if any(half):
            low = [mean - width for mean, width in zip(means, half, strict=True)]
            high = [mean + width for mean, width in zip(means, half, strict=True)]
            ax.fill_between(phases, low, high, color=colour, alpha=0.15, linewidth=0)
            highest = max(highest, *high)
        highest = max(highest, *means)
        if len(groups) == 1:
            for phase, mean, above in zip(phases, means, _label_above(means), strict=True):
                ax.annotate(
                    f"{mean:.1f}",
                    (phase, mean),
                    xytext=(0, 7 if above else -7),
                    textcoords="offset points",
                    ha="center",
                    va="bottom" if above else "top",
                )
    ax.set_xlim(0.6, most + 0.4)
    ax.set_ylim(0, min(max(highest * 1.22, 1.0), 105))
    ax.set_xticks(range(1, most + 1))
    ax.set_xlabel("phase")
    ax.set_ylabel("AP (%)")


def _draw_bars(
    groups: Sequence[Group], values: Sequence[tuple[float, float | None] | None], ax: Axes
) -> None:
    for place, value in enumerate(values):
        if value is None:
            ax.annotate("n/a", (0, place), xytext=(4, 0), textcoords="offset points", va="center")
            continue
        mean, half = value
        ax.barh(place, mean, height=0.66, color=_style(place)[0], xerr=half, ecolor=INK)
        text = f"{mean:.1f}" if half is None else f"{mean:.1f} ± {half:.1f}"
        end = max(mean, 0.0) + (half or 0.0)
        ax.annotate(text, (end, place), xytext=(5, 0), textcoords="offset points", va="center")
    known = [(value[0], value[1] or 0.0) for value in values if value is not None]
    low = min(0.0, *(mean - half for mean, half in known))
    high = max(0.0, *(mean + half for mean, half in known))
    spread = max(high - low, 1.0)
    ax.set_xlim(low - 0.05 * spread if low < 0 else 0, high + 0.38 * spread)
    _rows(ax, [group.label for group in groups])


def _draw_changes(rows: Sequence[Change], limit: float, ax: Axes) -> None:
    for place, change in enumerate(rows):
        value = change.difference or 0.0
        ax.barh(place, value, height=0.7, color=LOST if value < 0 else GAINED)
        ax.annotate(
            f"{value:+.1f}".replace("-", "−"),
            (value, place),
            xytext=(4 if value >= 0 else -4, 0),
            textcoords="offset points",
            ha="left" if value >= 0 else "right",
            va="center",
            fontsize=9,
        )
    reach = max(limit, 1.0) * 1.45
    worst, best = (pick(change.difference or 0.0 for change in rows) for pick in (min, max))
    ax.set_xlim(-reach if worst < 0 else -0.08 * reach, reach if best > 0 else 0.08 * reach)
    ax.axvline(0, color=MUTED, linewidth=0.8)
    _rows(ax, [change.name for change in rows])
    ax.set_xlabel("points of AP")


def _draw_learnt(rows: Sequence[Change], top: float, ax: Axes) -> None:
    _draw_amounts([(change.name, change.last or 0.0) for change in rows], ax, top=top)
    ax.set_xlabel("AP (%)")


def _draw_category_dots(
    groups: Sequence[Group], finals: Sequence[dict[str, float]], rows: Sequence[str], ax: Axes
) -> None:
    for place, name in enumerate(rows):
        known = [final[name] for final in finals if name in final]
        ax.plot([min(known), max(known)], [place, place], color=LINE, linewidth=3, zorder=1)
    for number, final in enumerate(finals):
        colour, marker = _style(number)
        _scatter(ax, [final.get(name) for name in rows], colour, marker)
    ax.set_xlim(left=min(0.0, ax.get_xlim()[0]))
    _rows(ax, rows)
    ax.set_xlabel("AP (%)")


def _draw_counts(
    rows: Sequence[CategoryCounts], sources: Sequence[tuple[str, ...]], top: float, ax: Axes
) -> None:
    for name, _, colour, marker in sources:
        _scatter(ax, [getattr(count, name) for count in rows], colour, marker)
    ax.set_xscale("symlog", linthresh=1, linscale=0.4)
    ax.set_xlim(-0.3, max(top, 1) * 1.8)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.xaxis.set_minor_locator(NullLocator())
    phases = [count.phase for count in rows]
    for place in range(1, len(rows)):
        if phases[place] != phases[place - 1]:
            ax.axhline(place - 0.5, color=MUTED, linewidth=0.8, linestyle=":")
    _rows(ax, [count.name for count in rows])
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
    for place, (key, (steps, values)) in enumerate(curves.items()):
        colour, marker = _style(place)
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
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _mark_stages(ax, spans)
    if len(curves) > 1:
        ax.legend(ncols=len(curves))


def _mark_stages(ax: Axes, spans: Sequence[Span]) -> None:
    """Phases with their numbers above the axes, calibration shaded."""
    above = ax.get_xaxis_transform()
    ax.set_title(ax.get_title(loc="left"), pad=19)
    for place, span in enumerate(spans):
        if span.stage == "calibrate":
            ax.axvspan(span.first, span.last, color=LINE, alpha=0.6, linewidth=0, zorder=0)
        if place == 0 or span.phase != spans[place - 1].phase:
            end = max(other.last for other in spans if other.phase == span.phase)
            wide = (end - span.first) / max(spans[-1].last, 1) > 0.25
            text = f"phase {span.phase}" if wide else str(span.phase)
            ax.text(span.first, 1.01, text, transform=above, fontsize=9.5, color=MUTED)
            if place:
                ax.axvline(span.first, color=MUTED, linewidth=0.9, linestyle=":")


def _draw_amounts(
    rows: Sequence[tuple[str, float]], ax: Axes, whole: bool = False, top: float = 0.0
) -> None:
    highest = max([top, *(value for _, value in rows)])
    for place, (_, value) in enumerate(rows):
        ax.barh(place, value, height=0.7, color=COLOURS[0])
        text = f"{value:,.0f}" if whole else _amount(value)
        ax.annotate(text, (value, place), xytext=(4, 0), textcoords="offset points", va="center")
    ax.set_xlim(0, (highest or 1.0) * 1.28)
    if whole:
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _rows(ax, [name for name, _ in rows])


# What drawing is made of.


def tidy(name: str, most: int = 24) -> str:
    """A label that fits: one line without control characters, shortened in the middle."""
    name = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]+", " ", name).strip()
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[: most - 1 - half]}…{name[-half:]}"


def _rows(ax: Axes, names: Sequence[str]) -> None:
    """Names the rows from the top down."""
    ax.set_yticks(range(len(names)), [tidy(name) for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)


def _scatter(ax: Axes, values: Sequence[float | None], colour: str, marker: str) -> None:
    """A mark in each row that has a value."""
    rows = [place for place, value in enumerate(values) if value is not None]
    known = [value for value in values if value is not None]
    ax.scatter(known, rows, s=25, color=colour, marker=marker, zorder=2)


def _label_above(values: Sequence[float]) -> list[bool]:
    """Whether a point's label goes above it: where the line does not rise from it."""
    room = 0.16 * max(values)  # what a label below needs
    found = []
    for place, value in enumerate(values):
        near = [values[i] for i in (place - 1, place + 1) if 0 <= i < len(values)]
        found.append(value < room or not near or value >= sum(near) / len(near))
    return found


def _style(place: int) -> tuple[str, str]:
    return COLOURS[place % len(COLOURS)], MARKERS[(place + place // len(COLOURS)) % len(MARKERS)]


def _legend(groups: Sequence[Group]) -> list[Key]:
    if len(groups) < 2:
        return []
    return [Key(group.label, *_style(place)) for place, group in enumerate(groups)]


def _chunks(rows: Sequence[Any]) -> list[Sequence[Any]]:
    """Rows in panels of about the same size, each of a readable height."""
    panels = -(-len(rows) // MOST_ROWS)
    size = -(-len(rows) // panels) if panels else 1
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _numbered(title: str, place: int, rows: Sequence[Any]) -> str:
    return f"{title} ({place + 1}/{len(_chunks(rows))})" if len(rows) > MOST_ROWS else title


def _rows_height(rows: Sequence[Any]) -> int:
    return 76 + ROW * max(len(rows), 2)


def _apart(steps: Sequence[int], spans: Sequence[Span]) -> list[list[int]]:
    """Places of points, stage by stage: a line must not cross from one stage to the next."""
    parts: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        stage = sum(step > span.last for span in spans)
        parts.setdefault(stage, []).append(place)
    return list(parts.values())


def _amount(value: float) -> str:
    return (
        f"{value:,.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 1
        else f"{value:.2f}"
        if value >= 0.01 or value == 0
        else "<0.01"
    )
