"""The paper's own figures, entered once as data (`paper.json`), and the config of each row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cldetr.errors import InputError

Figure = tuple[float, float | None]  # a value and the half width of its 95% interval


@dataclass(frozen=True)
class PaperRow:
    """A row of one of the paper's tables.

    Attributes:
        label: what the paper calls it.
        config: its file under `configs/`; None where the paper quotes another one.
        figures: by metric (`all.AP`, `old.APs`, `fpp.AP`, …), in %.
    """

    label: str
    config: str | None
    figures: Mapping[str, Figure]


@dataclass(frozen=True)
class PaperTable:
    """One of the paper's tables."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[PaperRow, ...]

    def configs(self, root: Path) -> list[Path]:
        """The config files of the rows that have one, each once, in order."""
        return list(dict.fromkeys(root / row.config for row in self.rows if row.config))


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
                    row["config"],
                    {metric: _figure(value) for metric, value in row["figures"].items()},
                )
                for row in table["rows"]
            ),
        )
        for table in json.loads(text)["tables"]
    }


def find_table(name: str) -> PaperTable:
    """The table of that name; an unknown one's error lists the choices."""
    tables = paper_tables()
    if name not in tables:
        raise InputError(f"the paper has no table {name!r}; there are: {', '.join(tables)}")
    return tables[name]


def _figure(value: float | list[float]) -> Figure:
    return (value[0], value[1]) if isinstance(value, list) else (value, None)
