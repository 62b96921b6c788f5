"""What the console says while a stage trains."""

from __future__ import annotations

import datetime
import logging
import resource

import torch
from detectron2.utils.events import EventStorage, EventWriter, get_event_storage

logger = logging.getLogger(__name__)


class StageWriter(EventWriter):
    """One line every few steps: where the run is, how long it will take, how it goes."""

    def __init__(self, title: str, offset: int, steps: int, run_steps: int, window: int = 20):
        """Sets up the writer of one stage.

        Args:
            title: the phase and stage, as "phase 2/2 train".
            offset: steps of the run before this stage.
            steps: steps of this stage.
            run_steps: steps of the whole run, as far as known.
            window: losses are medians over so many steps.
        """
        self.title = title
        self.offset = offset
        self.steps = steps
        self.run_steps = run_steps
        self.window = window
        self._last = -1

    def write(self) -> None:
        """Logs the line of the present step, once."""
        storage = get_event_storage()
        step = storage.iter - self.offset + 1
        if step > self.steps or step == self._last or "lr" not in storage.histories():
            return
        self._last = step
        losses = {key: self._median(storage, key) for key in storage.histories() if "loss" in key}
        final = {key: value for key, value in losses.items() if key.count("_") == 1}
        total = losses.get("total_loss", sum(losses.values()))
        parts = [
            f"{self.title}  {step}/{self.steps}",
            *self._times(storage, step),
        ]
        if losses:  # a stage that ends early may end before the first loss is logged
            parts.append(f"loss {total:.3f}")
            parts.append(
                " ".join(
                    f"{key.removeprefix('loss_')} {value:.3f}"
                    for key, value in final.items()
                    if key.startswith("loss_")
                )
            )
        if "pseudo/per_image" in storage.histories():
            parts.append(f"pseudo {self._median(storage, 'pseudo/per_image'):.1f}/image")
        parts.append(f"lr {storage.history('lr').latest():.2g}")
        parts.append(f"{memory_mb():.0f} MB")
        logger.info("  ".join(parts))

    def _times(self, storage: EventStorage, step: int) -> list[str]:
        if "time" not in storage.histories():
            return []
        history = storage.history("time")
        seconds = history.median(min(len(history.values()), 200))
        run_left = max(self.run_steps - storage.iter - 1, 0)
        return [
            f"{seconds:.3g} s/step",
            f"left {_clock(seconds * (self.steps - step))}, run {_clock(seconds * run_left)}",
        ]

    def _median(self, storage: EventStorage, key: str) -> float:
        return float(storage.history(key).median(storage.count_samples(key, self.window)))


def memory_mb() -> float:
    """Peak memory so far: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=int(seconds)))
