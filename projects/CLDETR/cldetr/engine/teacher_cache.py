"""The frozen teacher's predictions on the images of a stage, computed once, kept with the run."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import (
    MetadataCatalog,
    get_detection_dataset_dicts,
)
from detectron2.structures import Instances
from detectron2.utils import comm

from cldetr.data.datasets import dataset_digest
from cldetr.data.predictions import (
    ImagePredictions,
    PredictedView,
    PredictionStore,
    find_predictions,
    write_predictions,
)
from cldetr.engine.features import map_images
from cldetr.engine.ranks import await_file, from_rank0
from cldetr.methods.learner import Learner

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

        def examine(batch: list[dict[str, Any]]) -> ImagePredictions:
            if comm.get_world_size() == 1:
                check_stop()
            (kept,) = learner.teacher_candidates(batch)
            return _to_arrays(kept)

        parts = map_images(examine, entries, cfg, "teacher predictions")

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


def _describe(
    learner: Learner, names: Sequence[str], images: int, cfg: CfgNode, teacher_digest: str
) -> dict[str, Any]:
    """All that decides what is stored, as JSON data."""
    assert learner.rule is not None
    rule = dataclasses.asdict(learner.rule)
    classes = MetadataCatalog.get(names[0]).thing_classes
    return {
        "teacher": teacher_digest,
        "data": dataset_digest(names),
        "images": images,
        "classes": [classes[label] for label in learner.teacher_labels],
        "rule": {key: rule[key] for key in ("select", "k", "score", "score_start", "foreground")},
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
