"""Asking the frozen teacher once: its predictions on all images of a stage, kept with the run."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detectron2.data import build_detection_test_loader
from detectron2.structures import Instances
from detectron2.utils import comm
from tqdm import tqdm

from cldetr.data.loader import MappedDataset
from cldetr.data.mapper import Augmentation, Mapper
from cldetr.data.predictions import (
    ImagePredictions,
    PredictedView,
    find_predictions,
    write_predictions,
)
from cldetr.data.views import View
from cldetr.methods.learner import Learner

logger = logging.getLogger(__name__)


def label_once(
    learner: Learner,
    view: View,
    folder: Path,
    augmentation: Augmentation,
    *,
    teacher_digest: str,
    workers: int = 0,
    check_stop: Callable[[], None] = lambda: None,
) -> PredictedView:
    """Adds the teacher's predictions to a stage's images, stored ones where there are.

    Every process asks the teacher about its share of the images, the main one writes. One image is
    asked about at a time, so that what is stored does not depend on the number of processes.

    Args:
        learner: with its teacher, which is dismissed.
        view: the images of the stage, replayed ones included.
        folder: where the predictions are kept.
        augmentation: tells the test size, at which the teacher is asked.
        teacher_digest: of the weights that the teacher has.
        workers: processes that load images.
        check_stop: called after every image where there is one process; may raise.
    """
    about = _describe(learner, view, augmentation, teacher_digest)
    store = find_predictions(folder, about)  # by all processes: they must agree
    comm.synchronize()
    if store is None:
        begin = time.perf_counter()
        parts = _ask(learner, view, augmentation, workers, check_stop)
        if comm.is_main_process():
            store = write_predictions(folder, parts, about)
            logger.info(
                "the old model has labelled %d images once, %.1f boxes each, in %.0f s: %s",
                len(view),
                sum(len(part.scores) for part in parts) / len(view),
                time.perf_counter() - begin,
                folder,
            )
        comm.synchronize()
        store = store or find_predictions(folder, about)
        assert store is not None
    else:
        logger.info("the old model's labels are taken from %s", folder)
    learner.dismiss_teacher()
    return PredictedView(view, store)


def _ask(
    learner: Learner,
    view: View,
    augmentation: Augmentation,
    workers: int,
    check_stop: Callable[[], None],
) -> list[ImagePredictions]:
    """The predictions on all images of a view, in its order; nothing but on the main process."""
    mapped = MappedDataset(view, Mapper(augmentation, training=False))
    loader = build_detection_test_loader(mapped, mapper=None, num_workers=workers)
    bar = {"desc": "asking the old model", "unit": "image", "leave": False, "disable": None}
    own = []
    for batch in tqdm(loader, **bar):
        own += [_to_arrays(kept) for kept in learner.recordable(batch)]
        if comm.get_world_size() == 1:
            check_stop()
    shares = comm.gather(own, dst=0)  # each process has a run of neighbours, in order of rank
    return [part for share in shares for part in share]


def _describe(
    learner: Learner, view: View, augmentation: Augmentation, teacher_digest: str
) -> dict[str, Any]:
    """All that decides what is stored, as JSON data."""
    assert learner.rule is not None
    rule = dataclasses.asdict(learner.rule)
    return {
        "teacher": teacher_digest,
        "data": view.digest(),
        "images": len(view),
        "classes": [view.categories[label].name for label in learner.teacher_labels],
        "rule": {key: rule[key] for key in ("select", "k", "score", "score_start", "foreground")},
        "short_side": augmentation.test_short_side,
        "max_side": augmentation.test_max_side,
        "format": augmentation.format,
    }


def _to_arrays(kept: Instances) -> ImagePredictions:
    return ImagePredictions(
        kept.scores.cpu().numpy(),
        kept.pred_boxes.tensor.cpu().numpy(),
        kept.background.cpu().numpy() if kept.has("background") else None,
    )
