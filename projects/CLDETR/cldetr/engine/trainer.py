"""Training one stage: Detectron2's loop with exact resume, a global clip and agreed skipping."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from detectron2.engine import HookBase, SimpleTrainer
from detectron2.utils import comm
from torch import Tensor, nn

from cldetr.engine.checkpoint import finite, save_checkpoint
from cldetr.engine.recipe import OptimizerSettings, StageSchedule
from cldetr.errors import InputError
from cldetr.methods.learner import Learner

logger = logging.getLogger(__name__)

_MOST_SKIPPED = 3  # steps in a row without a finite gradient before the run stops
_SAME_REQUEST = 1.0  # seconds in which several signals are one: Ctrl-C reaches a process twice


class Interrupted(SystemExit):
    """The run was asked to stop and has saved its state; exits as the shell expects."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)


class StageTrainer(SimpleTrainer):
    """Runs the steps of one stage.

    Steps are counted over the whole run (`trainer.iter`), so that curves of all stages join;
    `offset` is the number of steps before this stage. Nothing about a step depends on earlier ones
    but the weights and the optimizer's state: the batch, the learning rate and the random numbers
    follow from the step's number.
    """

    def __init__(
        self,
        learner: Learner,
        model: nn.Module,
        data_loader: Iterable[list[dict[str, Any]]],
        optimizer: torch.optim.Optimizer,
        *,
        settings: OptimizerSettings,
        schedule: StageSchedule,
        steps_per_epoch: int,
        offset: int,
        steps: int,
        seed: tuple[int, ...],
        log_period: int = 20,
    ) -> None:
        """Sets up the loop.

        Args:
            learner: what learns.
            model: the learner itself, or wrapped for several processes.
            data_loader: the batches from the first step that is still to be done.
            optimizer: from `build_optimizer`.
            settings: clip, accumulation, precision.
            schedule: the learning rate of each step.
            steps_per_epoch: steps in an epoch of this stage.
            offset: steps of the run before this stage.
            steps: steps of this stage.
            seed: with the step's number it seeds dropout.
            log_period: every so many steps metrics are gathered from all processes.
        """
        super().__init__(model, data_loader, optimizer, gather_metric_period=log_period)
        self.learner = learner
        self.settings = settings
        self.schedule = schedule
        self.steps_per_epoch = steps_per_epoch
        self.offset = offset
        self.steps = steps
        self.seed = seed
        self._skipped = 0
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        device = self._parameters[0].device.type
        self._autocast = {
            "device_type": device,
            "dtype": torch.bfloat16 if settings.amp == "bfloat16" else torch.float16,
            "enabled": settings.amp != "off",
        }
        self.scaler = torch.amp.GradScaler(device, enabled=settings.amp == "float16")

    @property
    def step(self) -> int:
        """The number of the present step within the stage."""
        return self.iter - self.offset

    def run_step(self) -> None:
        """One optimizer step, left out when its gradient is not finite on any process."""
        assert self.model.training
        start = time.perf_counter()
        batch = next(self._data_loader_iter)
        data_time = time.perf_counter() - start

        factor = self.schedule.lr_factor(self.step, self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        self.storage.put_scalar("lr", self.settings.lr * factor, smoothing_hint=False)
        self.learner.progress = self.step / max(self.steps - 1, 1)
        torch.manual_seed(_torch_seed((*self.seed, self.step, comm.get_rank())))

        losses = self._backward(batch)
        self.after_backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self._parameters, self.settings.clip or float("inf"))
        # Gradients are averaged over processes, so this norm is the same on all of them and they
        # agree without a word.
        if bool(torch.isfinite(norm)):
            self._skipped = 0
            self.scaler.step(self.optimizer)
            self.storage.put_scalar("grad_norm", float(norm))
            self._write_metrics(losses, data_time)
        else:
            self._skip(batch, losses)
        self.scaler.update()

    def _backward(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Accumulates the gradients of a batch, in parts where memory is short."""
        self.optimizer.zero_grad()
        parts = min(self.settings.accumulate, len(batch))
        size = -(-len(batch) // parts)
        total: dict[str, Tensor] = {}
        for start in range(0, len(batch), size):
            part = batch[start : start + size]
            with torch.autocast(**self._autocast):
                losses = self.model(part)
            losses = {key: value * (len(part) / len(batch)) for key, value in losses.items()}
            self.scaler.scale(sum(losses.values())).backward()
            for key, value in losses.items():
                total[key] = total.get(key, 0) + value.detach()
        return total

    def _skip(self, batch: list[dict[str, Any]], losses: Mapping[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        if self.scaler.is_enabled() and finite(list(losses.values())):
            return  # float16 overflow: the scaler lowers its scale, nothing is wrong
        self._skipped += 1
        names = ", ".join(str(entry.get("file_name", entry.get("image_id"))) for entry in batch)
        logger.warning(
            "step %d left out: its gradient is not finite (losses %s; images %s)",
            self.step,
            {key: float(value) for key, value in losses.items()},
            names,
        )
        if self._skipped >= _MOST_SKIPPED:
            raise InputError(
                f"stopped: {_MOST_SKIPPED} steps in a row had no finite gradient, the last on "
                f"images {names}. The last checkpoint is sound; lower SOLVER.BASE_LR or look at "
                "these images."
            )


class CheckpointHook(HookBase):
    """Saves the stage's state periodically, and before an asked-for stop."""

    def __init__(self, folder: Path, period: int, stop: StopRequest, meta: dict[str, Any]) -> None:
        self.folder = folder
        self.period = period
        self.stop = stop
        self.meta = meta

    def after_step(self) -> None:
        """Saves where a period ends; stops where a signal came, on all processes together."""
        trainer = self.trainer
        done = trainer.step + 1
        signum = self.stop.agreed()
        if done < trainer.steps and (signum or done % self.period == 0):
            if comm.is_main_process():
                save_checkpoint(self.folder, done, training_state(trainer, self.meta))
            comm.synchronize()
        if signum and done < trainer.steps:
            logger.warning("stopped by signal %d after step %d; --resume goes on", signum, done)
            raise Interrupted(signum)


class StopRequest:
    """Stops a run on SIGTERM and SIGINT: at once, or while a stage trains after the step."""

    def __init__(self) -> None:
        self.signum = 0
        self._asked_at = 0.0
        self._waits = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._before[signum] = signal.signal(signum, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this lasts a signal is only remembered: there are steps that a stop would lose."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def agreed(self) -> int:
        """The signal to stop for, the same on every process; 0 for none."""
        if comm.get_world_size() == 1:
            return self.signum
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        flag = torch.tensor(self.signum, device=device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return int(flag)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        asked_before = self.signum and time.monotonic() - self._asked_at > _SAME_REQUEST
        if not self.signum:
            self.signum, self._asked_at = signum, time.monotonic()
        if asked_before or not self._waits:
            raise Interrupted(signum)


def training_state(trainer: StageTrainer, meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds; refuses to write numbers that are not finite."""
    weights = finite_weights(trainer.learner.detector)
    optimizer = trainer.optimizer.state_dict()
    numbers = [x for state in optimizer["state"].values() for x in state.values()]
    if not finite([x for x in numbers if isinstance(x, Tensor)]):
        raise InputError(
            "the optimizer's state is not finite any more; the last checkpoint is sound: lower "
            "SOLVER.BASE_LR or set SOLVER.CLIP"
        )
    return {
        "model": weights,
        "optimizer": optimizer,
        "scaler": trainer.scaler.state_dict(),
        "step": trainer.step + 1,
        "cldetr": dict(meta),
    }


def finite_weights(detector: nn.Module) -> dict[str, Tensor]:
    """The weights to be saved; refuses numbers that are not finite."""
    weights = detector.state_dict()
    if not finite(list(weights.values())):
        raise InputError(
            "the weights are not finite any more; the last checkpoint is sound: lower "
            "SOLVER.BASE_LR"
        )
    return weights


def build_optimizer(detector: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over the groups of Deformable DETR: the rest, the backbone, the slow projections."""
    groups: dict[str, list[nn.Parameter]] = {"rest": [], "backbone": [], "slow": []}
    for name, parameter in detector.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith("backbone."):
            groups["backbone"].append(parameter)
        elif any(word in name for word in settings.slow_names):
            groups["slow"].append(parameter)
        else:
            groups["rest"].append(parameter)
    factors = {"rest": 1.0, "backbone": settings.backbone_factor, "slow": settings.slow_factor}
    return torch.optim.AdamW(
        [
            {"params": parameters, "base_lr": settings.lr * factors[name]}
            for name, parameters in groups.items()
            if parameters
        ],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _torch_seed(parts: tuple[int, ...]) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)
