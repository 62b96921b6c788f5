"""Writers of a stage's numbers: the console and, beside Detectron2's, Weights & Biases."""

from __future__ import annotations

import datetime
import importlib.util
import logging
import resource
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.utils.events import EventStorage, EventWriter, get_event_storage

from cldetr.config import identity
from cldetr.engine.ledger import read_json
from cldetr.errors import InputError
from cldetr.files import write_json

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


class WandbWriter(EventWriter):
    """Sends what TensorBoard gets to Weights & Biases, over all stages of a run as one W&B run.

    The x-axis is `iteration`, the steps of the whole run. A resumed run goes on in the W&B run
    whose id is in RUN/wandb.json. Training does not depend on W&B: a failure is logged once, and
    nothing more is sent.
    """

    def __init__(self, cfg: CfgNode, window: int = 20) -> None:
        """Starts or resumes the W&B run.

        Args:
            cfg: of the run; has the project (WANDB.PROJECT) and the name (WANDB.NAME).
            window: numbers are medians over so many steps, as TensorBoard's.
        """
        self._window = window
        self._last = -1
        self._run: Any = None
        root = Path(cfg.OUTPUT_DIR)
        options = {
            "project": cfg.WANDB.PROJECT,
            "name": cfg.WANDB.NAME or str(root),
            "resume": "allow",
            "dir": str(root),
            "config": identity(cfg),
        }
        with self._guard():
            import wandb

            self._picture: Callable[..., Any] = wandb.Image
            self._run = wandb.init(id=_wandb_id(root / "wandb.json"), **options)
            self._run.define_metric("iteration", hidden=True)
            self._run.define_metric("*", step_metric="iteration")

    def write(self) -> None:
        """Sends the numbers and pictures that are new since the last time."""
        storage = get_event_storage()
        rows: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        for name, (value, step) in storage.latest_with_smoothing_hint(self._window).items():
            if step > self._last:
                rows[step][name] = value
        self._last = max([self._last, *rows])
        with self._guard():
            # Not cleared: TensorBoard's writer does that, and it comes later.
            for name, picture, step in storage._vis_data if self._run else ():
                rows[step][name] = self._picture(picture.permute(1, 2, 0).numpy())
        for step in sorted(rows):
            self.send(rows[step], step)

    def send(self, values: Mapping[str, Any], step: int) -> None:
        """Sends values at a step of the run."""
        with self._guard():
            if self._run is not None and values:
                self._run.log({**values, "iteration": step})

    def finish(self, failed: bool) -> None:
        """Ends the W&B run; one that failed or was stopped is marked so."""
        with self._guard():
            if self._run is not None:
                self._run.finish(exit_code=int(failed))
        self._run = None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Logs an error and sends nothing from then on."""
        try:
            yield
        except Exception as error:
            self._run = None
            logger.warning(
                "Weights & Biases does not work, the run goes on without it (%s: %s)",
                type(error).__name__,
                error,
            )


def check_wandb(enabled: bool) -> None:
    """Refuses WANDB.ENABLED where wandb is not installed, before anything is read or written."""
    spec = importlib.util.find_spec("wandb") if enabled else None
    # The folder that wandb writes to, which has its name, has no origin.
    if enabled and (spec is None or spec.origin is None):
        raise InputError(
            "WANDB.ENABLED needs wandb, which is not installed: pip install 'cldetr[wandb]'"
        )


def _wandb_id(path: Path) -> str:
    """The id of the run at W&B, chosen once and kept in the run directory."""
    if not path.exists():
        write_json(path, {"id": secrets.token_hex(4)})
    return str(read_json(path)["id"])


def memory_mb() -> float:
    """Peak memory so far: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=int(seconds)))
