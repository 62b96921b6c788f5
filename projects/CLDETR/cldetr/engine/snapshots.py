"""Pictures of a stage while it trains, for TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from detectron2.engine import HookBase

from cldetr.data.mapper import Augmentation, Mapper
from cldetr.engine.scenes import draw_scene, examine
from cldetr.methods.learner import Learner

logger = logging.getLogger(__name__)

_SIDE = 320  # short side of each panel: a picture takes some 100 KB


class Samples(Protocol):
    """The images of a stage."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class SnapshotHook(HookBase):
    """Draws labels, pseudo-labels and matched predictions of a few images, always the same.

    Nothing of the training is touched: no random number is drawn, no weight and no count changes,
    and a picture that cannot be drawn is no reason to stop.
    """

    def __init__(
        self,
        learner: Learner,
        samples: Samples,
        augmentation: Augmentation,
        names: Sequence[str],
        *,
        title: str,
        count: int,
        period: int,
    ) -> None:
        """Chooses the images, evenly spread.

        Args:
            learner: of the stage.
            samples: its images.
            augmentation: tells the test size, at which the images are shown.
            names: of the classes.
            title: what TensorBoard calls the pictures.
            count: how many images.
            period: steps between two pictures of the same image.
        """
        self.learner = learner
        self.samples = samples
        self.mapper = Mapper(augmentation.still(), training=True)
        self.names = names
        self.title = title
        self.period = period
        last = len(samples) - 1
        self.places = sorted({round(x) for x in np.linspace(0, last, min(count, last + 1))})

    def after_step(self) -> None:
        """Draws where a period or the stage ends."""
        done = self.trainer.step + 1
        if self.places and (done % self.period == 0 or done == self.trainer.steps):
            try:
                self._draw()
            except Exception:
                logger.warning("no pictures of this stage: drawing failed", exc_info=True)
                self.places = []

    def _draw(self) -> None:
        rng = np.random.default_rng(0)  # nothing is drawn from it: the mapper is still
        for number, place in enumerate(self.places, start=1):
            entry = self.mapper(self.samples[place], rng)
            scene = examine(self.learner, entry)
            picture = np.array(draw_scene(scene, self.names, panel=_SIDE))
            tensor = torch.from_numpy(picture.transpose(2, 0, 1))
            self.trainer.storage.put_image(f"{self.title}/image{number}", tensor)
