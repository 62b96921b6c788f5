"""What all pages share: frame, tables, plots and pictures, in one HTML file that loads nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from cldetr import __version__
from cldetr.files import atomic_path
from cldetr.report.figures import panel_svg
from cldetr.report.markup import Content, Markup, tag
from cldetr.report.plotting import Plot, signed

_STYLE = Path(__file__).with_name("style.css")
_MOST_PICTURES, _FIRST_PICTURES = 24, 8  # on a page, and of these at once
_GLYPHS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★"}
_WIDEST = 1600  # pixels of an embedded picture


@dataclass(frozen=True)
class Section:
    """A part of a page with its place in the list of contents."""

    name: str  # the anchor
    title: str
    content: Markup


def write_page(path: Path, title: str, head: Content, sections: Iterable[Section | None]) -> None:
    """Writes a page, atomically. Sections that are None are left out."""
    shown = [section for section in sections if section is not None]
    links = [tag("a", section.title, href=f"#{section.name}") for section in shown]
    body = [
        tag("header", head, tag("nav", links, aria_label="contents")),
        *(
            tag("section", tag("h2", section.title), section.content, id=section.name)
            for section in shown
        ),
        tag("footer", f"Made by cldetr {__version__}. This page needs no network."),
    ]
    document = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            # Whatever a name in the data may hold: nothing is run and nothing is loaded.
            tag(
                "meta",
                http_equiv="Content-Security-Policy",
                content="default-src 'none'; style-src 'unsafe-inline'; img-src data:",
            ),
            tag("title", title),
            tag("style", Markup(_STYLE.read_text(encoding="utf-8"))),
        ),
        tag("body", tag("main", body)),
        lang="en",
    )
    with atomic_path(path) as partial:
        partial.write_text(f"<!DOCTYPE html>\n{document}\n", encoding="utf-8", errors="replace")


def table(
    header: Sequence[Content],
    rows: Iterable[Sequence[Content] | Markup],
    text_columns: int = 1,
    grouped: bool = False,
) -> Markup:
    """A table whose first columns are text and whose others are numbers.

    Args:
        header: the names of the columns; one that is a `th` already stays as it is.
        rows: cells, or rows from `table_row`.
        text_columns: how many columns are text.
        grouped: draw lines between groups alone, where a row has the class "first".
    """
    names = [
        cell
        if isinstance(cell, Markup) and cell.startswith("<th")
        else tag("th", cell, class_="text" if place < text_columns else None, scope="col")
        for place, cell in enumerate(header)
    ]
    body = [row if isinstance(row, Markup) else table_row(row, text_columns) for row in rows]
    return tag(
        "div",
        tag(
            "table",
            tag("thead", tag("tr", names)),
            tag("tbody", body),
            class_="grouped" if grouped else None,
        ),
        class_="wide",
    )


def table_row(cells: Sequence[Content], text_columns: int = 1, class_: str | None = None) -> Markup:
    """One row of a table; a cell that is a `td` already stays as it is."""
    made = [
        cell
        if isinstance(cell, Markup) and cell.startswith("<td")
        else tag("td", cell, class_="text" if place < text_columns else None)
        for place, cell in enumerate(cells)
    ]
    return tag("tr", made, class_=class_)


def show_plot(plot: Plot, page: str, heading: bool = True) -> Markup:
    """A plot's panels with its legend and how to read it."""
    legend = [
        tag("li", tag("i", _GLYPHS[key.marker], style=f"color:{key.colour}"), key.label)
        for key in plot.legend
    ]
    panels = [
        panel_svg(panel, f"{page}/{plot.name}/{place}") for place, panel in enumerate(plot.panels)
    ]
    return Markup(
        "".join(
            [
                tag("h3", plot.title) if heading else "",
                tag("p", plot.text, class_="muted"),
                tag("ul", legend, class_="legend") if legend else "",
                tag("div", panels, class_="panels"),
            ]
        )
    )


def show_pictures(pictures: Sequence[tuple[Path, str]], problems: list[str]) -> Markup:
    """Picture files with their captions; those that cannot be read are added to `problems`."""
    shown = []
    for path, caption in pictures[:_MOST_PICTURES]:
        try:
            source, broad = _embed(path)
        except (OSError, ValueError, SyntaxError) as error:
            problems.append(f"{path.parent.name}/{path.name}: {error}")
            continue
        image = tag("img", src=source, alt=caption, class_="broad" if broad else None)
        frame = tag("div", image, class_="frame")
        shown.append(tag("figure", frame, tag("figcaption", caption)))
    more = len(pictures) - _MOST_PICTURES
    note = tag("p", f"… and {more} more in the run directory.", class_="muted") if more > 0 else ""
    rest = Markup("")
    if shown[_FIRST_PICTURES:]:
        count = len(shown) - _FIRST_PICTURES
        hidden = tag("div", shown[_FIRST_PICTURES:], class_="pictures")
        rest = tag("details", tag("summary", f"{count} more pictures"), hidden)
    return Markup(tag("div", shown[:_FIRST_PICTURES], class_="pictures") + rest + note)


def show_problems(problems: Sequence[str]) -> Markup:
    """A notice of what could not be read; nothing where all could."""
    if not problems:
        return Markup("")
    items = [tag("li", problem) for problem in problems]
    return tag("div", "Not all of the run could be read:", tag("ul", items), class_="notice")


def number(value: float | None, plus: bool = False) -> str:
    """A metric with one decimal; "n/a" where it is not defined."""
    return "n/a" if value is None else signed(value, plus)


def metric_cells(scores: Mapping[str, float | None] | None, metrics: Sequence[str]) -> list[str]:
    """The cells of a set's metrics."""
    return [number(None if scores is None else scores[metric]) for metric in metrics]


def duration(seconds: float | None) -> str:
    """A time as people say it."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def show_value(value: object) -> str:
    """A setting as people write it."""
    if value is None:
        return "off"
    if isinstance(value, dict):
        return "on: " + ", ".join(f"{key} {show_value(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(show_value(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or "none"


def _embed(path: Path) -> tuple[str, bool]:
    """A picture as a data address, and whether it is broad.

    It stays as it is, or becomes WebP where that is less, in a width that a page can show.
    """
    with Image.open(path) as image:
        image.load()
        width = min(image.width, _WIDEST)
        size = (width, max(round(image.height * width / image.width), 1))
        small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    small.save(stream, "WEBP", quality=82)
    kind, content = "webp", stream.getvalue()
    if path.stat().st_size <= len(content):
        kind, content = "png", path.read_bytes()
    address = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return address, size[0] > 1.5 * size[1]
