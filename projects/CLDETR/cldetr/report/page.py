"""Pages from templates: HTML files that hold their plots and pictures and load nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from cldetr import __version__
from cldetr.data.manifest import scenario_hash
from cldetr.evaluation.average_precision import METRICS
from cldetr.files import atomic_path
from cldetr.report.plotting import Plot, panel_svg, save_plot, signed
from cldetr.report.tables import mean_text

MAX_PICTURES = 24  # on a page
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
        "cells": lambda scores: [signed(scores.get(metric)) for metric in METRICS],
        "mean": mean_text,
        "thousands": thousands,
        "duration": duration,
        "setting": show_value,
        "yaml": lambda data: yaml.safe_dump(data, sort_keys=False, allow_unicode=True),
        "scenario_hash": scenario_hash,
    }
    environment.globals |= {
        "panel_svg": panel_svg,
        "max_pictures": MAX_PICTURES,
        "version": __version__,
    }
    text = environment.get_template(template).render(content)
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")
    return path


def save_plots(plots: Iterable[Plot], folder: Path) -> dict[str, Plot]:
    """Writes plots that have something to show as files, and returns them by name."""
    drawn = {plot.name: plot for plot in plots if plot.panels}
    for plot in drawn.values():
        save_plot(plot, folder)
    return drawn


def embed_pictures(
    pictures: Sequence[tuple[Path, str]], problems: list[str]
) -> list[dict[str, Any]]:
    """Picture files, as WebP of a width that a page can show, with their captions.

    Those that cannot be read are added to `problems`.
    """
    shown = []
    for path, caption in pictures:
        stream = io.BytesIO()
        try:
            with Image.open(path) as image:
                small = image.convert("RGB")
            small.thumbnail((_MAX_WIDTH, small.height), Image.Resampling.LANCZOS)
            small.save(stream, "WEBP", quality=82)
        except (OSError, ValueError, SyntaxError) as error:
            problems.append(f"{path.parent.name}/{path.name}: {error}")
            continue
        source = f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}"
        broad = small.width > 1.5 * small.height
        shown.append({"source": source, "caption": caption, "broad": broad})
    return shown


def thousands(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """A time as people say it."""
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
