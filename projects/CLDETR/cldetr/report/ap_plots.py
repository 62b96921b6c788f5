"""Plots of average precision: of one run and of several."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from cldetr.report import plotting
from cldetr.report.plotting import INK, LINE, Key, Panel, Plot, signed, style_of
from cldetr.report.rundir import Run
from cldetr.report.tables import SETS, Group, category_changes, mean_of, mean_text


def ap_over_phases(groups: Sequence[Group]) -> Plot:
    """AP of all, old and new categories, or domains, after each phase."""
    what = _compared(groups)
    last = max((phase for group in groups for phase, _ in group.curve("all")), default=0)
    panels = [
        Panel(f"AP on {name} {what}", functools.partial(_draw_phases, groups, name, last))
        for name in (SETS if last > 1 else SETS[:1])  # in phase 1 nothing is old and all is new
        if any(group.curve(name) for group in groups)
    ]
    return Plot("ap_over_phases", panels, _legend(groups))


def final_ap(groups: Sequence[Group]) -> Plot:
    """Bars of the AP that runs end with, and of what they forgot."""
    what = _compared(groups)
    columns = {f"Final AP, {name} {what}": f"{name}.AP" for name in SETS}
    columns["Forgetting (FPP, lower is better)"] = "fpp.AP"
    measures = {title: [x.finals(column) for x in groups] for title, column in columns.items()}
    panels = [
        Panel(title, functools.partial(_draw_means, groups, values), 70 + 30 * len(groups))
        for title, values in measures.items()
        if any(values)
    ]
    return Plot("final_ap", panels)


def domains_plot(run: Run) -> Plot:
    """AP on each domain after each phase, before its own phase too."""
    if run.domains is None:
        return Plot("ap_per_domain", [])
    names, matrix = run.domains["names"], run.domains["matrix"]
    keys = [Key(name, *style_of(index)) for index, name in enumerate(names)]
    draw = functools.partial(_draw_domains, matrix)
    return Plot("ap_per_domain", [Panel("AP on each domain", draw)], keys)


def category_change_plot(run: Run) -> Plot:
    """Per category: what later phases did to its AP, and the AP of those learnt last.

    Where the phases are domains, all categories are learnt in the first: `domains_plot` tells more.
    """
    if run.domains:
        return Plot("category_change", [])
    changes = sorted(category_changes(run.results), key=lambda x: x.name)
    last = max((x.phase for x in changes), default=0)
    old = [(x.name, x.difference) for x in changes if x.phase < last and x.difference is not None]
    new = [(x.name, x.last) for x in changes if x.phase == last and x.last is not None]
    old.sort(key=itemgetter(1))
    new.sort(key=itemgetter(1), reverse=True)
    plus = functools.partial(signed, plus=True)
    panels = plotting.bar_panels("Change of AP since learnt", old, plus, "points of AP")
    panels += plotting.bar_panels(f"AP of categories of phase {last}", new, signed, "AP (%)")
    return Plot("category_change", panels)


def comparison_by_category(groups: Sequence[Group]) -> Plot:
    """The AP that each of several runs ends with, category by category."""
    finals = [group.final_by_category() for group in groups] if len(groups) > 1 else []
    known: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (item for final in finals for item in final.items()):
        known[name].append(value)
    names = sorted(known, key=lambda name: (min(known[name]) - max(known[name]), name))
    draw = functools.partial(_draw_category_dots, finals)
    panels = plotting.row_panels("Final AP by category", names, draw)
    return Plot("final_ap_by_category", panels, _legend(groups))


def _draw_phases(groups: Sequence[Group], name: str, last: int, ax: Axes) -> None:
    highest = 0.0
    # New categories are other ones in each phase: no line joins them.
    line = "none" if name == "new" else "-"
    for index, group in enumerate(groups):
        points = group.curve(name)
        colour, marker = style_of(index)
        curve = zip(*points, strict=True)
        ax.plot(*curve, color=colour, marker=marker, markersize=5, linestyle=line)
        highest = max([highest, *(mean for _, mean in points)])
        if len(groups) == 1:
            for number, (phase, mean) in enumerate(points):
                shift, side = (7, "bottom") if _label_above(points, number) else (-7, "top")
                style: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": side}
                ax.annotate(f"{mean:.1f}", (phase, mean), xytext=(0, shift), **style)
    top = min(max(highest * 1.22, 1.0), 105)
    ax.set(xlim=(0.6, last + 0.4), ylim=(0, top), xlabel="phase", ylabel="AP (%)")
    ax.set_xticks(range(1, last + 1))


def _draw_domains(matrix: Sequence[Sequence[float | None]], ax: Axes) -> None:
    phases = range(1, len(matrix) + 1)
    for index, aps in enumerate(zip(*matrix, strict=True)):
        colour, marker = style_of(index)
        values = [math.nan if ap is None else ap for ap in aps]  # matplotlib skips NaN
        ax.plot(phases, values, color=colour, marker=marker, markersize=5)
        learnt = slice(index, index + 1)  # marked by a ring
        ax.plot(phases[learnt], values[learnt], "o", color=colour, markersize=12, mfc="none")
    ax.set(xlim=(0.6, len(matrix) + 0.4), xlabel="phase", ylabel="AP (%)")
    ax.set_ylim(0, max(ax.get_ylim()[1], 1.0))
    ax.set_xticks(phases)


def _compared(groups: Sequence[Group]) -> str:
    """What all, old and new are."""
    return "domains" if any(run.domains for x in groups for run in x.runs) else "categories"


def _draw_means(groups: Sequence[Group], values: Sequence[Sequence[float]], ax: Axes) -> None:
    """Bars of means with each run as a dot, the interval where there is one, and both as text."""
    for index, found in enumerate(values):
        ax.text(1.02, index, mean_text(found), transform=ax.get_yaxis_transform(), va="center")
        mean, half = mean_of(found) or (None, None)
        if mean is not None:
            ax.barh(index, mean, height=0.66, color=style_of(index)[0], xerr=half, ecolor=INK)
        if len(found) > 1:
            ax.scatter(found, [index] * len(found), s=9, color=INK, zorder=3)
    every = [0.0, *(value for found in values for value in found)]
    ax.set_xlim(min(every) * 1.1, max(max(every) * 1.1, 1.0))
    plotting.name_rows(ax, [group.label for group in groups])


def _draw_category_dots(finals: Sequence[dict[str, float]], names: Sequence[str], ax: Axes) -> None:
    for row, name in enumerate(names):
        known = [final[name] for final in finals if name in final]
        ax.plot([min(known), max(known)], [row, row], color=LINE, linewidth=3, zorder=1)
    for index, final in enumerate(finals):
        plotting.mark_rows(ax, [final.get(name) for name in names], *style_of(index))
    ax.set(xlim=(min(0.0, ax.get_xlim()[0]), None), xlabel="AP (%)")
    plotting.name_rows(ax, names, guides=True)


def _label_above(points: Sequence[tuple[int, float]], index: int) -> bool:
    """Whether a point's label goes above it: where the line does not rise from it."""
    value = points[index][1]
    room = 0.16 * max(1.0, *(mean for _, mean in points))  # what a label below needs
    near = [points[i][1] for i in (index - 1, index + 1) if 0 <= i < len(points)]
    return value < room or not near or value >= fmean(near)


def _legend(groups: Sequence[Group]) -> list[Key]:
    keys = [Key(group.label, *style_of(index)) for index, group in enumerate(groups)]
    return keys if len(keys) > 1 else []
