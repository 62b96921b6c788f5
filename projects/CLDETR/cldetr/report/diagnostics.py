"""How good the pseudo-labels of a phase are, or will be, against the objects that it hides.

Computed before training, it tells which K, λ and score to take; afterwards, what the run had.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from cldetr.data.mapper import Mapper
from cldetr.data.views import View, label_table
from cldetr.engine.checkpoint import load_into, load_state
from cldetr.engine.from_run import final_weights, recipe_of_run
from cldetr.engine.ledger import read_json
from cldetr.engine.recipe import Recipe
from cldetr.engine.rundata import RunData
from cldetr.errors import InputError
from cldetr.files import atomic_path, write_json
from cldetr.layers.boxes import box_cxcywh_to_xyxy
from cldetr.methods.evidence import Counts, Evidence, Grid, find_right
from cldetr.methods.learner import freeze
from cldetr.methods.pseudo import Predictions, PseudoRule, drop_overlapping, make_pseudo_labels
from cldetr.modeling.detector import Detector
from cldetr.modeling.structures import Target
from cldetr.report.diagnosis_plots import draw_classes, draw_settings, setting_text
from cldetr.scenario import Part


@dataclass(frozen=True)
class Diagnosis:
    """What was measured on one phase.

    Attributes:
        phase: whose images were labelled, by the model of the phase before.
        where: "phase" for the phase's training images, "test" for the test images.
        weights: the file of the model that labels.
        names: of the old classes, by label.
        softmax: whether the head has a background class.
        counts: of all settings.
        rule: the run's own, and how it does: (C,) given and right.
        given: see `rule`.
        right: see `rule`.
    """

    phase: int
    where: str
    weights: str
    names: dict[int, str]
    softmax: bool
    counts: Counts
    rule: PseudoRule
    given: np.ndarray
    right: np.ndarray

    @property
    def best(self) -> tuple[int, int, int]:
        """The setting that is recommended, among those that a rule can say."""
        grid = self.counts.grid
        if not self.softmax:
            return self.counts.best()
        # A softmax head takes the top K of its foreground, or all of it above a score.
        allowed = np.zeros(self.counts.f1().shape, dtype=bool)
        allowed[:, :, 0] = True
        allowed[grid.k.index(max(grid.k))] = True
        return self.counts.best(allowed)

    def setting(self, place: tuple[int, int, int]) -> dict[str, float]:
        """K, λ and score of a place in the grid."""
        grid, (j, v, s) = self.counts.grid, place
        return {"k": grid.k[j], "iou": grid.iou[v], "score": grid.score[s]}

    def advice(self) -> str:
        """The recommended setting as overrides of a YAML config."""
        setting = self.setting(self.best)
        rule = "METHOD.PSEUDO."
        words = [f"{rule}SELECT topk", f"{rule}K {setting['k']}", f"{rule}IOU {setting['iou']:g}"]
        if not self.softmax:
            words.append(f"{rule}FOREGROUND {setting['score']:g}")
        elif setting["score"] > 0:
            words = [f"{rule}SELECT threshold", f"{rule}SCORE {setting['score']:g}", words[2]]
        return " ".join(words)


def diagnose(
    recipe: Recipe,
    phase: int,
    weights: str | os.PathLike[str],
    *,
    where: str = "auto",
    limit: int = 1000,
    data: RunData | None = None,
) -> Diagnosis:
    """Labels images of a phase with the model of the one before, and counts what is right.

    Args:
        recipe: of the run, or of the run to be.
        phase: from 2 on.
        weights: of the model after phase − 1.
        where: "phase" for the phase's training images, whose annotation file must know the old
            classes too (in a benchmark it does), "test" for the test images, or "auto": the first
            where it can be.
        limit: most images, spread evenly.
        data: of the recipe, where it is already read.
    """
    data = data or RunData(recipe)
    scenario = data.scenario
    if not 2 <= phase <= len(scenario.phases):
        raise InputError(
            f"pseudo-labels are made from phase 2 to {len(scenario.phases)} of "
            f"{scenario.name}, not in phase {phase}"
        )
    old = scenario.old(phase)
    view, where = _all_labels(data, phase, where)
    detector = recipe.model.build(len(scenario.categories))
    load_into(detector, load_state(weights)["model"], str(weights))
    detector.to(recipe.runtime.device)
    teacher = freeze(detector, old)
    rule = recipe.method.pseudo or PseudoRule()
    softmax = teacher.background(torch.zeros(1, 1, len(scenario.categories) + 1)) is not None
    grid = Grid().including(rule, int(detector.num_queries), softmax)
    evidence = Evidence(len(scenario.categories), grid)
    is_old = torch.zeros(len(scenario.categories), dtype=torch.bool, device=teacher.device)
    is_old[list(old)] = True
    given, right = (np.zeros(len(scenario.categories), dtype=np.int64) for _ in range(2))
    numbers = np.unique(np.linspace(0, len(view) - 1, min(limit, len(view))).round().astype(int))
    mapper, rng = Mapper(recipe.augmentation.still(), training=True), np.random.default_rng(0)
    for number in tqdm(numbers, desc="labelling", unit="image", leave=False, disable=None):
        entry = mapper(view[int(number)], rng)
        (target,) = teacher.targets([entry])
        truth, hidden = _split(target, is_old)
        scores, boxes, background = _predict(teacher, entry)
        labels = make_pseudo_labels(scores, boxes, background, is_old[None], rule)[0]
        labels = drop_overlapping(labels, truth, rule)
        found, _ = find_right(
            box_cxcywh_to_xyxy(labels.boxes),
            labels.labels,
            box_cxcywh_to_xyxy(hidden.boxes),
            hidden.labels,
        )
        classes = labels.labels.cpu().numpy()
        given += np.bincount(classes, minlength=len(given))
        right += np.bincount(classes[found], minlength=len(given))
        evidence.add(Predictions(scores * is_old, boxes, background), truth, hidden)
    names = {label: scenario.categories[label].name for label in old}
    return Diagnosis(
        phase, where, str(weights), names, softmax, evidence.count(), rule, given, right
    )


def diagnose_run(
    run_dir: str | os.PathLike[str],
    *,
    phases: Sequence[int] | None = None,
    where: str = "auto",
    limit: int = 1000,
    device: str = "auto",
) -> list[Diagnosis]:
    """Diagnoses the phases of a run whose old model is there, and writes it into the run."""
    recipe = recipe_of_run(run_dir, device)
    data = RunData(recipe)
    chosen = phases or range(2, len(data.scenario.phases) + 1)
    done = []
    for phase in chosen:
        weights = final_weights(run_dir, phase - 1)
        if weights is None:
            if phases:
                raise InputError(f"phase {phase - 1} of {run_dir} is not finished: no model labels")
            continue
        done.append(diagnose(recipe, phase, weights, where=where, limit=limit, data=data))
    if not done:
        raise InputError(f"{run_dir} has no finished phase with another one after it")
    for diagnosis in done:
        write_diagnosis(diagnosis, Path(run_dir))
    return done


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> None:
    """Writes diagnostics.json, and the table and plots of a phase below `diagnostics`."""
    name = f"phase{diagnosis.phase}"
    place = folder / "diagnostics"
    place.mkdir(parents=True, exist_ok=True)
    with (
        atomic_path(place / f"{name}.csv") as partial,
        open(partial, "w", newline="", encoding="utf-8") as stream,
    ):
        csv.writer(stream, lineterminator="\n").writerows(_csv_rows(diagnosis))
    captions = {
        f"{name}_settings.png": "How good the pseudo-labels of phase "
        f"{diagnosis.phase} are by score, K and λ. Each curve changes one of them from the "
        "recommended setting; the dashed line is the run's own value.",
        f"{name}_classes.png": f"Pseudo-labels of phase {diagnosis.phase} by class, at the "
        "recommended setting.",
    }
    for plot, draw in zip(captions, (draw_settings, draw_classes), strict=True):
        with atomic_path(place / plot) as partial:
            draw(diagnosis).savefig(partial, format="png", dpi=110)
    known = read_json(place / "captions.json") if (place / "captions.json").exists() else {}
    write_json(place / "captions.json", known | captions)
    file = folder / "diagnostics.json"
    stored = read_json(file)["phases"] if file.exists() else {}
    stored[str(diagnosis.phase)] = summarise_diagnosis(diagnosis)
    write_json(file, {"format": 1, "phases": dict(sorted(stored.items()))})


def summarise_diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    """The numbers of a diagnosis, as JSON data."""
    counts, best = diagnosis.counts, diagnosis.best
    rule = diagnosis.rule
    return {
        "images": counts.images,
        "of": diagnosis.where,
        "weights": diagnosis.weights,
        "hidden_objects": int(counts.hidden.sum()),
        "rule": {
            "select": rule.select,
            "k": rule.k,
            "iou": rule.iou,
            "foreground": rule.foreground,
            "score": rule.score,
        }
        | _rates(diagnosis.right, diagnosis.given, counts.hidden, counts.images),
        "recommended": diagnosis.setting(best)
        | _rates(counts.right[best], counts.given[best], counts.hidden, counts.images)
        | {"overrides": diagnosis.advice()},
        "per_category": {
            name: {
                "hidden": int(counts.hidden[label]),
                "rule": _rates(
                    diagnosis.right[[label]],
                    diagnosis.given[[label]],
                    counts.hidden[[label]],
                    counts.images,
                ),
                "recommended": _rates(
                    counts.right[best][[label]],
                    counts.given[best][[label]],
                    counts.hidden[[label]],
                    counts.images,
                ),
            }
            for label, name in diagnosis.names.items()
        },
    }


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """A diagnosis as text: the run's rule, the recommended one, each setting varied, each class."""
    counts, best = diagnosis.counts, diagnosis.best
    summary = summarise_diagnosis(diagnosis)
    of = "training" if diagnosis.where == "phase" else "test"
    lines = [
        f"phase {diagnosis.phase}: {counts.images} {of} images, "
        f"{summary['hidden_objects']} objects of old classes",
        _line("", "per image", "precision", "recall", "F1"),
        _rate_line(f"the run's rule ({diagnosis.rule.select})", summary["rule"]),
        _rate_line(setting_text(diagnosis.setting(best)), summary["recommended"]),
    ]
    grid = counts.grid
    axes: list[tuple[str, Sequence[float], int]] = [
        ("K", grid.k, 0),
        ("λ", grid.iou, 1),
        ("score >", grid.score, 2),
    ]
    for title, values, axis in axes:
        lines += ["", f"{title}, the others as recommended"]
        for number, value in enumerate(values):
            place = tuple(number if axis == other else best[other] for other in range(3))
            rates = _rates(counts.right[place], counts.given[place], counts.hidden, counts.images)
            mark = "  ←" if number == best[axis] else ""
            lines.append(_rate_line(f"  {value:g}", rates) + mark)
    lines += ["", "classes, as recommended"]
    for name, entry in summary["per_category"].items():
        lines.append(_rate_line(f"  {name} ({entry['hidden']})", entry["recommended"]))
    lines += ["", f"recommended (best F1): {diagnosis.advice()}"]
    return "\n".join(lines)


def _all_labels(data: RunData, phase: int, where: str) -> tuple[View, str]:
    """Images with the objects of all classes seen up to a phase, and where they are from."""
    scenario = data.scenario
    seen, own = scenario.seen(phase), scenario.phase(phase)
    known = label_table(data.train[own.source], scenario.categories, scenario.old(phase))
    if where == "auto":
        where = "phase" if (known >= 0).any() else "test"
    if where == "test":
        return data.test_entries(seen), where
    if not (known >= 0).any():
        raise InputError(
            f"the data of phase {phase} ({data.train[own.source].json_file}) does not know the old "
            "classes, so that nothing tells which pseudo-labels are right: use the test images, "
            "--on test"
        )
    part = Part(own.source, own.image_ids, seen, 0)
    return View(scenario.categories, [part], data.train, name=f"phase {phase}"), where


@torch.no_grad()
def _predict(
    teacher: Detector, entry: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    output = teacher.predict(teacher.preprocess([entry]))
    logits = output.logits[-1].float()
    return teacher.scores(logits), output.boxes[-1].float(), teacher.background(logits)


def _split(target: Target, is_old: torch.Tensor) -> tuple[Target, Target]:
    """The labels of new and of old classes."""
    old = is_old[target.labels]
    return (
        Target(target.labels[~old], target.boxes[~old]),
        Target(target.labels[old], target.boxes[old]),
    )


def _rates(
    right: np.ndarray, given: np.ndarray, hidden: np.ndarray, images: int
) -> dict[str, float | None]:
    """Precision, recall, F1 and labels per image; None where there is nothing to divide by."""
    r, g, h = int(right.sum()), int(given.sum()), int(hidden.sum())
    return {
        "per_image": g / max(images, 1),
        "precision": r / g if g else None,
        "recall": r / h if h else None,
        "f1": 2 * r / (g + h) if g + h else None,
    }


def _csv_rows(diagnosis: Diagnosis) -> list[list[Any]]:
    counts = diagnosis.counts
    grid = counts.grid
    rows: list[list[Any]] = [
        ["class", "k", "iou", "score", "per_image", "precision", "recall", "f1"]
    ]
    groups = {"all": list(diagnosis.names)} | {
        name: [label] for label, name in diagnosis.names.items()
    }
    for name, labels in groups.items():
        for j, v, s in np.ndindex(len(grid.k), len(grid.iou), len(grid.score)):
            rates = _rates(
                counts.right[j, v, s, labels],
                counts.given[j, v, s, labels],
                counts.hidden[labels],
                counts.images,
            )
            cells = ["" if value is None else f"{value:.4f}" for value in rates.values()]
            rows.append([name, grid.k[j], grid.iou[v], grid.score[s], *cells])
    return rows


def _rate_line(text: str, rates: Mapping[str, Any]) -> str:
    cells = ["n/a" if rates[key] is None else f"{rates[key]:.3f}" for key in _RATES]
    return _line(text, f"{rates['per_image']:.2f}", *cells)


_RATES = ("precision", "recall", "f1")


def _line(text: str, *cells: str) -> str:
    return f"{text:<34}" + "".join(f"{cell:>10}" for cell in cells)
