"""The page of a split: what each phase has, what phases share, what to look out for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cldetr.report.page import save_plots, thousands, write_page
from cldetr.report.plotting import Panel, Plot, bar_panels
from cldetr.scenario import Scenario


def write_audit_page(scenario: Scenario, audit: Mapping[str, Any], path: Path) -> None:
    """Writes the page of `cldetr split`, and its plot as files beside it."""
    panels: list[Panel] = []
    for phase in audit["phases"]:
        ranked = sorted(phase["instances_per_class"].items(), key=lambda item: (-item[1], item[0]))
        panels += bar_panels(f"Phase {phase['index']}", ranked, thousands)
    plot = Plot("categories_per_phase", panels)
    save_plots([plot], path.parent / "figures")
    write_page(path, "split.html", scenario=scenario, audit=audit, plot=plot)
