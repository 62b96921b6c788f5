"""Pictures of a run: pseudo-labels and their matching, and predictions before and after a phase.

They come as `RUN/pictures/*.png` with `captions.json` beside them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.structures import BoxMode
from PIL import Image
from tqdm import tqdm

from cldetr.analysis.diagnose import knows_old_classes
from cldetr.analysis.predict import Predictor
from cldetr.analysis.pseudo_label_stats import match_true_positives
from cldetr.config import method_of
from cldetr.data.mapper import Augmentation, Mapper
from cldetr.data.views import View
from cldetr.drawing.boxes import GREEN, RED, YELLOW, Box, draw_panels, save_png
from cldetr.drawing.scene import draw_scene, examine_image
from cldetr.engine.checkpoint import load_state
from cldetr.engine.ledger import read_json
from cldetr.engine.restore import build_detector, config_of_run, final_weights, training_weights
from cldetr.engine.rundata import RunData
from cldetr.engine.stages import training_learner
from cldetr.engine.teacher_cache import read_thresholds
from cldetr.errors import InputError
from cldetr.files import write_json
from cldetr.methods.learner import Learner
from cldetr.modeling.detector import Detector
from cldetr.modeling.structures import Target

logger = logging.getLogger(__name__)

_SCORE = 0.3  # least score of a prediction that is shown


def draw_run_pictures(
    run_dir: str | os.PathLike[str],
    *,
    phases: Sequence[int] | None = None,
    images: Sequence[int] | None = None,
    sample: int = 8,
    beside: str | os.PathLike[str] | None = None,
    device: str = "auto",
) -> list[Path]:
    """Draws pictures of a run's phases, finished or under way, into `RUN/pictures`.

    Args:
        run_dir: the run.
        phases: which; None for all that have a model.
        images: image ids: of the phase's training images for the matching, of the test images for
            before and after. None: a sample of each, always the same.
        sample: how many of each.
        beside: another run of the same scenario, whose predictions after the phase are shown, too.
        device: "cpu", "cuda" or "auto": a GPU where there is one.

    Returns:
        the files written.
    """
    root = Path(run_dir)
    artist = RunArtist(root, config_of_run(root, device))
    if beside is not None:
        artist.beside = _other_artist(artist, Path(beside), device)
    wanted = phases or range(1, len(artist.scenario.phases) + 1)
    missing = [phase for phase in wanted if not artist.has_model(phase)]
    known = [phase for phase in wanted if phase not in missing]
    if not known or (phases and missing):
        raise InputError(f"{root} has no model of phase {', '.join(map(str, missing))} yet")
    drawn = (picture for phase in known for picture in artist.draw(phase, images, sample))
    captions = {}
    for name, caption, image in tqdm(drawn, desc="drawing", leave=False, disable=None):
        save_png(image, root / "pictures" / name)
        captions[name] = caption
    if not captions:
        raise InputError.listing(
            f"these images are neither training images of the phases ({known}) nor test images:",
            [str(image) for image in images or ()],
        )
    add_captions(root / "pictures", captions)
    logger.info("%d pictures in %s", len(captions), root / "pictures")
    return [root / "pictures" / name for name in captions]


def _other_artist(artist: RunArtist, root: Path, device: str) -> RunArtist:
    """The artist of a run to compare with, which must have learnt the same classes."""
    other = RunArtist(root, config_of_run(root, device))
    phases = [phase.classes for phase in artist.scenario.phases]
    if other.names != artist.names or phases != [x.classes for x in other.scenario.phases]:
        raise InputError(
            f"{root} has other phases than {artist.root}: compare runs of one scenario and order"
        )
    return other


def add_captions(folder: Path, captions: dict[str, str]) -> None:
    """Adds to the captions of a folder's pictures, captions.json."""
    file = folder / "captions.json"
    write_json(file, (read_json(file) if file.exists() else {}) | captions)


class RunArtist:
    """Draws the pictures of one run, with its data read once."""

    def __init__(self, root: Path, cfg: CfgNode) -> None:
        self.root = root
        self.cfg = cfg
        self.method = method_of(cfg)
        self.shows_all = self.method.joint or self.method.reveal_old
        self.data = RunData(cfg)
        self.scenario = self.data.scenario
        self.names = [category.name for category in self.scenario.categories]
        self.augmentation = Augmentation.from_config(cfg)
        self.mapper = Mapper(self.augmentation.deterministic(), training=True)
        self.beside: RunArtist | None = None  # of another run, to compare with

    def has_model(self, phase: int) -> bool:
        """Whether a phase has weights to look at, and the one before it has ended."""
        if phase > 1 and final_weights(self.root, phase - 1) is None:
            return False
        folder = self.root / f"phase{phase}" / "train"
        return (folder / "stage.json").is_file() or any(folder.glob("checkpoints/step_*"))

    def draw(
        self, phase: int, images: Sequence[int] | None, sample: int
    ) -> Iterator[tuple[str, str, Image.Image]]:
        """The pictures of a phase, with their file names and captions."""
        labelled, tests = self.view("revealed", phase), self.view("test", phase)
        indices = self.choose(phase, labelled, images, sample)
        if indices:
            learner = self.learner(phase)
        for index in indices:
            image_id = labelled[index]["image_id"]
            yield (
                f"phase{phase}_labels_{image_id}.png",
                f"Phase {phase}, training image {image_id}: {self._matching_caption(phase)}",
                self._matching(learner, phase, index),
            )
        indices = self.choose(phase, tests, images, sample)
        if indices:
            models = self._before_and_after(phase)
        for entry in (tests[index] for index in indices):
            name, which = str(entry["image_id"]), f"test image {entry['image_id']}"
            if self.scenario.protocol == "domains":  # ids of their test sets may be the same
                source = entry["source"]
                which, name = f"{which} of {source}", re.sub(r"[^\w-]", "_", f"{source}_{name}")
            yield (
                f"phase{phase}_predictions_{name}.png",
                f"Phase {phase}, {which}: ground truth of the classes seen "
                f"so far, and what the models find {'before and ' * (phase > 1)}after the phase"
                f"{f' and with {self.beside.method.name}' if self.beside else ''} "
                f"(score above {_SCORE}; right at IoU 0.5).",
                self._predictions(models, entry),
            )

    def view(self, kind: str, phase: int) -> View:
        """One of the run's registered data sets (`cldetr.data.datasets`)."""
        return DatasetCatalog.get(self.data.name(kind, phase))

    def given(self, phase: int) -> View:
        """A phase's images with the labels that it is given."""
        return self.view("revealed" if self.shows_all else "phase", phase)

    def hides(self, phase: int) -> bool:
        """Whether a phase has old objects that it is not shown and that its file knows."""
        old, shown = self.scenario.old(phase), self.scenario.phase(phase).annotated
        if self.shows_all or set(old) <= set(shown):
            return False
        return knows_old_classes(self.data, phase)

    def choose(
        self, phase: int, view: View, images: Sequence[int] | None, sample: int
    ) -> list[int]:
        """Indices of a view: those asked for, or a sample that shows old and new classes at once.

        The view has all classes seen so far annotated.
        """
        if images is not None:
            return np.flatnonzero(np.isin(view.image_ids, images)).tolist()
        new = set(self.scenario.phase(phase).classes)

        def tells(index: int) -> bool:
            labels = {obj["category_id"] for obj in view[index]["annotations"]}
            return bool(labels & new) and (bool(labels - new) or phase == 1)

        order = np.random.default_rng([self.cfg.SEED, phase]).permutation(len(view)).tolist()
        return sorted(sorted(order[: 50 * sample], key=tells, reverse=True)[:sample])

    def learner(self, phase: int) -> Learner:
        """The learner of the phase's training step as far as it has come."""
        detector = self._detector(phase, training_weights(self.root, phase))
        old = detector if phase == 1 else self._detector(phase - 1)
        learner = training_learner(detector, self.method, self.scenario, phase, old)
        learner.progress = 1.0
        stored = read_thresholds(self.root / f"phase{phase}" / "train" / "thresholds.json")
        if stored is not None:
            learner.set_thresholds(stored)
        return learner.to(self.cfg.MODEL.DEVICE)

    def _before_and_after(self, phase: int) -> list[tuple[str, Predictor]]:
        """The newest models of the phase before and of the phase, with what to call them."""
        models = []
        for number in (phase - 1, phase) if phase > 1 else (phase,):
            seen = [self.names[label] for label in self.scenario.seen(number)]
            detector = self._detector(number)
            predictor = Predictor(detector, self.scenario.categories, self.augmentation, seen)
            ended = final_weights(self.root, number) is not None
            when = "so far" if not ended else "before" if number < phase else "after"
            models.append((f"{when} phase {phase}", predictor))
        if self.beside is not None:
            _, other = self.beside._before_and_after(phase)[-1]
            models[-1:] = [(self.beside.method.name, other), (self.method.name, models[-1][1])]
        return models

    def _detector(self, phase: int, state: Mapping[str, Any] | None = None) -> Detector:
        """The detector of a phase with a state, by default its newest."""
        path = final_weights(self.root, phase)
        if state is None:
            state = load_state(path) if path else training_weights(self.root, phase)
        assert state is not None
        return build_detector(self.cfg, state, f"phase {phase}", self.cfg.MODEL.DEVICE)

    def _matching(self, learner: Learner, phase: int, index: int) -> Image.Image:
        rng = np.random.default_rng(0)  # nothing is drawn from it: the mapper is deterministic
        hidden: Target | None = None
        if self.hides(phase):
            everything = self.mapper(self.view("revealed", phase)[index], rng)
            (target,) = learner.detector.targets([everything])
            old = torch.isin(target.labels.cpu(), torch.tensor(self.scenario.old(phase)))
            hidden = target[old]
        entry = self.mapper(self.given(phase)[index], rng)
        return draw_scene(examine_image(learner, entry, self.names, hidden))

    def _matching_caption(self, phase: int) -> str:
        if phase == 1 or self.method.pseudo is None or not self.scenario.hides_seen(phase):
            return "labels (green) and the predictions that they are matched with (yellow)."
        text = "ground truth of the new classes (green) merged with the old model's pseudo-labels "
        text += "(blue), and the predictions that they are matched with (yellow), one to one."
        if self.hides(phase):
            text += " Left: the old objects that the phase hides (green) and the pseudo-labels."
        return text

    def _predictions(
        self, models: Sequence[tuple[str, Predictor]], entry: Mapping[str, Any]
    ) -> Image.Image:
        """Ground truth beside the predictions of models: right ones yellow, wrong ones red."""
        pixels = models[0][1].read(entry["file_name"])
        objects = [obj for obj in entry["annotations"] if not obj["iscrowd"]]
        labels = torch.tensor([obj["category_id"] for obj in objects])
        corners = torch.tensor([obj["bbox"] for obj in objects]).view(-1, 4)
        corners = BoxMode.convert(corners, BoxMode.XYWH_ABS, BoxMode.XYXY_ABS)
        truth = [
            Box(tuple(box), GREEN, self.names[label])
            for box, label in zip(corners.tolist(), labels.tolist(), strict=True)
        ]
        panels = [("ground truth", truth)]
        for title, predictor in models:
            found = predictor(pixels, _SCORE)
            boxes = torch.tensor([x.box for x in found]).view(-1, 4)
            found_labels = torch.tensor([x.label for x in found])
            right = match_true_positives(boxes, found_labels, corners, labels)
            title += f": {int(right.sum())} of {len(truth)} found, {int((~right).sum())} wrong"
            shown = [
                Box(x.box, YELLOW if ok else RED, f"{x.name} {x.score:.2f}")
                for x, ok in zip(found, right.tolist(), strict=True)
            ]
            panels.append((title, shown))
        legend = {"ground truth": GREEN, "right prediction": YELLOW, "wrong prediction": RED}
        return draw_panels(pixels, panels, legend)[0]
