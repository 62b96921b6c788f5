"""Object features for herding: the decoder state of the query that is matched to each object."""

from __future__ import annotations

import numpy as np
import torch
from tqdm import tqdm

from cldetr.data.herding import ObjectFeatures
from cldetr.data.loader import Entries
from cldetr.data.mapper import Augmentation, Mapper
from cldetr.modeling.detector import Detector
from cldetr.modeling.structures import DetrOutput


@torch.no_grad()
def object_features(
    detector: Detector, view: Entries, classes: tuple[int, ...], augmentation: Augmentation
) -> ObjectFeatures:
    """Computes one feature for every object of a view, at test size.

    Args:
        detector: as it is after the phase's training step.
        view: the phase's images with its labels.
        classes: labels of the phase; a feature's class is its index in this list.
        augmentation: tells the test size.
    """
    mapper, rng = Mapper(augmentation.deterministic(), training=True), np.random.default_rng(0)
    index_of = {label: index for index, label in enumerate(classes)}
    features, labels, images = [], [], []
    was_training = detector.training
    detector.eval()
    bar = {"desc": "features of objects", "unit": "image", "leave": False, "disable": None}
    for index in tqdm(range(len(view)), **bar):
        entry = mapper(view[index], rng)
        (target,) = detector.targets([entry])
        if len(target) == 0:
            continue
        output = detector.predict(detector.preprocess([entry]))
        last = DetrOutput(output.logits[-1:], output.boxes[-1:])
        matches = detector.match(last, [target])
        assert output.features is not None
        queries, rows = matches.pairs(layer=0)
        features.append(output.features[0, queries].float().cpu().numpy())
        matched = target.labels[rows].tolist()
        labels += [index_of[label] for label in matched]
        images += [index] * len(matched)
    detector.train(was_training)
    width = features[0].shape[1] if features else 0
    return ObjectFeatures(
        np.concatenate(features) if features else np.empty((0, width)),
        np.array(labels, dtype=np.int64),
        np.array(images, dtype=np.int64),
    )
