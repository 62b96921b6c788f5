"""What one pass of the frozen teacher over a stage's images gives, kept with the run.

That is its predictions, for a rule that caches them, the score threshold of each class, for one
that needs thresholds, and what a pseudo-label counts, for one that limits them.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import (
    MetadataCatalog,
    get_detection_dataset_dicts,
)
from detectron2.structures import Instances
from detectron2.utils import comm

from cldetr.data.datasets import dataset_digest
from cldetr.data.loader import Entries
from cldetr.data.predictions import (
    ImagePredictions,
    PredictedView,
    PredictionStore,
    find_predictions,
    write_predictions,
)
from cldetr.engine.features import map_images
from cldetr.engine.ledger import read_json
from cldetr.engine.ranks import await_file, from_rank0
from cldetr.errors import InputError
from cldetr.files import write_json
from cldetr.methods.learner import Learner
from cldetr.methods.pseudo import Predictions
from cldetr.methods.thresholds import (
    MIN_SCORES,
    ClassThresholds,
    class_thresholds,
    threshold_scores,
)

logger = logging.getLogger(__name__)


def cache_teacher_predictions(
    learner: Learner,
    names: Sequence[str],
    folder: Path,
    cfg: CfgNode,
    *,
    teacher_digest: str,
    check_stop: Callable[[], None] = lambda: None,
) -> PredictedView:
    """Adds the teacher's predictions to a stage's images, stored ones where there are any.

    Every process computes its share of the images, rank 0 writes. Images go through the teacher one
    at a time, so that what is stored does not depend on the number of processes.

    Args:
        learner: with its teacher, which is dropped.
        names: the registered data sets of the stage, replayed exemplars included.
        folder: where the predictions are kept.
        cfg: has the test size, at which the teacher predicts.
        teacher_digest: of the weights that the teacher has.
        check_stop: called before every image where there is one process; may raise.
    """
    entries = get_detection_dataset_dicts(names, filter_empty=False)
    about = _describe(learner, names, len(entries), cfg, teacher_digest)
    stored = from_rank0(lambda: find_predictions(folder, about) is not None)
    if not stored:
        begin = time.perf_counter()
        parts = _predict(learner, entries, cfg, check_stop)

        def write() -> None:
            write_predictions(folder, parts, about)
            logger.info(
                "the old model has labelled %d images once, %.1f boxes each, in %.0f s: %s",
                len(entries),
                sum(len(part.scores) for part in parts) / len(entries),
                time.perf_counter() - begin,
                folder,
            )

        from_rank0(write)
    else:
        logger.info("the old model's predictions are taken from %s", folder)
    learner.dismiss_teacher()
    await_file(folder / "manifest.json")  # the last of the files that are written
    return PredictedView(entries, PredictionStore(folder))


def find_thresholds(
    learner: Learner,
    names: Sequence[str],
    path: Path,
    cfg: CfgNode,
    *,
    teacher_digest: str,
    cached: PredictionStore | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> None:
    """Sets the learner's score threshold of each class, from a stored file where there is one.

    Args:
        learner: with its teacher, unless its predictions are cached.
        names: the registered data sets of the stage, replayed exemplars included.
        path: the file of thresholds.
        cfg: has the test size, at which the teacher predicts.
        teacher_digest: of the weights that the teacher has.
        cached: the teacher's predictions, where they are stored.
        check_stop: called before every image where there is one process; may raise.
    """
    entries = get_detection_dataset_dicts(names, filter_empty=False)
    about = _describe(learner, names, len(entries), cfg, teacher_digest)
    stored = from_rank0(lambda: read_thresholds(path, about))
    if stored is None:
        parts = _predict(learner, entries, cfg, check_stop) if cached is None else cached

        def compute() -> dict[int, float]:
            assert learner.rule is not None
            found = _thresholds(learner, entries, parts)
            classes = MetadataCatalog.get(names[0]).thing_classes
            if found.fallback:
                logger.warning(
                    "fewer than %d different scores of at least %g for %s: their threshold is "
                    "METHOD.PSEUDO.SCORE, %g",
                    MIN_SCORES,
                    learner.rule.score_floor,
                    ", ".join(classes[label] for label in found.fallback),
                    learner.rule.score,
                )
            fallback = [classes[label] for label in found.fallback]
            write_json(path, {"about": about, "thresholds": found.values, "fallback": fallback})
            return found.values

        stored = from_rank0(compute)
    learner.set_thresholds(stored)


def read_thresholds(path: Path, about: Mapping[str, Any] | None = None) -> dict[int, float] | None:
    """Thresholds by label as `find_thresholds` stored them; None where there are none.

    Those of another model, of other images or for another rule than `about` says are refused.
    """
    if not path.exists():
        return None
    content = read_json(path)
    if about is not None and content["about"] != about:
        raise InputError(
            f"the thresholds in {path} are not those of this stage: delete the file to find them "
            "again"
        )
    return {int(label): value for label, value in content["thresholds"].items()}


def find_pseudo_weight(
    learner: Learner,
    names: Sequence[str],
    path: Path,
    cfg: CfgNode,
    *,
    teacher_digest: str,
    check_stop: Callable[[], None] = lambda: None,
) -> None:
    """Sets what a pseudo-label counts (METHOD.PSEUDO.BALANCE), stored where it has been found.

    Args:
        learner: with its teacher, unless the images bring its predictions.
        names: the registered data sets that the stage trains on.
        path: the file of what was counted.
        cfg: has the test size, at which the teacher predicts.
        teacher_digest: of the weights that the teacher has.
        check_stop: called before every image where there is one process; may raise.
    """
    rule = learner.rule
    assert rule is not None
    entries = get_detection_dataset_dicts(names, filter_empty=False)
    about = _describe(learner, names, len(entries), cfg, teacher_digest)
    about["rule"] = dataclasses.asdict(rule)

    def read() -> float | None:
        content = read_json(path) if path.exists() else {}
        if content.get("about", about) != about:
            raise InputError(
                f"{path} is not of this stage: delete the file to count its labels again"
            )
        return content.get("weight")

    def examine(batch: list[dict[str, Any]]) -> tuple[int, float]:
        if comm.get_world_size() == 1:
            check_stop()
        return learner.count_labels(batch)

    weight = from_rank0(read)
    if weight is None:
        learner.progress = 1.0  # `curriculum` labels most at the end
        counts = map_images(examine, entries, cfg, "counting labels", labels=True)
        learner.progress = 0.0

        def compute() -> float:
            true, pseudo = (sum(column) for column in zip(*counts, strict=True))
            weight = min(1.0, 2 * true / pseudo) ** rule.balance if true and pseudo else 1.0
            logger.info(
                "the old model labels %.0f objects beside %d true labels: each counts %.2f "
                "(METHOD.PSEUDO.BALANCE %g)",
                pseudo,
                true,
                weight,
                rule.balance,
            )
            write_json(path, {"about": about, "true": true, "pseudo": pseudo, "weight": weight})
            return weight

        weight = from_rank0(compute)
    learner.pseudo_weight = weight


def _thresholds(
    learner: Learner, entries: Entries, parts: Sequence[ImagePredictions] | PredictionStore
) -> ClassThresholds:
    """Thresholds from the teacher's predictions on all images."""
    rule, labels = learner.rule, np.array(learner.teacher_labels)
    assert rule is not None
    scores, classes = [], []
    for index in range(len(entries)):
        part = parts[index]
        allowed = np.ones(len(labels), dtype=bool)
        if rule.skip_annotated:
            allowed = ~np.isin(labels, entries[index]["classes"])
        background = None if part.background is None else torch.from_numpy(part.background)[None]
        pred = Predictions(
            torch.from_numpy(part.scores * allowed)[None],
            torch.from_numpy(part.boxes)[None],
            background,
        )
        own, columns = threshold_scores(pred, rule)
        scores.append(own)
        classes.append(labels[columns])
    return class_thresholds(np.concatenate(scores), np.concatenate(classes), labels.tolist(), rule)


def _predict(
    learner: Learner, entries: Entries, cfg: CfgNode, check_stop: Callable[[], None]
) -> list[ImagePredictions]:
    """The teacher's predictions on all images, in their order, on rank 0 alone."""

    def examine(batch: list[dict[str, Any]]) -> ImagePredictions:
        if comm.get_world_size() == 1:
            check_stop()
        (kept,) = learner.teacher_candidates(batch)
        return _to_arrays(kept)

    return map_images(examine, entries, cfg, "teacher predictions")


def _describe(
    learner: Learner, names: Sequence[str], images: int, cfg: CfgNode, teacher_digest: str
) -> dict[str, Any]:
    """All that decides what is stored, as JSON data."""
    assert learner.rule is not None
    rule = dataclasses.asdict(learner.rule)
    deciding = ["select", "k", "score", "score_start", "foreground"]
    deciding += ["score_floor"] if learner.rule.needs_thresholds else []
    classes = MetadataCatalog.get(names[0]).thing_classes
    return {
        "teacher": teacher_digest,
        "data": dataset_digest(names),
        "images": images,
        "classes": [classes[label] for label in learner.teacher_labels],
        "rule": {key: rule[key] for key in deciding},
        "short_side": cfg.INPUT.MIN_SIZE_TEST,
        "max_side": cfg.INPUT.MAX_SIZE_TEST,
        "format": cfg.INPUT.FORMAT,
    }


def _to_arrays(kept: Instances) -> ImagePredictions:
    return ImagePredictions(
        kept.scores.cpu().numpy(),
        kept.pred_boxes.tensor.cpu().numpy(),
        kept.background.cpu().numpy() if kept.has("background") else None,
    )
