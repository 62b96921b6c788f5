"""Hooks of a training stage: exact checkpoints, early stop, and pictures for TensorBoard.

Hooks see where they are through their trainer: `trainer.phase`, `trainer.stage`, `trainer.step` and
`trainer.steps` within the stage, `trainer.iter` within the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog, get_detection_dataset_dicts
from detectron2.engine import HookBase
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from cldetr.data.loader import Entries
from cldetr.data.mapper import Augmentation, Mapper
from cldetr.drawing.scene import draw_scene, examine_image
from cldetr.engine.checkpoint import finite, save_checkpoint
from cldetr.engine.ranks import Interrupted, StopRequest, from_rank0
from cldetr.errors import InputError

logger = logging.getLogger(__name__)

_RECENT = 5  # logged losses whose median counts
_DIVERGED = 8.0  # times the lowest median of the stage
_SIDE = 320  # short side of each panel: a picture takes some 100 KB


class CheckpointHook(HookBase):
    """Saves the state of the stage every `period` steps; exits on all ranks after a signal.

    It is registered behind all other hooks, so that what it saves is the state after the step. An
    early stop is carried out here for the same reason.
    """

    def __init__(
        self,
        folder: Path,
        period: int,
        stop: StopRequest,
        meta: dict[str, Any],
        early_stop: EarlyStopHook | None = None,
    ) -> None:
        """Sets up the hook.

        Args:
            folder: where the checkpoints of the stage go.
            period: steps between two of them; 0 for none but that of a stop.
            stop: knows of signals.
            meta: what a checkpoint says about itself.
            early_stop: says where the stage ends before its last step.
        """
        self.folder = folder
        self.early_stop = early_stop
        self.period = period
        self.stop = stop
        self.meta = meta

    def after_step(self) -> None:
        """Saves, and exits where that was asked for."""
        trainer = self.trainer
        done = trainer.step + 1
        signum = self.stop.after_step()
        if self.early_stop is not None and self.early_stop.leave_for is not None:
            self._leave(self.early_stop, self.early_stop.leave_for)
        due = self.period > 0 and done % self.period == 0
        if done < trainer.steps and (signum or due):
            from_rank0(
                lambda: save_checkpoint(self.folder, done, training_state(trainer, self.meta))
            )
        if signum and done < trainer.steps:
            logger.warning("stopped by signal %d after step %d; --resume goes on", signum, done)
            raise Interrupted(signum)

    def _leave(self, early_stop: EarlyStopHook, step: int) -> None:
        """Leaves the loop: for good, or for a later step, whose checkpoint is saved."""
        trainer = self.trainer
        done = trainer.step + 1
        if step < trainer.steps:
            logger.info(
                "AP on held-out images improves no more after step %d: going on at step %d, where "
                "the learning rate drops",
                done,
                step,
            )
            early_stop.waited = 0
            for _ in range(step - done):
                trainer.scheduler.step()
            state = training_state(trainer, self.meta)
            from_rank0(lambda: save_checkpoint(self.folder, step, state))
        else:
            logger.info("AP on held-out images improves no more: the stage ends, step %d", done)
        raise LeaveStage(step)


class LeaveStage(BaseException):
    """Ends the loop over a stage's steps; Detectron2's loop takes it for no failure.

    Attributes:
        step: where the stage goes on; its last step where it is to end.
    """

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class EarlyStopHook(HookBase):
    """Evaluates on held-out images, keeps the best weights, and says where a stage should end.

    Where the AP improves no more, the stage goes on at its next learning rate drop, and ends after
    the last. What Detectron2's `BestCheckpointer` forgets at a restart, the best score and when it
    was, is in the checkpoint here, with the weights: a resumed stage ends as if never interrupted.
    """

    def __init__(self, evaluate: Callable[[], float], period: int, patience: int) -> None:
        """Sets up the hook.

        Args:
            evaluate: returns the AP on the held-out images, the same on all ranks.
            period: steps between two evaluations.
            patience: evaluations without a better AP that are too many.
        """
        self.evaluate = evaluate
        self.period = period
        self.patience = patience
        self.leave_for: int | None = None  # the step to go on at, where it is not the next
        self.taken = 0  # steps, without those that were passed over
        self.waited = 0  # evaluations since the best one
        self.evaluations: list[tuple[int, float]] = []  # steps done, AP
        self.best: tuple[int, float] = (0, -1.0)
        self.weights: dict[str, Tensor] = {}

    def after_step(self) -> None:
        """Evaluates where a period or the stage ends, and decides."""
        trainer = self.trainer
        done, steps = trainer.step + 1, trainer.steps
        self.taken += 1
        if done % self.period and done != steps:
            return
        score = self.evaluate()
        trainer.storage.put_scalar("held_out/AP", score, smoothing_hint=False)
        self.evaluations.append((done, score))
        drops = [drop for drop in trainer.cfg.SOLVER.STEPS if drop < steps]
        if any(done - self.period < drop <= done for drop in drops):
            self.waited = 0  # a drop deserves a try of its own
        if score > self.best[1]:
            self.best, self.waited = (done, score), 0
            state = trainer.detector.state_dict()
            self.weights = {name: x.detach().to("cpu", copy=True) for name, x in state.items()}
        elif self.best[1] > 0:  # a detector that finds nothing yet has not begun to learn
            self.waited += 1
        logger.info(
            "phase %d %s, step %d: AP %.2f on held-out images; best %.2f after step %d, %d of %d "
            "evaluations without a better one",
            *(trainer.phase, trainer.stage, done, score),
            *(self.best[1], self.best[0], self.waited, self.patience),
        )
        if self.waited >= self.patience and done < steps:
            self.leave_for = min((drop for drop in drops if drop > done), default=steps)

    def facts(self, planned: int) -> dict[str, Any]:
        """What the record of a stage says that would take `planned` steps at most."""
        done = self.evaluations[-1][0]
        reason = f"no better AP in {self.patience} evaluations"
        return {
            "steps": self.taken,
            "planned_steps": planned,
            "early_stop": {
                "ended": "the schedule's end" if done == planned else reason,
                "passed_over": done - self.taken,
                "best": {"step": self.best[0], "AP": self.best[1]},
                "evaluations": [{"step": step, "AP": score} for step, score in self.evaluations],
            },
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed stage goes on with."""
        kept = ("taken", "waited", "evaluations", "best", "weights")
        return {name: getattr(self, name) for name in kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.__dict__.update(state)


class AverageHook(HookBase):
    """Keeps an exponential moving average of the detector's weights; checkpoints hold it."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}

    def before_train(self) -> None:
        """Starts from the weights as they are, unless a checkpoint brought an average."""
        if not self.average:
            self.average = {name: x.clone() for name, x in self._weights().items()}

    def after_step(self) -> None:
        """Moves the average towards the weights."""
        done = self.trainer.step + 1
        decay = min(self.decay, (1 + done) / (10 + done))
        current = [*self._weights().values()]
        get_ema_multi_avg_fn(decay)([*self.average.values()], current, done)

    def state_dict(self) -> dict[str, Tensor]:
        """The average."""
        return self.average

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes the average of a checkpoint."""
        device = self.trainer.detector.device
        self.average = {name: value.to(device) for name, value in state.items()}

    def _weights(self) -> dict[str, Tensor]:
        state = self.trainer.detector.state_dict()
        return {name: x for name, x in state.items() if x.is_floating_point()}


class DivergenceHook(HookBase):
    """Stops a stage whose loss grows far above the lowest that it was: it diverges.

    It looks at the logged losses, the median of the last few of them, but for those of batches
    without any object: they are small whatever the detector does.
    """

    def __init__(self) -> None:
        self.recent: list[float] = []
        self.best = float("inf")

    def after_step(self) -> None:
        """Compares the newest losses, on the rank that logs them."""
        latest = self.trainer.storage.latest()
        loss, iteration = latest.get("total_loss", (0.0, -1))
        if iteration != self.trainer.iter or latest.get("loss_bbox", (1.0, -1))[0] == 0.0:
            return
        self.recent = [*self.recent, float(loss)][-_RECENT:]
        median = sorted(self.recent)[len(self.recent) // 2]
        if len(self.recent) == _RECENT and median > _DIVERGED * self.best:
            trainer = self.trainer
            raise InputError(
                f"stopped in phase {trainer.phase} {trainer.stage}, step {trainer.step}: the loss "
                f"diverges, it is {median:.3g} after {self.best:.3g}. The learning rate is too "
                f"high: lower SOLVER.BASE_LR ({trainer.cfg.SOLVER.BASE_LR:g} in this stage) and "
                "start in a new OUTPUT_DIR"
            )
        self.best = min(self.best, median)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed stage goes on with."""
        return {"recent": self.recent, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.recent, self.best = list(state["recent"]), float(state["best"])


def training_state(trainer: Any, meta: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds; refuses to write numbers that are not finite."""
    weights = finite_weights(trainer.detector)
    optimizer = trainer.optimizer.state_dict()
    numbers = [x for state in optimizer["state"].values() for x in state.values()]
    if not finite([x for x in numbers if isinstance(x, Tensor)]):
        raise InputError(
            "the optimizer's state is not finite any more; the last checkpoint is sound: lower "
            "SOLVER.BASE_LR or enable SOLVER.CLIP_GRADIENTS"
        )
    return {
        "model": weights,
        "optimizer": optimizer,
        "scaler": trainer.scaler.state_dict(),
        "trainer": trainer.state_dict(),  # of the hooks, the learning rate's among them
        "step": trainer.step + 1,
        "cldetr": dict(meta),
    }


def finite_weights(
    detector: nn.Module, changes: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The weights to be saved, some of them changed; refuses numbers that are not finite."""
    weights = {**detector.state_dict(), **(changes or {})}
    if not finite(list(weights.values())):
        raise InputError(
            "the weights are not finite any more; the last checkpoint is sound: lower "
            "SOLVER.BASE_LR"
        )
    return weights


class SnapshotHook(HookBase):
    """Draws labels, pseudo-labels and matched predictions of a few images, always the same.

    Training is not affected: no random number is drawn, no weight and no count changes, and a
    picture that cannot be drawn is no reason to stop.
    """

    def __init__(self, cfg: CfgNode) -> None:
        """Chooses LOG_IMAGES images of the stage, evenly spread, drawn every VIS_PERIOD steps.

        Args:
            cfg: of the stage; has the test size, at which the images are shown.
        """
        self.entries: Entries = get_detection_dataset_dicts(cfg.DATASETS.TRAIN, filter_empty=False)
        self.names = MetadataCatalog.get(cfg.DATASETS.TRAIN[0]).thing_classes
        self.mapper = Mapper(Augmentation.from_config(cfg).deterministic(), training=True)
        self.period = cfg.VIS_PERIOD
        last = len(self.entries) - 1
        count = min(cfg.LOG_IMAGES, last + 1)
        self.indices = sorted({round(x) for x in np.linspace(0, last, count)})

    def after_step(self) -> None:
        """Draws where a period or the stage ends."""
        done = self.trainer.step + 1
        if self.indices and (done % self.period == 0 or done == self.trainer.steps):
            try:
                self._draw()
            except Exception:
                logger.warning("no pictures of this stage: drawing failed", exc_info=True)
                self.indices = []

    def _draw(self) -> None:
        rng = np.random.default_rng(0)  # nothing is drawn from it: the mapper is deterministic
        title = f"phase{self.trainer.phase}_{self.trainer.stage}"
        for number, index in enumerate(self.indices, start=1):
            entry = self.mapper(self.entries[index], rng)
            scene = examine_image(self.trainer.learner, entry, self.names)
            picture = np.array(draw_scene(scene, _SIDE))
            tensor = torch.from_numpy(picture.transpose(2, 0, 1))
            self.trainer.storage.put_image(f"{title}/image{number}", tensor)
