"""The table of a sweep: mean ± 95% confidence interval over the seeds, beside the paper's figures.

A metric is written as `all.AP`, `old.APs`, `new.AP50` (of the last phase's model) or `fpp.AP`. The
paper's tables are data, `paper.json`: its figures, entered once, and the run of each row. Those on
the embedded data set and on photographs are our own and have no figures of the paper.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from scipy import stats
from tabulate import tabulate

from cldetr.errors import InputError
from cldetr.evaluation.average_precision import METRICS
from cldetr.evaluation.voc import VOC_METRICS

Figure = tuple[float, float | None]  # a value and the half width of its 95% interval
COLUMNS = ("all.AP", "all.AP50", "all.AP75", "old.AP", "new.AP", "fpp.AP")
RUNS = Mapping[int, Mapping[str, Any]]  # results by seed
_GROUPS = ("all", "old", "new", "fpp")
# Columns of runs.csv: which run it was, and its results, the same whatever table it stands beside.
_RUN = ("config", "settings", "scenario", "method", "seed")
_RESULTS = ("phase1.AP", *(f"{group}.{name}" for group in _GROUPS for name in METRICS))
# What LaTeX does not know as a letter; tabulate escapes the rest.
_TEX = {"±": "$\\pm$", "≥": "$\\geq$", "×": "$\\times$", "Δ": "$\\Delta$", "–": "--"}


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


@dataclass(frozen=True)
class Row:
    """A config's line.

    Attributes:
        label: what the table calls it.
        runs: how many are finished.
        ours: what was measured, by metric; None where no run has a value.
        change: AP less that of the table's first row, paired by seed; None where nothing pairs.
        paper: the paper's figures, by metric.
    """

    label: str
    runs: int
    ours: Mapping[str, Figure | None]
    change: Figure | None = None
    paper: Mapping[str, Figure] = field(default_factory=dict)


def mean_interval(values: Sequence[float]) -> Figure:
    """The mean and the half width of its 95% confidence interval (Student's t); None for one."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    factor = float(stats.t.ppf(0.975, len(values) - 1))
    return mean, factor * spread / math.sqrt(len(values))


def own_rows(found: Mapping[str, RUNS], columns: Sequence[str] = COLUMNS) -> list[Row]:
    """Rows of a sweep's configs, each also against the first.

    A row is called what its config calls the method, or by the config where two agree in that.

    Args:
        found: results by config and seed.
        columns: metrics.
    """
    reference = next(iter(found.values()), {})
    labels = _labels(found)
    return [
        Row(
            labels[name],
            len(runs),
            _measured(runs, columns),
            None if runs is reference else _change(runs, reference),
        )
        for name, runs in found.items()
    ]


def table_rows(
    table: PaperTable, found: Mapping[str, RUNS], columns: Sequence[str] | None = None
) -> list[Row]:
    """Rows of a table, with what was measured so far and the paper's figures.

    Args:
        table: the table.
        found: results by the name of a run and by seed; runs that the table does not have get a
            row below its own.
        columns: metrics, by default those of the table.
    """
    others = {name: runs for name, runs in found.items() if name not in table.runs()}
    labels = _labels(others)
    table_and_others = [*table.rows, *(PaperRow(labels[name], name) for name in others)]
    runs = [found.get(row.run or "", {}) for row in table_and_others]
    return [
        Row(
            row.label,
            len(own),
            _measured(own, table.columns if columns is None else columns),
            _change(own, runs[0]) if table.change and own is not runs[0] else None,
            row.figures,
        )
        for row, own in zip(table_and_others, runs, strict=True)
    ]


def format_rows(rows: Sequence[Row], columns: Sequence[str], style: str) -> str:
    """The table as text in a style of tabulate; the paper's figures stand in brackets."""
    change = any(row.change for row in rows)
    heads = ["", "runs", *map(title, columns)] + ["Δ AP"] * change
    lines = []
    for row in rows:
        cells = [row.label, row.runs]
        for column in columns:
            cell = _show(row.ours[column])
            cells.append(f"{cell} ({_show(row.paper[column])})" if column in row.paper else cell)
        cells += [_show(row.change, "+") if row.change else ""] * change
        lines.append(cells)
    return tabulate(lines, heads, style, disable_numparse=True) + "\n"


def latex(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The table for a paper (package booktabs)."""
    text = format_rows(rows, columns, "latex_booktabs")
    return "".join(_TEX.get(letter, letter) for letter in text)


def csv_text(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """One line for each row and metric, in full precision."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "metric", "runs", "mean", "half_95", "paper_mean", "paper_half_95"])
    for row in rows:
        lines = [(column, row.ours[column], row.paper.get(column)) for column in columns]
        if row.change:
            lines.append(("change of all.AP", row.change, None))
        for metric, ours, paper in lines:
            cells = [*(ours or (None, None)), *(paper or (None, None))]
            writer.writerow([row.label, metric, row.runs, *cells])
    return text.getvalue()


def runs_csv_text(found: Mapping[str, RUNS], settings: Mapping[str, str]) -> str:
    """One line for each finished run, in full precision: what the table takes its means of.

    Args:
        found: results by config and seed.
        settings: by config, the digest of its settings.
    """
    columns = [*_RESULTS[1:], *voc_columns(run for runs in found.values() for run in runs.values())]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_RUN, "phase1.AP", *columns])
    for name, runs in found.items():
        for seed, results in sorted(runs.items()):
            about = (name, settings[name], results["scenario"], results["method"], seed)
            first = (results["phases"][0]["all"] or {}).get("AP")
            writer.writerow([*about, first, *(value_of(results, column) for column in columns)])
    return text.getvalue()


def read_runs_csv(
    path: Path, settings: Mapping[str, str]
) -> tuple[dict[str, dict[int, dict[str, Any]]], list[str]]:
    """Results of runs that finished elsewhere, as `runs_csv_text` wrote them.

    Args:
        path: the file; columns that are not a run's are left out.
        settings: by config, the digest of its settings here.

    Returns:
        the results by config and seed, and a line for each run of the same config with other
        settings, which gives none.
    """
    results: dict[str, dict[int, dict[str, Any]]] = {}
    refused = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # also as Excel saves it
            reader = csv.DictReader(file)
            names = reader.fieldnames or ()
            if missing := [name for name in (*_RUN, *_RESULTS) if name not in names]:
                raise InputError(
                    f"{path} has no column {', '.join(missing[:3])}: give a runs.csv of "
                    "`cldetr sweep`, of this version or later"
                )
            for line in reader:
                if None in line or None in line.values():
                    raise ValueError("it has more or fewer cells than columns")
                name = line["config"]
                if name not in settings:
                    continue
                if line["settings"] != settings[name]:
                    refused.append(
                        f"{name}, seed {line['seed']}: {path}, line {reader.line_num}, has a run "
                        f"on {line['scenario']} with other settings, of which the paths of data "
                        f"and weights are some ({line['settings']}, here {settings[name]})"
                    )
                    continue
                runs, seed = results.setdefault(name, {}), int(line["seed"])
                if seed in runs:
                    raise ValueError(f"a second run of {name} with seed {seed}")
                runs[seed] = _run_of(line)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except InputError:
        raise
    except (ValueError, csv.Error) as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from error
    return results, refused


def _run_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """As much of a run's results as a line of runs.csv has."""
    groups: dict[str, dict[str, float | None]] = {name: {} for name in ("phase1", *_GROUPS)}
    for column, text in line.items():
        group, _, metric = column.partition(".")
        if group in groups:
            value = float(text) if text else None
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{column} is {text}")
            groups[group][metric] = value
    about = {name: line[name] for name in ("scenario", "method")}
    return {**about, "phases": [{"all": groups.pop("phase1")}], **groups}


def title(column: str) -> str:
    """A metric as a table's head: `all.AP` is AP, `old.APs` old AP_S, `fpp.AP` FPP."""
    group, metric = column.split(".")
    metric = metric.replace("APs", "AP_S").replace("APm", "AP_M").replace("APl", "AP_L")
    if group == "fpp":
        return metric.replace("AP", "FPP")
    return metric if group == "all" else f"{group} {metric}"


def voc_columns(several: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The columns of VOC's metrics of which some of the results have a value."""
    several = list(several)
    columns = (f"{group}.{metric}" for group in _GROUPS[:3] for metric in VOC_METRICS)
    return tuple(
        column
        for column in columns
        if any(value_of(results, column) is not None for results in several)
    )


def value_of(results: Mapping[str, Any], column: str) -> float | None:
    """A metric of a run's results: `all.AP` after the last phase, `fpp.AP`, `average_AP`."""
    group, _, metric = column.partition(".")
    scores = results[group] if group in results else results["phases"][-1][group]
    return scores.get(metric) if isinstance(scores, Mapping) else scores


def _labels(found: Mapping[str, RUNS]) -> dict[str, str]:
    """What each config calls its method; the config's name where two agree in that."""
    methods = {name: next(iter(runs.values()))["method"] for name, runs in found.items()}
    uses = Counter(methods.values())
    return {name: name if uses[method] > 1 else method for name, method in methods.items()}


def _measured(runs: RUNS, columns: Sequence[str]) -> dict[str, Figure | None]:
    return {
        column: _figure([value_of(results, column) for results in runs.values()])
        for column in columns
    }


def _change(runs: RUNS, reference: RUNS) -> Figure | None:
    differences = []
    for seed in runs.keys() & reference.keys():
        own, other = (value_of(results[seed], "all.AP") for results in (runs, reference))
        differences.append(None if own is None or other is None else own - other)
    return _figure(differences)


def _figure(values: Sequence[float | None]) -> Figure | None:
    known = [value for value in values if value is not None]
    return mean_interval(known) if known else None


def _show(figure: Figure | None, sign: str = "") -> str:
    if figure is None:
        return "–"
    mean, half = figure
    mean = round(mean, 1) + 0.0  # no "-0.0"
    return f"{mean:{sign}.1f}" + ("" if half is None else f" ± {half:.1f}")
