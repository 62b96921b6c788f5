"""Plots as SVG for pages, and as PNG and SVG files."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from cldetr.files import atomic_path
from cldetr.report.markup import Markup, escape
from cldetr.report.plotting import INK, LINE, MUTED, Panel, Plot, tidy

_UNIT = 72  # pixels to an inch: a point of text is then a pixel of the page
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 11,
    "axes.facecolor": "none",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.loc": "upper right",
    "legend.borderaxespad": 0.1,
    "legend.columnspacing": 1.0,
    "legend.handlelength": 1.2,
    "text.parse_math": False,  # a category may be called "$5 bill"
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
    "errorbar.capsize": 3,
}


def panel_svg(panel: Panel, salt: str) -> Markup:
    """One panel as an SVG element for a page, in the page's own colours.

    Args:
        panel: what to draw.
        salt: unlike that of every other panel of the page, so that their ids differ.
    """
    with _style(salt):
        size = (panel.width / _UNIT, panel.height / _UNIT)
        figure = Figure(size, layout="constrained", facecolor="none")
        _draw(figure.add_subplot(), panel)
        text = _render_svg(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    view = f"0 0 {panel.width} {panel.height}"
    head = f'<svg viewBox="{view}" role="img" aria-label="{escape(panel.title)}">'
    text = re.sub(r"\A<svg[^>]*>", lambda _: head, text)
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
        figure.set_layout_engine("none")  # the SVG keeps the places, which take long to find
        with atomic_path(paths[1]) as partial:
            partial.write_text(_render_svg(figure), encoding="utf-8")
    return paths


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
    settings: dict[Any, Any] = {**_STYLE, "svg.hashsalt": salt}
    with mpl.rc_context(settings), warnings.catch_warnings():
        # Names in scripts that the drawing font lacks: the SVG shows them, the PNG cannot.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield
