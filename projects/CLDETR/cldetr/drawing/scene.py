"""What a stage makes of one training image, to be looked at: labels, pseudo-labels, the matching.

It asks the learner's own rule, the merging of `methods.pseudo` and the detector's matching, so that
a picture shows what training does (Figures 3 and S1 of the paper).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from cldetr.drawing.boxes import (
    BLUE,
    GREEN,
    GREY,
    YELLOW,
    Box,
    Color,
    draw_links,
    draw_panels,
)
from cldetr.layers.boxes import box_cxcywh_to_xyxy
from cldetr.methods.learner import Learner
from cldetr.methods.pseudo import drop_overlapping, merge
from cldetr.modeling.structures import Target


@dataclass(frozen=True)
class Scene:
    """One image as a stage sees it.

    Attributes:
        pixels: (H, W, 3) RGB.
        truth: the ground truth that the stage is given.
        pseudo: the pseudo-labels that joined it.
        dropped: pseudo-labels that lie on ground truth and were dropped.
        matched: the model's predictions that are matched.
        links: which label each of them is matched with, an index of `truth` and then `pseudo`.
        hidden: ground truth of old classes that the stage is not given, where it is known.
    """

    pixels: np.ndarray
    truth: list[Box]
    pseudo: list[Box]
    dropped: list[Box]
    matched: list[Box]
    links: list[int]
    hidden: list[Box] | None = None


@torch.no_grad()
def examine_image(
    learner: Learner, entry: dict[str, Any], names: Sequence[str], hidden: Target | None = None
) -> Scene:
    """Labels and matches one image as the learner would in a step, without touching its state.

    The entry is mapped by `Augmentation.deterministic`; `hidden` are old objects that it lacks.
    """
    detector = learner.detector
    was_training = detector.training
    detector.eval()
    try:
        images = detector.preprocess([entry])
        (truth,) = detector.targets([entry])
        output = detector.predict(images)
        output = output.from_layer(-1)
        clear = dropped = Target(truth.labels[:0], truth.boxes[:0])
        if learner.rule is not None:
            teacher_output = None if learner.teacher is None else learner.teacher.predict(images)
            (pseudo,) = learner.pseudo_labels(teacher_output, [entry])
            clear = drop_overlapping(pseudo, truth, learner.rule)
            kept = (pseudo.boxes[:, None] == clear.boxes).all(dim=2).any(dim=1)
            dropped = pseudo[~kept]
        merged, _ = merge(truth, clear, limit=output.logits.shape[2])
        mask = learner.class_mask([entry])
        matches = detector.match(output, learner.prepare_matching([merged]), mask)
        queries, links = matches.pairs(layer=0)
        links, order = links.sort()
        queries = queries[order]
        scores, labels = detector.scores(output.logits[0, 0, queries]).max(dim=-1)
        matched = Target(labels, output.boxes[0, 0, queries])
    finally:
        detector.train(was_training)
    pixels = entry["image"].cpu().numpy().transpose(1, 2, 0)
    boxes_of = functools.partial(_boxes, names, pixels.shape[:2])
    return Scene(
        pixels[:, :, ::-1] if detector.input_format == "BGR" else pixels,
        truth=boxes_of(GREEN, truth),
        pseudo=boxes_of(BLUE, clear),
        dropped=boxes_of(GREY, dropped),
        matched=boxes_of(YELLOW, matched, scores),
        links=links.tolist(),
        hidden=None if hidden is None else boxes_of(GREEN, hidden),
    )


def draw_scene(scene: Scene, short_side: int = 480) -> Image.Image:
    """Draws a scene: hidden objects and pseudo-labels, the merged labels, the matched predictions.

    Lines lead from each label to the prediction that it is matched with. `short_side` is that of
    each picture; its long side is at most 5/3 of it.
    """
    panels: list[tuple[str, list[Box]]] = []
    pseudo, dropped = scene.pseudo, scene.dropped
    legend: dict[str, Color] = {"ground truth": GREEN}
    if scene.hidden is not None:
        title = f"old classes: {len(scene.hidden)} hidden objects, {len(pseudo)} pseudo-labels"
        panels.append((title, [*pseudo, *dropped, *scene.hidden]))
    if pseudo or dropped or scene.hidden is not None:
        legend["pseudo-label"] = BLUE
    if dropped and scene.hidden is not None:
        legend["dropped: lies on ground truth"] = GREY
    labels = [*scene.truth, *pseudo]
    panels.append(("merged labels" if pseudo else "labels", labels))
    panels.append(("predictions matched one to one", scene.matched))
    legend["matched prediction"] = YELLOW
    sheet, centres = draw_panels(scene.pixels, panels, legend, short_side)
    starts, ends = (points.tolist() for points in centres[-2:])
    links = [
        (starts[link], end, labels[link].color) for link, end in zip(scene.links, ends, strict=True)
    ]
    return draw_links(sheet, links)


def _boxes(
    names: Sequence[str],
    size: tuple[int, int],
    color: Color,
    target: Target,
    scores: torch.Tensor | None = None,
) -> list[Box]:
    """Boxes to draw, with names and, where there are any, scores."""
    height, width = size
    corners = box_cxcywh_to_xyxy(target.boxes.cpu()) * torch.tensor([width, height, width, height])
    texts = [names[label] for label in target.labels.tolist()]
    if scores is None and target.probs is not None:  # a soft pseudo-label says how sure it is
        scores = target.probs[torch.arange(len(target)), target.labels]
    if scores is not None:
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, scores.tolist(), strict=True)]
    return [Box(tuple(x), color, text) for x, text in zip(corners.tolist(), texts, strict=True)]
