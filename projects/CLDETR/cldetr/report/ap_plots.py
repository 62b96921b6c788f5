"""Plots of average precision: of one run and of several."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from matplotlib.axes import Axes

from cldetr.report.plotting import (
    GAINED,
    INK,
    LINE,
    LOST,
    MUTED,
    Key,
    Panel,
    Plot,
    draw_amounts,
    mark_rows,
    name_rows,
    row_panels,
    signed,
    style_of,
)
from cldetr.report.rundir import Run
from cldetr.report.tables import SETS, Change, Group, category_changes, mean_of


def ap_over_phases(groups: Sequence[Group]) -> Plot | None:
    """AP of all, old and new categories after each phase; None where nothing is evaluated."""
    last = max((phase for group in groups for phase, _ in group.curve("all")), default=0)
    if last == 0:
        return None
    panels = [
        Panel(f"AP on {name} categories", functools.partial(_draw_phases, groups, name, last))
        for name in SETS
        if any(group.curve(name) for group in groups)
    ]
    if last == 1:  # nothing is old yet and all is new
        panels = panels[:1]
    text = (
        "After each phase, in percent. New: learnt in this phase. Old: learnt in earlier ones; the "
        "curve begins with what the first phase reached."
    )
    if any(len(group.runs) > 1 for group in groups):
        text += " Several seeds: their mean."
    return Plot("ap_over_phases", "AP over phases", text, panels, _legend(groups))


def final_ap(groups: Sequence[Group]) -> Plot | None:
    """Bars of the AP that runs end with, and of what they forgot."""
    measures = [
        (f"Final AP, {name} categories", [group.finals(name) for group in groups]) for name in SETS
    ]
    measures.append(
        ("Forgetting (FPP, less is better)", [group.numbers("fpp") for group in groups])
    )
    height = 70 + 30 * len(groups)
    panels = [
        Panel(title, functools.partial(_draw_bars, groups, values), height)
        for title, values in measures
        if any(values)
    ]
    if not panels:
        return None
    text = (
        "AP in percent after the last phase; FPP: points that the categories of the first phase "
        "lost since."
    )
    if any(len(group.runs) > 1 for group in groups):
        text += " Several seeds: the mean, each run as a dot, the 95% interval from three runs on."
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
    top = max((change.last or 0.0 for change in new), default=0.0)
    panels = row_panels(
        "Change of AP since learnt", old, lambda rows, ax: _draw_changes(rows, limit, ax)
    )
    panels += row_panels(
        f"AP of categories of phase {last}", new, lambda rows, ax: _draw_learnt(rows, top, ax)
    )
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
    panels = row_panels(
        "Final AP by category",
        names,
        lambda rows, ax: _draw_category_dots(groups, finals, rows, ax),
    )
    text = "AP in percent after the last phase; categories on which the runs differ most first."
    return Plot("final_ap_by_category", "Category by category", text, panels, _legend(groups))


def _draw_phases(groups: Sequence[Group], name: str, last: int, ax: Axes) -> None:
    highest = 0.0
    for index, group in enumerate(groups):
        points = group.curve(name)
        if not points:
            continue
        phases, means = [phase for phase, _ in points], [mean for _, mean in points]
        colour, marker = style_of(index)
        # New categories are other ones in each phase: no line joins them.
        line = "none" if name == "new" else "-"
        ax.plot(phases, means, color=colour, marker=marker, markersize=5, linestyle=line)
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
    ax.set_xlim(0.6, last + 0.4)
    ax.set_ylim(0, min(max(highest * 1.22, 1.0), 105))
    ax.set_xticks(range(1, last + 1))
    ax.set_xlabel("phase")
    ax.set_ylabel("AP (%)")


def _draw_bars(groups: Sequence[Group], values: Sequence[Sequence[float]], ax: Axes) -> None:
    """Bars of means with each run as a dot, the interval where there is one, and both as text."""
    longest = max(max(found, default=0.0) for found in values)
    shortest = min(min(found, default=0.0) for found in values)
    low, high = min(shortest * 1.1, 0.0), max(longest * 1.1, 1.0)
    beside = ax.get_yaxis_transform()
    for index, found in enumerate(values):
        average = mean_of(found)
        text = "n/a"
        if average is not None:
            mean, half = average
            ax.barh(index, mean, height=0.66, color=style_of(index)[0])
            if len(found) > 1:
                ax.scatter(found, [index] * len(found), s=9, color=INK, zorder=3)
            if half is not None:
                ends = max(mean - half, low), min(mean + half, high)
                ax.plot(ends, [index, index], color=INK, linewidth=1, zorder=3)
            text = signed(mean) if half is None else f"{signed(mean)} ± {half:.1f}"
        ax.text(1.02, index, text, transform=beside, va="center")
    ax.set_xlim(low, high)
    name_rows(ax, [group.label for group in groups])


def _draw_changes(rows: Sequence[Change], limit: float, ax: Axes) -> None:
    for index, change in enumerate(rows):
        value = change.difference or 0.0
        ax.barh(index, value, height=0.7, color=LOST if value < 0 else GAINED)
        ax.annotate(
            signed(value, plus=True),
            (value, index),
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
    name_rows(ax, [change.name for change in rows])
    ax.set_xlabel("points of AP")


def _draw_learnt(rows: Sequence[Change], top: float, ax: Axes) -> None:
    draw_amounts([(change.name, change.last or 0.0) for change in rows], ax, top=top)
    ax.set_xlabel("AP (%)")


def _draw_category_dots(
    groups: Sequence[Group], finals: Sequence[dict[str, float]], rows: Sequence[str], ax: Axes
) -> None:
    for index, name in enumerate(rows):
        known = [final[name] for final in finals if name in final]
        ax.plot([min(known), max(known)], [index, index], color=LINE, linewidth=3, zorder=1)
    for index, final in enumerate(finals):
        colour, marker = style_of(index)
        mark_rows(ax, [final.get(name) for name in rows], colour, marker)
    ax.set_xlim(left=min(0.0, ax.get_xlim()[0]))
    name_rows(ax, rows, guides=True)
    ax.set_xlabel("AP (%)")


def _label_above(values: Sequence[float]) -> list[bool]:
    """Whether a point's label goes above it: where the line does not rise from it."""
    room = 0.16 * max(values)  # what a label below needs
    found = []
    for index, value in enumerate(values):
        near = [values[i] for i in (index - 1, index + 1) if 0 <= i < len(values)]
        found.append(value < room or not near or value >= sum(near) / len(near))
    return found


def _legend(groups: Sequence[Group]) -> list[Key]:
    if len(groups) < 2:
        return []
    return [Key(group.label, *style_of(index)) for index, group in enumerate(groups)]
