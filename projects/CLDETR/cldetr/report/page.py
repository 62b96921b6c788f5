"""Pages from templates: HTML files that hold their plots and pictures and load nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from cldetr import __version__
from cldetr.files import atomic_path
from cldetr.report.plotting import Plot, panel_svg, save_plot, signed

_MAX_PICTURES, _FIRST_PICTURES = 24, 8  # on a page, and of these at once
_MAX_WIDTH = 1600  # pixels of an embedded picture


def write_page(path: Path, template: str, **content: Any) -> Path:
    """Renders a template of `templates/` and writes it, atomically; returns the path.

    All values are escaped; only the SVG of plots is markup.
    """
    environment = Environment(
        loader=PackageLoader("cldetr.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": signed,
        "phase_cells": _phase_cells,
        "overlap_cells": _overlap_cells,
    }
    environment.globals |= {"panel_svg": panel_svg, "version": __version__}
    text = environment.get_template(template).render(content)
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")
    return path


def save_plots(plots: Iterable[Plot | None], folder: Path) -> list[Plot]:
    """Writes plots as files and returns those that there are."""
    drawn = [plot for plot in plots if plot is not None]
    for plot in drawn:
        save_plot(plot, folder)
    return drawn


def embed_pictures(
    pictures: Sequence[tuple[Path, str]], problems: list[str]
) -> dict[str, Any] | None:
    """Picture files with their captions; those that cannot be read are added to `problems`."""
    shown = []
    for path, caption in pictures[:_MAX_PICTURES]:
        try:
            shown.append({**_embed(path), "caption": caption})
        except (OSError, ValueError, SyntaxError) as error:
            problems.append(f"{path.parent.name}/{path.name}: {error}")
    more = max(len(pictures) - _MAX_PICTURES, 0)
    parts = {"first": shown[:_FIRST_PICTURES], "rest": shown[_FIRST_PICTURES:], "more": more}
    return parts if pictures else None


def thousands(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """A time as people say it."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def show_value(value: object) -> str:
    """A setting as people write it; nothing for one that is not used."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        parts = [f"[{show_value(x)}]" if isinstance(x, list) else show_value(x) for x in value]
        return ", ".join(parts) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def _phase_cells(phase: Mapping[str, Any]) -> list[str]:
    keys = ("index", "classes", "images", "annotated", "empty", "instances", "crowd")
    hidden = phase["hidden"]
    return [
        thousands(value) for value in (*(phase[k] for k in keys), hidden["old"], hidden["future"])
    ]


def _overlap_cells(pair: Mapping[str, Any]) -> list[str]:
    phases, examples = (list(map(str, pair[key])) for key in ("phases", "examples"))
    return [" and ".join(phases), thousands(pair["images"]), ", ".join(examples)]


def _embed(path: Path) -> dict[str, Any]:
    """A picture as a data address, and whether it is broad.

    It stays as it is, or becomes WebP where that is less, in a width that a page can show.
    """
    with Image.open(path) as image:
        image.load()
        width = min(image.width, _MAX_WIDTH)
        size = (width, max(round(image.height * width / image.width), 1))
        small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    small.save(stream, "WEBP", quality=82)
    kind, content = "webp", stream.getvalue()
    if path.stat().st_size <= len(content):
        kind, content = "png", path.read_bytes()
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return {"source": source, "broad": size[0] > 1.5 * size[1]}
