"""Results of a whole run: FPP, the phase × phase matrix, forgetting, as JSON, CSV and text.

Where the phases are domains, "groups" are the domains and "old" means earlier domains.

docs/results-schema.md says what each field of results.json holds.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from cldetr.errors import InputError
from cldetr.evaluation.average_precision import METRICS, Scores
from cldetr.files import atomic_path, write_json

FORMAT = 1
Matrix = list[list[float | None]]

_WIDTH = 100  # of printed tables, in columns


def summarise(
    phases: Sequence[Mapping[str, Any]],
    *,
    scenario: str,
    method: str,
    joint: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Computes the content of results.json from the evaluations of a run's phases.

    Args:
        phases: One entry for each phase done, in order, as `IncrementalEvaluator.evaluate` gives
            it; further fields (such as `stage`) are carried along.
        scenario: What the scenario is called ("70+10").
        method: What the method is called.
        joint: The results of a run that trained on all classes together.
    """
    numbers = [entry["phase"] for entry in phases]
    if not phases or numbers != list(range(1, len(phases) + 1)):
        raise ValueError(f"the phases of a run are numbered 1, 2, …; got {numbers}")
    matrix = phase_matrix(phases)
    domains = {"domains": summarise_domains(phases)} if "domains" in phases[0] else {}
    return {
        "format": FORMAT,
        "scenario": scenario,
        "method": method,
        "phases": [dict(entry) for entry in phases],
        "fpp": forgetting_percentage_points(phases),
        "matrix": matrix,
        "average_AP": _mean([entry["all"]["AP"] for entry in phases]),
        "forgetting": forgetting(matrix),
        "backward_transfer": backward_transfer(matrix),
        "gap_to_joint": None if joint is None else gap_to_joint(phases[-1], joint),
        **domains,
    }


def forgetting_percentage_points(phases: Sequence[Mapping[str, Any]]) -> Scores | None:
    """Computes FPP (Sec. 4.1): what the last model lost on the classes of the first phase.

    AP of the first phase's model − AP of the last phase's model, for each metric: positive where
    something was forgotten. None with a single phase.
    """
    if len(phases) < 2:
        return None
    return _difference(phases[0]["groups"][0], phases[-1]["groups"][0])


def phase_matrix(phases: Sequence[Mapping[str, Any]]) -> Matrix:
    """Lays out AP[i][j]: after phase i + 1, on the classes of phase j + 1; None where j > i."""
    count = len(phases)
    return [
        [group["AP"] for group in entry["groups"]] + [None] * (count - len(entry["groups"]))
        for entry in phases
    ]


def summarise_domains(phases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lays out the AP per domain after each phase, of domains to come too.

    Returns:
        `names`, in the order of the phases; `matrix`, AP[i][j] after phase i + 1 on domain j + 1;
        `mean`, after each phase over the domains seen by then; `forgetting`, of each domain that
        another one followed: AP right after its own phase − AP after the last phase done, None for
        the rest; and `mean_forgetting`.
    """
    matrix = [[scores["AP"] for scores in entry["domains"].values()] for entry in phases]
    losses: list[float | None] = [None] * len(matrix[0])
    for j in range(len(phases) - 1):
        then, now = matrix[j][j], matrix[-1][j]
        losses[j] = None if then is None or now is None else then - now
    return {
        "names": list(phases[0]["domains"]),
        "matrix": matrix,
        "mean": [entry["all"]["AP"] for entry in phases],
        "forgetting": losses,
        "mean_forgetting": _mean(losses),
    }


def forgetting(matrix: Matrix) -> float | None:
    """Computes the average forgetting of Chaudhry et al. (2018), "Riemannian Walk".

    With AP[i][j] after phase i on the classes of phase j, and k phases:
    1 / (k − 1) · Σ_{j<k} (max_{l<k} AP[l][j] − AP[k][j]).
    """
    losses = []
    for j in range(len(matrix) - 1):
        past = [ap for ap in (row[j] for row in matrix[:-1]) if ap is not None]
        last = matrix[-1][j]
        if past and last is not None:
            losses.append(max(past) - last)
    return _mean(losses)


def backward_transfer(matrix: Matrix) -> float | None:
    """Computes the backward transfer of Lopez-Paz and Ranzato (2017), "Gradient Episodic Memory".

    1 / (k − 1) · Σ_{j<k} (AP[k][j] − AP[j][j]); negative where later phases did harm.
    """
    gains = []
    for j in range(len(matrix) - 1):
        then, last = matrix[j][j], matrix[-1][j]
        gains.append(None if then is None or last is None else last - then)
    return _mean(gains)


def gap_to_joint(last: Mapping[str, Any], joint: Mapping[str, Any]) -> Scores:
    """Computes the joint run's metrics − those of the last phase, on all classes of both."""
    upper = joint["phases"][-1]
    ours, theirs = set(last["per_category"]), set(upper["per_category"])
    if ours != theirs:
        raise InputError.listing(
            "The joint run does not have the classes of this run; only one of them has:",
            sorted(ours ^ theirs),
        )
    return _difference(upper["all"], last["all"])


def metric_names(phases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the metrics of a run's phases: `METRICS`, and what else was evaluated."""
    return list(dict.fromkeys([*METRICS, *(name for entry in phases for name in entry["all"])]))


def write_results(
    results: Mapping[str, Any], directory: str | os.PathLike[str], name: str = "results"
) -> None:
    """Writes results.csv and then results.json, or so named, each whole or not at all."""
    metrics = metric_names(results["phases"])
    rows = [["phase", "stage", "kind", "name", *metrics], *_csv_rows(results, metrics)]
    with (
        atomic_path(Path(directory) / f"{name}.csv") as partial,
        open(partial, "w", newline="", encoding="utf-8") as stream,
    ):
        csv.writer(stream, lineterminator="\n").writerows(rows)
    write_json(Path(directory) / f"{name}.json", results)


def load_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a results.json."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as results of a run: {error}") from error
    found = results.get("format") if isinstance(results, dict) else None
    if found != FORMAT:
        raise InputError(f"{path} has format {found}; this version reads format {FORMAT}.")
    return results


def format_table(results: Mapping[str, Any]) -> str:
    """Formats a run's metrics as text: a line for each phase and group, then the run's numbers."""
    metrics = metric_names(results["phases"])
    lines = [f"{results['scenario']}, {results['method']} (AP in %)", _line("", "", metrics)]
    lines += [line for entry in results["phases"] for line in _phase_lines(entry, metrics)]
    for label, name, field in (("FPP", "phase 1", "fpp"), ("gap to joint", "all", "gap_to_joint")):
        if results[field] is not None:
            lines.append(_line(label, name, _cells(results[field], metrics)))
    for field in ("average_AP", "forgetting", "backward_transfer"):
        lines.append(_line(field.replace("_", " "), "", [_show(results[field])]))
    if "domains" in results:
        lines += ["", format_domains(results)]
    return "\n".join(lines)


def format_entry(entry: Mapping[str, Any]) -> str:
    """Formats the metrics of one evaluation as text."""
    metrics = metric_names([entry])
    lines = [_line("AP in %", "", metrics), *_phase_lines(entry, metrics)]
    for name, scores in entry.get("domains", {}).items():
        lines.append(_line(f"  {name}"[:25], "", _cells(scores, metrics)))
    return "\n".join(lines)


def format_domains(results: Mapping[str, Any]) -> str:
    """Formats the AP after each phase (rows) on each domain (columns) as text, and what was lost.

    The mean is over the domains seen by then; those to come stand in brackets.
    """
    domains = results["domains"]
    rows = []
    for i, (aps, mean) in enumerate(zip(domains["matrix"], domains["mean"], strict=True)):
        cells = [_show(ap) if j <= i else f"({_show(ap)})" for j, ap in enumerate(aps)]
        rows.append([f"after phase {i + 1}", *cells, _show(mean)])
    if len(rows) > 1:
        losses = ["" if loss is None else _show(loss) for loss in domains["forgetting"]]
        rows.append(["forgetting", *losses, _show(domains["mean_forgetting"])])
    heads = ["AP on", *domains["names"], "mean"]
    right = ["left", *["right"] * (len(heads) - 1)]
    return tabulate(rows, heads, "plain", disable_numparse=True, colalign=right)


def format_matrix(results: Mapping[str, Any]) -> str:
    """Formats the AP after each phase (rows) on the classes of each phase (columns) as text."""
    matrix: Matrix = results["matrix"]
    label_width, cell_width = 16, 7
    limit = (_WIDTH - label_width) // cell_width
    blocks = []
    for first in range(0, len(matrix), limit):
        columns = range(first, min(first + limit, len(matrix)))
        header = "".join(f"{j + 1:>{cell_width}}" for j in columns)
        lines = [f"{'AP on classes of':<{label_width}}{header}"]
        for i, row in enumerate(matrix[first:], start=first):
            cells = "".join(f"{_show(row[j]) if j <= i else '':>{cell_width}}" for j in columns)
            lines.append(f"{f'after phase {i + 1}':<{label_width}}{cells}".rstrip())
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _phase_lines(entry: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    # In the first phase nothing is old and all is new.
    names = ("all",) if entry["old"] is None else ("all", "old", "new")
    labels = [f"after phase {entry['phase']}", "", ""]
    return [
        _line(label, name, _cells(entry[name], metrics))
        for label, name in zip(labels, names, strict=False)
    ]


def _csv_rows(results: Mapping[str, Any], metrics: Sequence[str]) -> Iterator[list[Any]]:
    for entry in results["phases"]:
        start = [entry["phase"], entry.get("stage")]
        groups = [("set", name, entry[name]) for name in ("all", "old", "new")]
        groups += [("group", str(i), scores) for i, scores in enumerate(entry["groups"], start=1)]
        groups += [("domain", name, scores) for name, scores in entry.get("domains", {}).items()]
        groups += [("category", name, scores) for name, scores in entry["per_category"].items()]
        for kind, name, scores in groups:
            if scores is not None:
                yield [*start, kind, name, *(scores.get(metric) for metric in metrics)]


def _difference(first: Scores, second: Scores) -> Scores:
    difference: Scores = {}
    for metric in dict.fromkeys([*METRICS, *first, *second]):
        a, b = first.get(metric), second.get(metric)  # a run from before a metric lacks it
        difference[metric] = None if a is None or b is None else a - b
    return difference


def _mean(values: Sequence[float | None]) -> float | None:
    """Averages what is defined; None where nothing is."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def _line(label: str, group: str, cells: Sequence[str]) -> str:
    return f"{label:<18}{group:<8}" + "".join(f"{cell:>8}" for cell in cells)


def _cells(scores: Scores | None, metrics: Sequence[str]) -> list[str]:
    return ["n/a" if scores is None else _show(scores.get(metric)) for metric in metrics]


def _show(value: float | None) -> str:
    # The sum turns −0.0 into 0.0.
    return "n/a" if value is None else f"{round(value, 1) + 0.0:.1f}"
