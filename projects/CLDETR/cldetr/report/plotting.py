"""How plots look, and what they are made of; `figures.py` turns them into SVG and PNG.

A plot is a row of panels. A page shows each panel as an SVG of its own, so that panels stand side
by side on a desk and one below the other on a phone; a file has them all in one figure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

T = TypeVar("T")

INK, LINE, MUTED = "#24292f", "#d8dee4", "#8c959f"  # pages replace them to follow their theme
# Apart for colour-blind readers too (after Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8f7700", "#808080")
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


def row_panels(
    title: str, rows: Sequence[T], draw: Callable[[Sequence[T], Axes], None]
) -> list[Panel]:
    """Panels with a row for each entry, as many as keep them at a readable height."""
    count = -(-len(rows) // MOST_ROWS)
    size = -(-len(rows) // count) if count else 1
    return [
        Panel(
            f"{title} ({place + 1}/{count})" if count > 1 else title,
            functools.partial(draw, rows[place * size : (place + 1) * size]),
            76 + ROW * max(len(rows[place * size : (place + 1) * size]), 2),
        )
        for place in range(count)
    ]


def draw_amounts(
    rows: Sequence[tuple[str, float]], ax: Axes, whole: bool = False, top: float = 0.0
) -> None:
    """Draws a bar with its value for each row; `top` is the highest value of all panels."""
    highest = max([top, *(value for _, value in rows)])
    for place, (_, value) in enumerate(rows):
        ax.barh(place, value, height=0.7, color=COLOURS[0])
        text = f"{value:,.0f}" if whole else _amount(value)
        ax.annotate(text, (value, place), xytext=(4, 0), textcoords="offset points", va="center")
    ax.set_xlim(0, (highest or 1.0) * 1.28)
    if whole:
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    name_rows(ax, [name for name, _ in rows])


def tidy(name: str, most: int = 24) -> str:
    """A label that fits: one line without control characters, shortened in the middle."""
    name = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]+", " ", name).strip()
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[: most - 1 - half]}…{name[-half:]}"


def name_rows(ax: Axes, names: Sequence[str], guides: bool = False) -> None:
    """Names the rows from the top down; `guides` are lines along them, for marks without bars."""
    ax.set_yticks(range(len(names)), [tidy(name) for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=guides, axis="y")
    ax.spines["left"].set_visible(False)


def mark_rows(ax: Axes, values: Sequence[float | None], colour: str, marker: str) -> None:
    """A mark in each row that has a value."""
    rows = [place for place, value in enumerate(values) if value is not None]
    known = [value for value in values if value is not None]
    ax.scatter(known, rows, s=25, color=colour, marker=marker, zorder=2)


def style_of(place: int) -> tuple[str, str]:
    """The colour and the marker of one of several runs."""
    return COLOURS[place % len(COLOURS)], MARKERS[(place + place // len(COLOURS)) % len(MARKERS)]


def signed(value: float, plus: bool = False) -> str:
    """A number with one decimal, a proper minus sign and no "−0.0"."""
    value = round(value, 1) + 0.0
    return (f"{value:+.1f}" if plus else f"{value:.1f}").replace("-", "−")


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


def short_count(value: float) -> str:
    """A count for an axis: 100, 5k, 1.5M."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
