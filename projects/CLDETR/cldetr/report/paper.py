"""The tables as data (`paper.json`): the paper's figures, entered once, and the run of each row.

The last table, "ablation", is our own on the embedded data set and has no figures of the paper.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

Figure = tuple[float, float | None]  # a value and the half width of its 95% interval


class PaperRow(msgspec.Struct):
    """A row of a table.

    Attributes:
        label: what the table calls it.
        run: the config or run of `configs/` by name; None where the paper quotes another paper.
        figures: by metric (`all.AP`, `old.APs`, `fpp.AP`, …), in %; each is a `Figure`.
    """

    label: str
    run: str | None
    figures: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Takes a number alone for a figure without an interval."""
        self.figures = {
            metric: tuple(value) if isinstance(value, list) else (value, None)
            for metric, value in self.figures.items()
        }


class PaperTable(msgspec.Struct):
    """A table: its metrics, its rows, and whether rows are compared with the first."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[PaperRow, ...]
    change: bool = False

    def runs(self) -> list[str]:
        """Names of the rows' runs, each once, in order."""
        return list(dict.fromkeys(row.run for row in self.rows if row.run))


def paper_tables() -> dict[str, PaperTable]:
    """Reads all tables, by name."""
    content = msgspec.json.decode(Path(__file__).with_name("paper.json").read_bytes())
    tables = msgspec.convert(content["tables"], list[PaperTable])
    return {table.name: table for table in tables}
