"""Plots of what is detected: the confusion matrix and the precision-recall curves of a run."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from cldetr.evaluation.average_precision import RECALLS
from cldetr.report.plotting import COLOURS, INK, LOST, MUTED, Panel, Plot, tidy
from cldetr.report.rundir import Run

_BROADEST = 960  # pixels of a matrix that fits on a page
_CELLS = (11, 30)  # least and largest side of a cell, in pixels
_NUMBERED = 20  # … and the least that has room for a number
_GAP = 0.4  # cells between the classes and what is missed or background
_DARKEST = 0.62  # opacity of a share of 1: numbers stay readable on it
_NAMED = 8  # curves of categories that a panel names

Curves = Mapping[int, Mapping[str, Any]]  # phase → precision_recall.json


def confusion_plot(run: Run) -> Plot:
    """Which category the objects of each category are detected as, after the last phase."""
    confusion = run.confusion
    if confusion is None:
        return Plot("confusion", [])
    cells = len(confusion["categories"]) + 1 + _GAP
    side = min(max(_BROADEST / cells, _CELLS[0]), _CELLS[1])
    size = round(cells * side) + 150  # with names and titles
    draw = functools.partial(_draw_confusion, confusion, side >= _NUMBERED)
    return Plot("confusion", [Panel(f"After phase {confusion['phase']}", draw, size, size)])


def precision_recall_plot(run: Run) -> Plot:
    """Precision over recall of each category after the last phase, old and new ones apart.

    Categories of domains are one group. Their curves of earlier phases are over fewer domains and
    are no measure of what was forgotten.
    """
    panels: list[Panel] = []
    curves = run.curves
    if run.domains and curves:
        curves = {max(curves): curves[max(curves)]}
    last = curves.get(max(curves, default=0))
    if last is not None:
        old = [k for k, phase in enumerate(last["phases"]) if phase < last["phase"]]
        if run.domains:
            old = []
        new = [k for k in range(len(last["phases"])) if k not in old]
        titles = ("Old categories", "New categories") if old else ("", "All categories")
        for title, members in zip(titles, (old, new), strict=True):
            known = [k for k in members if last["AP50"][k] is not None]
            if known:
                draw = functools.partial(_draw_curves, curves, known)
                rows = (min(len(known), _NAMED) + 4) // 2
                panels.append(Panel(f"{title}, IoU 0.5", draw, 270 + 16 * rows))
    return Plot("precision_recall", panels)


def _draw_confusion(confusion: Mapping[str, Any], numbered: bool, ax: Axes) -> None:
    counts = np.array(confusion["counts"], dtype=float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    count = len(shares) - 1
    end = count + _GAP
    at = [*range(count), end]  # where the cells of each row and column begin
    for rows, columns in (
        (slice(count), slice(count)),
        (slice(count), slice(count, None)),
        (slice(count, None), slice(count)),
    ):
        part = _coloured(shares)[rows, columns]
        left, top = at[columns][0], at[rows][0]
        extent = (left, left + part.shape[1], top + part.shape[0], top)
        ax.imshow(part, extent=extent, interpolation="none", aspect="equal")
        frame = [left, left, left + part.shape[1], left + part.shape[1], left]
        ax.plot(frame, [extent[3], extent[2], extent[2], extent[3], extent[3]], color=MUTED, lw=0.8)
    if numbered:
        for i, j in np.argwhere(shares >= 0.005):
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9}
            ax.text(at[j] + 0.5, at[i] + 0.5, f"{100 * shares[i, j]:.0f}", **style)
    _draw_phase_borders(confusion["phases"], end + 1, ax)
    names = [tidy(name, 16) for name in confusion["categories"]]
    middle = [x + 0.5 for x in at]
    size = 10 if numbered else 9
    ax.set_xticks(middle, [*names, "missed"], rotation=90, fontsize=size)
    ax.set_yticks(middle, [*names, "background"], fontsize=size)
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.set(xlabel="detected as", ylabel="true category", xlim=(0, end + 1.05), ylim=(end + 1.05, 0))
    ax.tick_params(length=0)
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _coloured(shares: np.ndarray) -> np.ndarray:
    """Colours (K, K, 4): what is right blue, confusions orange, missed and background grey."""
    count = len(shares) - 1
    colours = np.empty((*shares.shape, 4))
    colours[..., :3] = to_rgb(LOST)
    colours[range(count), range(count), :3] = to_rgb(COLOURS[0])
    colours[:, count, :3] = colours[count, :, :3] = to_rgb(MUTED)
    # The root keeps a confusion of one in a hundred objects visible.
    colours[..., 3] = _DARKEST * np.sqrt(shares)
    return colours


def _draw_phase_borders(phases: Sequence[int], end: float, ax: Axes) -> None:
    """Lines between the categories of different phases, a strong one between old and new."""
    last = max(phases)
    for k in range(1, len(phases)):
        if phases[k] != phases[k - 1]:
            strong = phases[k] == last
            line: dict[str, Any] = {
                "color": INK if strong else MUTED,
                "linewidth": 1.8 if strong else 0.8,
            }
            ax.plot([k, k], [0, end], **line)
            ax.plot([0, end], [k, k], **line)
    old = sum(phase < last for phase in phases)
    if old:
        for name, middle in (("old", old / 2), ("new", (old + len(phases)) / 2)):
            style: dict[str, Any] = {
                "ha": "center",
                "va": "center",
                "annotation_clip": False,
                "fontweight": "bold",
            }
            ax.annotate(name, (middle, end + 0.6), **style)
            ax.annotate(name, (end + 0.6, middle), rotation=270, **style)


def _draw_curves(curves: Curves, members: Sequence[int], ax: Axes) -> None:
    last = curves[max(curves)]
    at50 = {k: np.array(last["AP50"][k]) for k in members}
    worst = sorted(members, key=lambda k: at50[k].mean())
    for k in worst[_NAMED:]:
        ax.plot(RECALLS, at50[k], color=MUTED, alpha=0.45, linewidth=0.8)
    for k, colour in zip(worst[:_NAMED], COLOURS, strict=False):
        label = f"{tidy(last['categories'][k], 18)} {100 * at50[k].mean():.1f}"
        ax.plot(RECALLS, at50[k], color=colour, linewidth=1.2, label=label)
    lines: list[tuple[str, Sequence[Any], str]] = [("mean", list(at50.values()), "-")]
    before = [_when_learnt(curves, k) for k in members]
    if any(last["phases"][k] < last["phase"] for k in members) and all(before):
        lines.append(("mean when learnt", before, "--"))
    lines.append(("mean of all IoU", [last["AP"][k] for k in members], ":"))
    for label, found, line in lines:
        mean = np.mean(found, axis=0)
        label = f"{label} {100 * mean.mean():.1f}"
        ax.plot(RECALLS, mean, color=INK, linewidth=2, linestyle=line, label=label)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision")
    handles, labels = ax.get_legend_handles_labels()
    order = [*range(-len(lines), 0), *range(len(handles) - len(lines))]  # the means first
    ax.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="upper left",
        bbox_to_anchor=(-0.1, -0.2),
        ncols=2,
    )


def _when_learnt(curves: Curves, k: int) -> list[float] | None:
    """The curve of a category after the phase that taught it, where that is known."""
    last = curves[max(curves)]
    then = curves.get(last["phases"][k])
    if then is None or last["categories"][k] not in then["categories"]:
        return None
    return then["AP50"][then["categories"].index(last["categories"][k])]
