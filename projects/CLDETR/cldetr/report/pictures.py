"""Pictures of a run: pseudo-labels and their matching, and predictions before and after a phase.

They come as `RUN/pictures/*.png` with `captions.json` beside them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.structures import BoxMode
from PIL import Image
from tqdm import tqdm

from cldetr.data.mapper import Mapper
from cldetr.data.views import View, label_table
from cldetr.drawing import (
    GREEN,
    RED,
    YELLOW,
    Box,
    draw_boxes,
    join_panels,
    make_canvas,
)
from cldetr.engine.checkpoint import load_into, load_state
from cldetr.engine.from_run import final_weights, recipe_of_run, training_weights
from cldetr.engine.learners import training_learner
from cldetr.engine.ledger import read_json
from cldetr.engine.recipe import Recipe
from cldetr.engine.rundata import RunData
from cldetr.engine.scenes import draw_scene, examine
from cldetr.errors import InputError
from cldetr.files import atomic_path, write_json
from cldetr.methods.evidence import find_right
from cldetr.modeling.detector import Detector
from cldetr.modeling.structures import Target
from cldetr.predict import Detection, Predictor
from cldetr.scenario import Part

logger = logging.getLogger(__name__)

_SCORE = 0.3  # least score of a prediction that is shown


def draw_run_pictures(
    run_dir: str | os.PathLike[str],
    *,
    phases: Sequence[int] | None = None,
    images: Sequence[int] | None = None,
    sample: int = 8,
    device: str = "auto",
) -> list[Path]:
    """Draws pictures of a run's phases, finished or under way, into `RUN/pictures`.

    Args:
        run_dir: the run.
        phases: which; None for all that have a model.
        images: image ids: of the phase's training images for the matching, of the test images for
            before and after. None: a sample of each, always the same.
        sample: how many of each.
        device: "cpu", "cuda" or "auto": a GPU where there is one.

    Returns:
        the files written.
    """
    root = Path(run_dir)
    artist = _Artist(root, recipe_of_run(root, device))
    wanted = phases or range(1, len(artist.scenario.phases) + 1)
    known = [phase for phase in wanted if artist.has_model(phase)]
    missing = [phase for phase in wanted if phase not in known]
    if not known or (phases and missing):
        raise InputError(f"{root} has no model of phase {', '.join(map(str, missing))} yet")
    work = [job for phase in known for job in artist.jobs(phase, images, sample)]
    if not work:
        raise InputError.listing(
            f"these images are neither training images of the phases ({known}) nor test images:",
            [str(image) for image in images or ()],
        )
    captions, written = {}, []
    for name, caption, draw in tqdm(
        work, desc="drawing", unit="picture", leave=False, disable=None
    ):
        path = root / "pictures" / name
        with atomic_path(path) as partial:
            draw().save(partial, format="PNG")
        captions[name] = caption
        written.append(path)
    file = root / "pictures" / "captions.json"
    stored = read_json(file) if file.exists() else {}
    write_json(file, stored | captions)
    logger.info("%d pictures in %s", len(written), root / "pictures")
    return written


class _Artist:
    """Draws the pictures of one run, with its data and models read once."""

    def __init__(self, root: Path, recipe: Recipe) -> None:
        self.root = root
        self.recipe = recipe
        self.data = RunData(recipe)
        self.scenario = self.data.scenario
        self.names = [category.name for category in self.scenario.categories]
        self.mapper = Mapper(recipe.augmentation.still(), training=True)

    def has_model(self, phase: int) -> bool:
        """Whether a phase has weights to look at, and the one before it has ended."""
        if phase > 1 and final_weights(self.root, phase - 1) is None:
            return False
        folder = self.root / f"phase{phase}" / "train"
        return (folder / "stage.json").is_file() or any(folder.glob("checkpoints/step_*"))

    def jobs(self, phase: int, images: Sequence[int] | None, sample: int) -> list[Any]:
        """The pictures of a phase: file name, caption, and the function that draws it."""
        given, hidden = self._train_views(phase)
        tests = self.data.test_entries(self.scenario.seen(phase))
        jobs: list[Any] = []
        places = self._choose(phase, given, hidden, images, sample)
        if places:
            learner = self._learner(phase)
            for place in places:
                entry = given[place]
                jobs.append(
                    (
                        f"phase{phase}_labels_{_file_id(entry)}.png",
                        self._matching_caption(phase, entry, hidden is not None),
                        lambda entry=entry, other=hidden and hidden[place]: self._matching(
                            learner, entry, other
                        ),
                    )
                )
        places = self._choose(phase, tests, None, images, sample)
        if places:
            models = self._before_and_after(phase)
            for place in places:
                entry = tests[place]
                jobs.append(
                    (
                        f"phase{phase}_predictions_{_file_id(entry)}.png",
                        f"Phase {phase}, test image {entry['image_id']}: ground truth of the "
                        "classes seen so far, and what the models find "
                        + ("before and after the phase" if phase > 1 else "after the phase")
                        + f" (score above {_SCORE}; right at IoU 0.5).",
                        lambda entry=entry: self._predictions(models, entry),
                    )
                )
        return jobs

    def _train_views(self, phase: int) -> tuple[View, View | None]:
        """A phase's images with the labels that it is given, and with those that it is not."""
        method, own = self.recipe.method, self.scenario.phase(phase)
        old = self.scenario.old(phase)
        shows_all = method.joint or method.reveal_old
        classes = self.scenario.seen(phase) if shows_all else own.classes
        part = Part(own.source, own.image_ids, classes, phase)
        given = View(self.scenario.categories, [part], self.data.train)
        known = label_table(self.data.train[own.source], self.scenario.categories, old)
        if shows_all or not (known >= 0).any():
            return given, None
        part = Part(own.source, own.image_ids, old, phase)
        return given, View(self.scenario.categories, [part], self.data.train)

    def _choose(
        self,
        phase: int,
        view: View,
        other: View | None,
        images: Sequence[int] | None,
        sample: int,
    ) -> list[int]:
        """Places in a view: those asked for, or a sample that shows old and new classes at once."""
        if images is not None:
            ids = view.image_ids.tolist()
            return [place for place, image in enumerate(ids) if image in set(images)]
        order = np.random.default_rng([self.recipe.seed, phase]).permutation(len(view))
        new = set(self.scenario.phase(phase).classes)
        telling: list[int] = []
        rest: list[int] = []
        for place in order[: 50 * sample].tolist():
            labels = {obj["category_id"] for obj in view[place]["annotations"]}
            if other is not None:
                labels |= {obj["category_id"] for obj in other[place]["annotations"]}
            old = labels - new
            tells = bool(labels & new) and (bool(old) or phase == 1)
            (telling if tells else rest).append(place)
            if len(telling) == sample:
                break
        return sorted((telling + rest)[:sample])

    def _learner(self, phase: int) -> Any:
        """The learner of the phase's training step as far as it has come."""
        state = training_weights(self.root, phase)
        assert state is not None
        detector = self._detector(state, f"phase {phase}")
        old = detector
        if phase > 1:
            path = final_weights(self.root, phase - 1)
            assert path is not None
            old = self._detector(load_state(path), str(path))
        learner = training_learner(detector, self.recipe.method, self.scenario, phase, old)
        learner.progress = 1.0
        return learner.to(self.recipe.runtime.device)

    def _before_and_after(self, phase: int) -> list[tuple[str, Predictor]]:
        """The newest models of the phase before and of the phase, with what to call them."""
        models = []
        for number in (phase - 1, phase):
            if number == 0:
                continue
            path = final_weights(self.root, number)
            state = load_state(path) if path is not None else training_weights(self.root, number)
            assert state is not None
            predictor = Predictor(
                self._detector(state, f"phase {number}"),
                self.scenario.categories,
                self.recipe.augmentation,
                [self.names[label] for label in self.scenario.seen(number)],
            )
            when = "so far" if path is None else "before" if number < phase else "after"
            models.append((f"{when} phase {phase}", predictor))
        return models

    def _detector(self, state: Mapping[str, Any], origin: str) -> Detector:
        detector = self.recipe.model.build(len(self.names))
        load_into(detector, state["model"], origin)
        return detector.to(self.recipe.runtime.device).eval()

    def _matching(
        self, learner: Any, entry: dict[str, Any], other: dict[str, Any] | None
    ) -> Image.Image:
        rng = np.random.default_rng(0)  # nothing is drawn from it: the mapper is still
        hidden: Target | None = None
        if other is not None and self.scenario.old(entry["phase"]):
            (hidden,) = learner.detector.targets([self.mapper(other, rng)])
        return draw_scene(examine(learner, self.mapper(entry, rng), hidden), self.names)

    def _matching_caption(self, phase: int, entry: Mapping[str, Any], hides: bool) -> str:
        head = f"Phase {phase}, training image {entry['image_id']}: "
        if phase == 1 or self.recipe.method.pseudo is None:
            return head + "labels (green) and the predictions that they are matched with (yellow)."
        parts = "ground truth of the new classes (green) merged with the old model's pseudo-labels "
        parts += "(blue), and the predictions that they are matched with (yellow), one to one."
        if hides:
            parts += " Left: the old objects that the phase hides (green) and the pseudo-labels."
        return head + parts

    def _predictions(
        self, models: Sequence[tuple[str, Predictor]], entry: Mapping[str, Any]
    ) -> Image.Image:
        """Ground truth beside the predictions of models: right ones yellow, wrong ones red."""
        pixels = models[0][1].read(entry["file_name"])
        objects = [obj for obj in entry["annotations"] if not obj["iscrowd"]]
        corners = [
            BoxMode.convert(obj["bbox"], BoxMode.XYWH_ABS, BoxMode.XYXY_ABS) for obj in objects
        ]
        labels = [obj["category_id"] for obj in objects]
        truth = [
            Box(tuple(box), GREEN, self.names[label])
            for box, label in zip(corners, labels, strict=True)
        ]
        panels = [("ground truth", truth)]
        for title, predictor in models:
            found = predictor(pixels, _SCORE)
            right, _ = find_right(
                torch.tensor([x.box for x in found]).view(-1, 4),
                torch.tensor([x.label for x in found]),
                torch.tensor(corners).view(-1, 4),
                torch.tensor(labels),
            )
            title += f": {int(right.sum())} of {len(truth)} found, {int((~right).sum())} wrong"
            panels.append((title, _judged(found, right)))
        canvases = [make_canvas(pixels, fit=True) for _ in panels]
        for canvas, (_, boxes) in zip(canvases, panels, strict=True):
            draw_boxes(canvas, boxes)
        legend = [("ground truth", GREEN), ("right prediction", YELLOW), ("wrong prediction", RED)]
        sheet, _ = join_panels(
            [canvas.image for canvas in canvases], [title for title, _ in panels], legend
        )
        return sheet


def _judged(found: Sequence[Detection], right: np.ndarray) -> list[Box]:
    return [
        Box(x.box, YELLOW if ok else RED, f"{x.name} {x.score:.2f}")
        for x, ok in zip(found, right.tolist(), strict=True)
    ]


def _file_id(entry: Mapping[str, Any]) -> str:
    return f"{entry['image_id']}"
