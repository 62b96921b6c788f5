"""How good the pseudo-labels of a phase are, or will be, against the objects that it hides.

Computed before training, it tells which K, λ and score to take; afterwards, what the run had.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from tqdm import tqdm

from cldetr.analysis.pseudo_label_stats import (
    Counts,
    Grid,
    PseudoLabelStats,
    RuleStats,
)
from cldetr.config import method_of
from cldetr.data.coco import label_table
from cldetr.data.mapper import Augmentation, Mapper
from cldetr.data.views import View
from cldetr.engine.checkpoint import load_state
from cldetr.engine.ledger import read_json
from cldetr.engine.restore import build_detector, config_of_run, final_weights
from cldetr.engine.rundata import RunData
from cldetr.engine.teacher_cache import read_thresholds
from cldetr.errors import InputError
from cldetr.files import atomic_path, write_json
from cldetr.methods.learner import freeze
from cldetr.methods.pseudo import Predictions, PseudoRule

_OWN = "own"  # the run's rule


@dataclass(frozen=True)
class Diagnosis:
    """What was measured on one phase.

    Attributes:
        phase: whose images were labelled, by the model of the phase before.
        where: "phase" for the phase's training images, "test" for the test images.
        weights: the file of the model that labels.
        names: of the old classes, by label.
        softmax: whether the head has a background class.
        grid: the settings.
        counts: of all settings.
        rule: the run's own.
        own: its counts.
        selections: counts of the selections that there are, at the run's λ, by name.
    """

    phase: int
    where: str
    weights: str
    names: dict[int, str]
    softmax: bool
    grid: Grid
    counts: Counts
    rule: PseudoRule
    own: Counts
    selections: dict[str, Counts]

    @property
    def best(self) -> tuple[int, int, int]:
        """Indices of the recommended setting, among those that a rule can express."""
        allowed = np.full(self.counts.given.shape[:-1], not self.softmax)
        # A softmax head takes the top K of its foreground, or all of it above a score.
        allowed[:, :, 0] = allowed[-1] = True  # the largest K is last
        return self.counts.best(allowed)

    @property
    def recommended(self) -> dict[str, float]:
        """K, λ and score of the best setting."""
        grid, (j, v, s) = self.grid, self.best
        return {"k": grid.k[j], "iou": grid.iou[v], "score": grid.score[s]}

    @property
    def recommended_text(self) -> str:
        """The best setting in words."""
        return "K {k}, λ {iou:g}, score > {score:g}".format(**self.recommended)

    def overrides(self) -> str:
        """The recommended setting as overrides of a YAML config."""
        k, iou, score = self.recommended.values()
        values: dict[str, object] = {"SELECT": "topk", "K": k, "IOU": f"{iou:g}"}
        if not self.softmax:
            values["FOREGROUND"] = f"{score:g}"
        elif score > 0:
            values = {"SELECT": "threshold", "SCORE": f"{score:g}", "IOU": f"{iou:g}"}
        return " ".join(f"METHOD.PSEUDO.{key} {value}" for key, value in values.items())

    def summary(self) -> dict[str, Any]:
        """The numbers as JSON data."""
        rule = {
            key: getattr(self.rule, key) for key in ("select", "k", "iou", "foreground", "score")
        }

        def rates(labels: list[int]) -> dict[str, Any]:
            own, counts = self.own.rates(labels), self.counts.rates(labels)
            return {"rule": _at((), own), "recommended": _at(self.best, counts)}

        every = rates(list(self.names))
        return {
            "images": self.counts.images,
            "of": self.where,
            "weights": self.weights,
            "hidden_objects": int(self.counts.hidden.sum()),
            "rule": rule | every["rule"],
            "recommended": {
                **self.recommended,
                **every["recommended"],
                "overrides": self.overrides(),
            },
            "selections": {
                name: _at((), counts.rates(list(self.names)))
                for name, counts in self.selections.items()
            },
            "per_category": {
                name: {"hidden": int(self.counts.hidden[label]), **rates([label])}
                for label, name in self.names.items()
            },
        }


def diagnose(
    cfg: CfgNode,
    phase: int,
    weights: str | os.PathLike[str],
    *,
    where: str = "auto",
    limit: int = 1000,
    data: RunData | None = None,
    thresholds: Mapping[int, float] | None = None,
) -> Diagnosis:
    """Labels images of a phase with the model of the one before, and counts what is right.

    Args:
        cfg: of the run, or of the run to be.
        phase: from 2 on.
        weights: of the model after phase − 1.
        where: "phase" for the phase's training images, whose annotation file must know the old
            classes too (in a benchmark it does), "test" for the test images, or "auto": the first
            where it can be.
        limit: maximum number of images, spread evenly.
        data: of the run, where it is already read.
        thresholds: those that the run found, where its rule has a threshold for each class; else
            they are found from the images that are labelled.
    """
    data = data or RunData(cfg)
    scenario = data.scenario
    if not 2 <= phase <= len(scenario.phases):
        raise InputError(
            f"pseudo-labels are made from phase 2 to {len(scenario.phases)} of "
            f"{scenario.name}, not in phase {phase}"
        )
    if not scenario.hides_seen(phase):
        raise InputError(
            f"phase {phase} of {scenario.name} has no pseudo-labels: all classes are annotated in "
            "every domain"
        )
    old, classes = scenario.old(phase), len(scenario.categories)
    view, where = _all_labels(data, phase, where)
    detector = build_detector(cfg, load_state(weights), str(weights), cfg.MODEL.DEVICE)
    teacher = freeze(detector, old)
    rule = method_of(cfg).pseudo or PseudoRule()
    softmax = teacher.background(torch.zeros(1, 1, classes + 1)) is not None
    grid = Grid().including(rule, int(detector.num_queries), softmax)
    stats = PseudoLabelStats(classes, grid)
    known = {} if thresholds is None else {_OWN: thresholds}
    compared = {_OWN: rule, **_compared(rule)}
    rules = RuleStats(compared, old, classes, known)
    indices = np.unique(np.linspace(0, len(view) - 1, min(limit, len(view))).round().astype(int))
    mapper = Mapper(Augmentation.from_config(cfg).deterministic(), training=True)
    for index in tqdm(indices, desc="labelling", unit="image", leave=False, disable=None):
        entry = mapper(view[int(index)], np.random.default_rng(0))
        (target,) = teacher.targets([entry])
        is_old = teacher.visible_classes[target.labels]
        truth, hidden = (target[x] for x in (~is_old, is_old))
        with torch.no_grad():
            output = teacher.predict(teacher.preprocess([entry]))
        logits, boxes = output.logits[-1].float(), output.boxes[-1].float()
        scores, background = teacher.scores(logits), teacher.background(logits)
        pred = Predictions(scores * teacher.visible_classes, boxes, background)
        stats.add(pred, truth, hidden)
        rules.add(pred, truth, hidden)
    names = {label: scenario.categories[label].name for label in old}
    counts, selections = stats.count(), rules.count()
    own = selections.pop(_OWN)
    return Diagnosis(
        phase, where, str(weights), names, softmax, grid, counts, rule, own, selections
    )


def _compared(rule: PseudoRule) -> dict[str, PseudoRule]:
    """The selections that there are, with and without suppression of duplicates, at a rule's λ."""
    plain = {
        "top 10": PseudoRule(),
        "score ≥ 0.3": PseudoRule(select="threshold", score=0.3),
        "score ≥ 0.4": PseudoRule(select="threshold", score=0.4),
        "a threshold per class": PseudoRule(select="per_class", score=0.4),
    }
    made = {name: dataclasses.replace(each, iou=rule.iou) for name, each in plain.items()}
    distinct = {f"{x}, NMS 0.7": dataclasses.replace(made[x], nms_iou=0.7) for x in made}
    return made | distinct


def diagnose_run(
    run_dir: str | os.PathLike[str],
    *,
    phases: Sequence[int] | None = None,
    where: str = "auto",
    limit: int = 1000,
    device: str = "auto",
) -> list[Diagnosis]:
    """Diagnoses the phases of a run whose old model is there, and writes it into the run."""
    cfg = config_of_run(run_dir, device)
    data = RunData(cfg)
    done = []
    for phase in phases or range(2, len(data.scenario.phases) + 1):
        weights = final_weights(run_dir, phase - 1)
        if weights is not None:
            stored = read_thresholds(Path(run_dir, f"phase{phase}", "train", "thresholds.json"))
            done.append(
                diagnose(
                    cfg, phase, weights, where=where, limit=limit, data=data, thresholds=stored
                )
            )
        elif phases:
            raise InputError(f"phase {phase - 1} of {run_dir} is not finished: no model labels")
    if not done:
        raise InputError(f"{run_dir} has no finished phase with another one after it")
    for diagnosis in done:
        write_diagnosis(diagnosis, Path(run_dir))
    return done


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> None:
    """Writes diagnostics.json, and the table of all settings below `diagnostics`."""
    with (
        atomic_path(folder / f"diagnostics/phase{diagnosis.phase}.csv") as partial,
        open(partial, "w", newline="", encoding="utf-8") as stream,
    ):
        csv.writer(stream, lineterminator="\n").writerows(_csv_rows(diagnosis))
    file = folder / "diagnostics.json"
    stored = read_json(file)["phases"] if file.exists() else {}
    stored[str(diagnosis.phase)] = diagnosis.summary()
    write_json(file, {"format": 1, "phases": dict(sorted(stored.items()))})


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """A diagnosis as text: the run's rule, the recommended one, each setting varied, each class."""
    grid, best, summary = diagnosis.grid, diagnosis.best, diagnosis.summary()
    of = "training" if diagnosis.where == "phase" else "test"
    lines = [
        f"phase {diagnosis.phase}: {summary['images']} {of} images, "
        f"{summary['hidden_objects']} objects of old classes",
        _line("", "per image", "precision", "recall", "F1"),
        _rate_line(f"the run's rule ({diagnosis.rule.select})", summary["rule"]),
        _rate_line(diagnosis.recommended_text, summary["recommended"]),
    ]
    for name, entry in summary["selections"].items():
        lines.append(_rate_line(name, entry))
    rates = diagnosis.counts.rates()
    axes: dict[str, Sequence[float]] = {"K": grid.k, "λ": grid.iou, "score >": grid.score}
    for axis, (title, values) in enumerate(axes.items()):
        lines += ["", f"{title}, the others as recommended"]
        for index, value in enumerate(values):
            setting = (*best[:axis], index, *best[axis + 1 :])
            mark = "  ←" if setting == best else ""
            lines.append(_rate_line(f"  {value:g}", _at(setting, rates)) + mark)
    lines += ["", "classes, as recommended"]
    for name, entry in summary["per_category"].items():
        lines.append(_rate_line(f"  {name} ({entry['hidden']})", entry["recommended"]))
    return "\n".join([*lines, "", f"recommended (best F1): {diagnosis.overrides()}"])


def knows_old_classes(data: RunData, phase: int) -> bool:
    """Whether the annotation file of a phase has the old classes too, as in a benchmark."""
    scenario = data.scenario
    own = data.train[scenario.phase(phase).source]
    return bool((label_table(own, scenario.categories, scenario.old(phase)) >= 0).any())


def _all_labels(data: RunData, phase: int, where: str) -> tuple[View, str]:
    """Images with the objects of all classes seen up to a phase, and where they are from."""
    known = knows_old_classes(data, phase)
    if where == "auto":
        where = "phase" if known else "test"
    if where == "phase" and not known:
        file = data.train[data.scenario.phase(phase).source].json_file
        raise InputError(
            f"the data of phase {phase} ({file}) does not know the old classes, so that "
            "nothing tells which pseudo-labels are right: use the test images, --on test"
        )
    return DatasetCatalog.get(data.name("test" if where == "test" else "revealed", phase)), where


def _csv_rows(diagnosis: Diagnosis) -> Iterator[list[Any]]:
    yield ["class", "k", "iou", "score", "per_image", "precision", "recall", "f1"]
    grid = diagnosis.grid
    groups = {"all": list(diagnosis.names)}
    groups |= {name: [label] for label, name in diagnosis.names.items()}
    settings = list(itertools.product(grid.k, grid.iou, grid.score))
    for name, labels in groups.items():
        tables = diagnosis.counts.rates(labels).values()
        for setting, *rates in zip(settings, *(x.ravel() for x in tables), strict=True):
            yield [name, *setting, *("" if np.isnan(rate) else f"{rate:.4f}" for rate in rates)]


def _at(setting: tuple[int, ...], rates: Mapping[str, np.ndarray]) -> dict[str, float | None]:
    """The rates of one setting; None where there is nothing to divide by."""
    values = {key: float(table[setting]) for key, table in rates.items()}
    return {key: None if math.isnan(value) else value for key, value in values.items()}


def _rate_line(text: str, rates: Mapping[str, Any]) -> str:
    values = (rates[key] for key in ("precision", "recall", "f1"))
    cells = ["n/a" if value is None else f"{value:.3f}" for value in values]
    return _line(text, f"{rates['per_image']:.2f}", *cells)


def _line(text: str, *cells: str) -> str:
    return f"{text:<34}" + "".join(f"{cell:>10}" for cell in cells)
