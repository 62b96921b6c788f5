"""What a model says about every image of a view, each process computing its share.

Object features for herding are made here: the decoder state of the query that is matched to each
object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader
from detectron2.utils import comm
from tqdm import tqdm

from cldetr.data.herding import ObjectFeatures
from cldetr.data.loader import Entries, MappedDataset
from cldetr.data.mapper import Augmentation, Mapper
from cldetr.modeling.detector import Detector

T = TypeVar("T")


def map_images(
    examine: Callable[[list[dict[str, Any]]], T],
    entries: Entries,
    cfg: CfgNode,
    title: str,
    *,
    labels: bool = False,
) -> list[T]:
    """Calls `examine` for each image; returns the results in order, on rank 0 alone.

    Images come one at a time, so that a result does not depend on the number of processes.

    Args:
        examine: gets a batch of one input at test size.
        entries: the images.
        cfg: reads INPUT and DATALOADER.NUM_WORKERS.
        title: of the progress bar.
        labels: inputs have `instances`.
    """
    augmentation = Augmentation.from_config(cfg)
    mapper: Any = Mapper(augmentation, training=False)
    if labels:
        mapper = _LabelledMapper(Mapper(augmentation.deterministic(), training=True))
    loader = build_detection_test_loader(
        MappedDataset(entries, mapper), mapper=None, num_workers=cfg.DATALOADER.NUM_WORKERS
    )
    bar = {"desc": title, "unit": "image", "leave": False}
    bar["disable"] = None if comm.is_main_process() else True
    own = [examine(batch) for batch in tqdm(loader, **bar)]
    shares = comm.gather(own, dst=0)  # each process has a run of neighbours, in order of rank
    return [result for share in shares for result in share]


def object_features(
    detector: Detector, view: Entries, classes: tuple[int, ...], cfg: CfgNode
) -> ObjectFeatures:
    """Computes one feature for every object of a view, at test size; on rank 0 alone.

    Args:
        detector: as it is after the phase's training step.
        view: the phase's images with its labels.
        classes: labels of the phase; a feature's class is its index in this list.
        cfg: has the test size.
    """
    index_of = {label: index for index, label in enumerate(classes)}

    @torch.no_grad()
    def examine(batch: list[dict[str, Any]]) -> tuple[np.ndarray, list[int]]:
        (target,) = detector.targets(batch)
        if len(target) == 0:
            return np.empty((0, 0), np.float32), []
        output = detector.predict(detector.preprocess(batch))
        matches = detector.match(output.from_layer(-1), [target])
        assert output.features is not None
        queries, rows = matches.pairs(layer=0)
        features = output.features[0, queries].float().cpu().numpy()
        return features, [index_of[label] for label in target.labels[rows].tolist()]

    was_training = detector.training
    detector.eval()
    parts = map_images(examine, view, cfg, "features of objects", labels=True)
    detector.train(was_training)
    found = [features for features, labels in parts if labels]
    return ObjectFeatures(
        np.concatenate(found) if found else np.empty((0, 0)),
        np.array([label for _, labels in parts for label in labels], dtype=np.int64),
        np.repeat(np.arange(len(parts)), [len(labels) for _, labels in parts]),
    )


class _LabelledMapper:
    """Maps an image and its labels to test size: the training mapper where it draws nothing."""

    def __init__(self, mapper: Mapper) -> None:
        self.mapper = mapper

    def __call__(self, entry: dict[str, Any]) -> dict[str, Any]:
        return self.mapper(entry, np.random.default_rng(0))
