"""The tables as data (`paper.json`): the paper's figures, entered once, and the run of each row.

The last table, "ablation", is our own on the embedded data set and has no figures of the paper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cldetr.errors import InputError

Figure = tuple[float, float | None]  # a value and the half width of its 95% interval


@dataclass(frozen=True)
class PaperRow:
    """A row of a table.

    Attributes:
        label: what the table calls it.
        run: the config or run of `configs/` by name; None where the paper quotes another paper.
        figures: by metric (`all.AP`, `old.APs`, `fpp.AP`, …), in %.
    """

    label: str
    run: str | None
    figures: Mapping[str, Figure]


@dataclass(frozen=True)
class PaperTable:
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
    text = Path(__file__).with_name("paper.json").read_text(encoding="utf-8")
    return {
        table["name"]: PaperTable(
            table["name"],
            table["title"],
            tuple(table["columns"]),
            tuple(
                PaperRow(
                    row["label"],
                    row["run"],
                    {metric: _figure(value) for metric, value in row.get("figures", {}).items()},
                )
                for row in table["rows"]
            ),
            table.get("change", False),
        )
        for table in json.loads(text)["tables"]
    }


def find_table(name: str) -> PaperTable:
    """The table of that name; an unknown one's error lists the choices."""
    tables = paper_tables()
    if name not in tables:
        raise InputError(f"there is no table {name!r}; there are: {', '.join(tables)}")
    return tables[name]


def _figure(value: float | list[float]) -> Figure:
    return (value[0], value[1]) if isinstance(value, list) else (value, None)
