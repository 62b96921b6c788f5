"""What a stage makes of one training image, to be looked at: labels, pseudo-labels, the matching.

It asks the learner's own rule, the merging of `methods.pseudo` and the criterion's matcher, so that
a picture shows what training does (Figures 3 and S1 of the paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from cldetr.drawing import (
    BLUE,
    GREEN,
    GREY,
    YELLOW,
    Box,
    Canvas,
    Color,
    Corners,
    draw_boxes,
    draw_links,
    join_panels,
    make_canvas,
)
from cldetr.layers.boxes import box_cxcywh_to_xyxy
from cldetr.methods.learner import Learner
from cldetr.methods.pseudo import PseudoRule, drop_overlapping, merge
from cldetr.modeling.structures import DetrOutput, Target

_PANEL = 480  # short side of a panel; its long side is at most 5/3 of that


@dataclass(frozen=True)
class Marks:
    """Boxes on one image with their labels."""

    corners: np.ndarray  # (N, 4) left, top, right, bottom in pixels
    labels: np.ndarray  # (N,)
    scores: np.ndarray | None = None  # (N,)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Scene:
    """One image as a stage sees it.

    Attributes:
        pixels: (H, W, 3) RGB.
        truth: the ground truth that the stage is given.
        pseudo: the pseudo-labels that joined it.
        dropped: pseudo-labels that lie on ground truth and were dropped.
        matched: the model's predictions that are matched.
        links: (N,) which label each of them is matched with, counted over `truth` and `pseudo`.
        hidden: ground truth of old classes that the stage is not given, where it is known.
    """

    pixels: np.ndarray
    truth: Marks
    pseudo: Marks
    dropped: Marks
    matched: Marks
    links: np.ndarray
    hidden: Marks | None = None


@torch.no_grad()
def examine(learner: Learner, entry: dict[str, Any], hidden: Target | None = None) -> Scene:
    """Labels and matches one image as the learner would in a step, without touching its state.

    Args:
        learner: of the stage.
        entry: a mapped image with its targets, as `Augmentation.deterministic` gives.
        hidden: old objects that the entry's targets lack, shown beside them.
    """
    detector = learner.detector
    was_training = detector.training
    detector.eval()
    try:
        images = detector.preprocess([entry])
        (truth,) = detector.targets([entry])
        output = detector.predict(images)
        output = DetrOutput(output.logits[-1:].float(), output.boxes[-1:].float())
        none = Target(truth.labels[:0], truth.boxes[:0])
        clear, dropped = none, none
        if learner.rule is not None:
            teacher_output = None if learner.teacher is None else learner.teacher.predict(images)
            (pseudo,) = learner.pseudo_labels(teacher_output, [entry])
            clear = drop_overlapping(pseudo, truth, learner.rule)
            dropped = _difference(pseudo, truth, learner.rule)
        merged, _ = merge(truth, clear, limit=output.logits.shape[2])
        mask = learner.seen if learner.mask_unseen else None
        matches = detector.match(output, [merged], mask)
        links, order = matches.labels[0].sort()
        queries = matches.queries[0, order]
        scores, labels = detector.scores(output.logits[0, 0, queries]).max(dim=-1)
        answer = Target(labels, output.boxes[0, 0, queries])
    finally:
        detector.train(was_training)
    pixels = _pixels(entry["image"], detector.input_format)
    size = pixels.shape[:2]
    return Scene(
        pixels,
        truth=_marks(truth, size),
        pseudo=_marks(clear, size),
        dropped=_marks(dropped, size),
        matched=_marks(answer, size, scores),
        links=links.cpu().numpy(),
        hidden=None if hidden is None else _marks(hidden, size),
    )


def draw_scene(scene: Scene, names: Sequence[str], panel: int = _PANEL) -> Image.Image:
    """Draws a scene: hidden objects and pseudo-labels, the merged labels, the matched predictions.

    Lines lead from each label to the prediction that it is matched with.

    Args:
        scene: what to draw.
        names: of the classes, by label.
        panel: short side of each of the pictures side by side.
    """
    panels: list[tuple[str, list[Box]]] = []
    truth = to_boxes(scene.truth, names, GREEN)
    pseudo = to_boxes(scene.pseudo, names, BLUE)
    matched = to_boxes(scene.matched, names, YELLOW)
    dropped = to_boxes(scene.dropped, names, GREY)
    legend: dict[str, Color] = {"ground truth": GREEN}
    if scene.hidden is not None:
        hidden = to_boxes(scene.hidden, names, GREEN)
        title = f"old classes: {len(hidden)} hidden objects, {len(pseudo)} pseudo-labels"
        panels.append((title, [*pseudo, *dropped, *hidden]))
    if pseudo or dropped or scene.hidden is not None:
        legend["pseudo-label"] = BLUE
    if dropped and scene.hidden is not None:
        legend["dropped: lies on ground truth"] = GREY
    panels.append(("merged labels" if pseudo else "labels", [*truth, *pseudo]))
    panels.append(("predictions matched one to one", matched))
    legend["matched prediction"] = YELLOW
    canvases = [make_canvas(scene.pixels, panel, fit=True) for _ in panels]
    for canvas, (_, boxes) in zip(canvases, panels, strict=True):
        draw_boxes(canvas, boxes)
    sheet, corners = join_panels(
        [canvas.image for canvas in canvases],
        [title for title, _ in panels],
        list(legend.items()),
    )
    labels = panels[-2][1]
    links = [
        (
            _moved(canvases[-2], labels[link], corners[-2]),
            _moved(canvases[-1], box, corners[-1]),
            labels[link].color,
        )
        for box, link in zip(matched, scene.links.tolist(), strict=True)
    ]
    return draw_links(sheet, links)


def to_boxes(marks: Marks, names: Sequence[str], color: Color) -> list[Box]:
    """Boxes to draw, with names and, where there are any, scores."""
    texts = [names[label] for label in marks.labels.tolist()]
    if marks.scores is not None:
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, marks.scores, strict=True)]
    return [
        Box(tuple(corners), color, text)
        for corners, text in zip(marks.corners.tolist(), texts, strict=True)
    ]


def _difference(pseudo: Target, truth: Target, rule: PseudoRule) -> Target:
    """The pseudo-labels that do not survive `drop_overlapping`."""
    gone = [
        number
        for number in range(len(pseudo))
        if not len(drop_overlapping(_take(pseudo, [number]), truth, rule))
    ]
    return _take(pseudo, gone)


def _take(target: Target, numbers: list[int]) -> Target:
    probs = None if target.probs is None else target.probs[numbers]
    return Target(target.labels[numbers], target.boxes[numbers], probs)


def _marks(target: Target, size: tuple[int, int], scores: torch.Tensor | None = None) -> Marks:
    height, width = size
    corners = box_cxcywh_to_xyxy(target.boxes.cpu()) * torch.tensor([width, height, width, height])
    if scores is None and target.probs is not None:  # a soft pseudo-label says how sure it is
        scores = target.probs[torch.arange(len(target)), target.labels]
    return Marks(
        corners.numpy().astype(np.float64),
        target.labels.cpu().numpy(),
        None if scores is None else scores.cpu().numpy(),
    )


def _pixels(image: torch.Tensor, input_format: str) -> np.ndarray:
    pixels = image.cpu().numpy().transpose(1, 2, 0)
    return pixels[:, :, ::-1] if input_format == "BGR" else pixels


def _moved(canvas: Canvas, box: Box, corner: tuple[int, int]) -> Corners:
    x0, y0, x1, y1 = canvas.place(box.corners)
    return x0 + corner[0], y0 + corner[1], x1 + corner[0], y1 + corner[1]
