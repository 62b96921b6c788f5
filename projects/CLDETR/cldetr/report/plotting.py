"""How plots look, and what they are made of.

A plot is a row of panels. A page shows each panel as an SVG of its own, so that panels stand side
by side on a desk and one below the other on a phone; a file has them all in one figure.
"""

from __future__ import annotations

import functools
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import matplotlib.style
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from cldetr.files import atomic_path

T = TypeVar("T")

# As in plots.mplstyle; pages replace them to follow their theme.
INK, LINE, MUTED = "#24292f", "#d8dee4", "#8c959f"
# Apart for colour-blind readers too (after Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8f7700", "#808080")
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★"}
LOST = "#c2410c"
ROW = 17  # pixels of a row in charts with a row for each category
MAX_ROWS = 42  # in one panel
WIDTH, HEIGHT = 360, 250

_UNIT = 72  # pixels to an inch: a point of text is then a pixel of the page
_STYLE = Path(__file__).parent / "templates/plots.mplstyle"


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

    @property
    def glyph(self) -> str:
        """The marker as text."""
        return MARKERS[self.marker]


@dataclass(frozen=True)
class Plot:
    """A row of panels with a legend."""

    name: str  # of its files
    panels: list[Panel]
    legend: list[Key] = field(default_factory=list)


def panel_svg(panel: Panel, salt: str) -> Markup:
    """One panel as an SVG element for a page, in its colours; `salt` keeps ids of panels apart."""
    with _style(salt):
        size = (panel.width / _UNIT, panel.height / _UNIT)
        figure = Figure(size, layout="constrained", facecolor="none")
        _draw(figure.add_subplot(), panel)
        text = _render_svg(figure)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    view = f"0 0 {panel.width} {panel.height}"
    head = f'<svg viewBox="{view}" role="img" aria-label="{escape(panel.title)}">'
    text = head + re.split(r"<svg[^>]*>", text, maxsplit=1)[1]
    for colour, name in ((INK, "currentColor"), (LINE, "var(--line)"), (MUTED, "var(--muted)")):
        text = text.replace(colour, name)
    return Markup(text)


def save_plot(plot: Plot, folder: Path) -> list[Path]:
    """Writes NAME.png and NAME.svg with all panels in one figure; returns their paths."""
    columns = 2 if len(plot.panels) == 4 else min(len(plot.panels), 3)
    rows = [plot.panels[at : at + columns] for at in range(0, len(plot.panels), columns)]
    heights = [max(panel.height for panel in row) for row in rows]
    legend = 26 * -(-len(plot.legend) // 3) + 8 if plot.legend else 0
    width = sum(panel.width for panel in rows[0])
    with _style(plot.name):
        size = (width / _UNIT, (sum(heights) + legend) / _UNIT)
        layout = ConstrainedLayoutEngine(w_pad=8 / _UNIT, h_pad=8 / _UNIT)
        figure = Figure(size, layout=layout, facecolor="white", dpi=2 * _UNIT)
        grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
        for i, row in enumerate(rows):
            for j, panel in enumerate(row):
                _draw(figure.add_subplot(grid[i, j]), panel)
        if plot.legend:
            handles = [
                Line2D([], [], color=key.colour, marker=key.marker, label=tidy(key.label, 48))
                for key in plot.legend
            ]
            figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 3))
        paths = [folder / f"{plot.name}.png", folder / f"{plot.name}.svg"]
        with atomic_path(paths[0]) as partial:
            FigureCanvasAgg(figure).print_png(partial)
        figure.set_layout_engine("none")  # the SVG keeps the layout, which takes long to find
        with atomic_path(paths[1]) as partial:
            partial.write_text(_render_svg(figure), encoding="utf-8")
    return paths


def row_panels(
    title: str, rows: Sequence[T], draw: Callable[[Sequence[T], Axes], None]
) -> list[Panel]:
    """Panels with a row for each entry, as many as keep them at a readable height."""
    count = math.ceil(len(rows) / MAX_ROWS)
    size = math.ceil(len(rows) / max(count, 1))
    panels = []
    for number in range(count):
        part = rows[number * size : (number + 1) * size]
        name = f"{title} ({number + 1}/{count})" if count > 1 else title
        height = 76 + ROW * max(len(part), 2)
        panels.append(Panel(name, functools.partial(draw, part), height))
    return panels


def bar_panels(
    title: str, rows: Sequence[tuple[str, float]], text: Callable[[float], str], unit: str = ""
) -> list[Panel]:
    """Panels with a bar and its value, as `text` writes it, for each row; all of one scale."""
    least = 1.0 if "AP" in unit else 1e-9  # a thousandth of a point is not to look like much
    limit = max([least, *(abs(value) for _, value in rows)])

    def draw(part: Sequence[tuple[str, float]], ax: Axes) -> None:
        names, values = zip(*part, strict=True)
        colours = [LOST if value < 0 else COLOURS[0] for value in values]
        bars = ax.barh(range(len(part)), values, height=0.7, color=colours)
        ax.bar_label(bars, [text(value) for value in values], padding=4, fontsize=10)
        losses, gains = min(values) < 0, max(values) > 0
        right = 1.3 if gains or not losses else 0.1
        ax.set(xlim=(-1.35 * limit if losses else 0, right * limit), xlabel=unit)
        ax.xaxis.set_major_formatter(short_count)
        if losses:
            ax.axvline(0, color=MUTED, linewidth=0.8)
        name_rows(ax, names)

    return row_panels(title, rows, draw)


def tidy(name: str, limit: int = 24) -> str:
    """A label that fits: one line without control characters, shortened in the middle."""
    name = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]+", " ", name).strip()
    half = (limit - 1) // 2
    return name if len(name) <= limit else f"{name[: limit - 1 - half]}…{name[-half:]}"


def name_rows(ax: Axes, names: Sequence[str], guides: bool = False) -> None:
    """Names the rows from the top down; `guides` are lines along them, for marks without bars."""
    ax.set_yticks(range(len(names)), [tidy(name) for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=guides, axis="y")
    ax.spines["left"].set_visible(False)


def mark_rows(ax: Axes, values: Sequence[float | None], colour: str, marker: str) -> None:
    """A mark in each row that has a value."""
    known = [math.nan if value is None else value for value in values]
    ax.scatter(known, range(len(known)), s=25, color=colour, marker=marker, zorder=2)


def style_of(index: int) -> tuple[str, str]:
    """The colour and the marker of one of several runs."""
    markers = list(MARKERS)
    return COLOURS[index % len(COLOURS)], markers[(index + index // len(COLOURS)) % len(markers)]


def signed(value: float | None, plus: bool = False) -> str:
    """A number with one decimal, a proper minus sign and no "−0.0"; "n/a" for None."""
    if value is None:
        return "n/a"
    value = round(value, 1) + 0.0
    return (f"{value:+.1f}" if plus else f"{value:.1f}").replace("-", "−")


def short_count(value: float, _: float = 0) -> str:
    """A number for an axis: 0.5, 100, 5k, 1.5M."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}".replace("-", "−")


def amount(value: float) -> str:
    """A quantity with about three digits."""
    if 0 < value < 0.01:
        return "<0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _draw(ax: Axes, panel: Panel) -> None:
    ax.set_title(tidy(panel.title, 60))
    panel.draw(ax)


def _render_svg(figure: Figure) -> str:
    stream = io.StringIO()
    # Not by savefig, which draws a figure with a layout engine twice.
    FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    return stream.getvalue()


@contextmanager
def _style(salt: str) -> Iterator[None]:
    with matplotlib.style.context([_STYLE, {"svg.hashsalt": salt}]), warnings.catch_warnings():
        # Names in scripts that the drawing font lacks: the SVG shows them, the PNG cannot.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield
