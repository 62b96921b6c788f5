"""One optimizer step: precision, accumulation, clipping, and what happens to a bad gradient."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.engine import SimpleTrainer, create_ddp_model
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import Tensor, nn

from cldetr.engine.checkpoint import finite
from cldetr.errors import InputError
from cldetr.methods.learner import Learner

logger = logging.getLogger(__name__)

_SYNC_BUFFERS = "forward_sync_buffers"  # what newer versions of torch call it
if _SYNC_BUFFERS not in inspect.signature(nn.parallel.DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "broadcast_buffers"
_MAX_SKIPPED = 3  # steps in a row without a finite gradient before the run stops


class StageTrainer(SimpleTrainer):
    """Runs the steps of one stage.

    Nothing about a step depends on earlier ones but the weights and the state of optimizer and
    hooks: the batch and the random numbers follow from the step's number.
    """

    def __init__(
        self,
        learner: Learner,
        data_loader: Iterable[list[dict[str, Any]]],
        optimizer: torch.optim.Optimizer,
        cfg: CfgNode,
        *,
        offset: int,
        seed: tuple[int, ...],
        after_backward: Callable[[], None],
    ) -> None:
        """Sets up the loop.

        Args:
            learner: what is trained.
            data_loader: the batches from the first step that is still to be done.
            optimizer: of the detector's parameters.
            cfg: of the stage: reads SOLVER and LOG_PERIOD.
            offset: steps of the run before this stage.
            seed: with the step's number it seeds dropout.
            after_backward: called after each backward pass.
        """
        on_gpu = learner.detector.device.type == "cuda"
        model = create_ddp_model(  # the learner itself where one process trains
            learner,
            device_ids=[torch.cuda.current_device()] if on_gpu else None,
            **{_SYNC_BUFFERS: False},
            gradient_as_bucket_view=True,  # no second copy of the gradients
        )
        super().__init__(model, data_loader, optimizer, gather_metric_period=cfg.LOG_PERIOD)
        self.learner = learner
        self.solver = cfg.SOLVER
        self.steps = cfg.SOLVER.MAX_ITER
        self.offset = offset
        self.seed = seed
        self.after_backward = after_backward
        self._skipped = 0
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        device = self._parameters[0].device.type
        amp = self.solver.AMP
        if on_gpu and amp.ENABLED and amp.DTYPE == "bfloat16" and not has_bfloat16():
            raise InputError(
                f"{torch.cuda.get_device_name()} has no bfloat16: set SOLVER.AMP.DTYPE float16"
            )
        self._autocast = {
            "device_type": device,
            "dtype": torch.bfloat16 if amp.DTYPE == "bfloat16" else torch.float16,
            "enabled": amp.ENABLED,
        }
        self.scaler = torch.amp.GradScaler(device, enabled=amp.ENABLED and amp.DTYPE == "float16")

    @property
    def step(self) -> int:
        """The index of the present step within the stage."""
        return self.iter - self.offset

    def run_step(self) -> None:
        """One optimizer step, skipped when its gradient is not finite on any process."""
        assert self.model.training
        start = time.perf_counter()
        batch = next(self._data_loader_iter)
        data_time = time.perf_counter() - start

        self.learner.progress = self.step / max(self.steps - 1, 1)
        torch.manual_seed(_torch_seed((*self.seed, self.step, comm.get_rank())))

        losses = self._backward(batch)
        self.after_backward()
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self._parameters, self.solver.CLIP_GRADIENTS)
        # Gradients are averaged over processes, so this norm is the same on all of them: they
        # decide alike without a message.
        if bool(torch.isfinite(norm)):
            self._skipped = 0
            self.scaler.step(self.optimizer)
            get_event_storage().put_scalar("grad_norm", float(norm))
            if self.step + 1 == self.steps:  # a stage may be shorter than LOG_PERIOD
                self.write_metrics(losses, data_time, self.iter)
            else:
                self._write_metrics(losses, data_time)
        else:
            self._skip(batch, losses)
        self.scaler.update()

    def close(self) -> None:
        """Ends the loader's workers now: those of a failed stage would delay the exit."""
        iterator: Any = self.__dict__["_data_loader_iter_obj"]
        self._data_loader_iter_obj = None
        if hasattr(iterator, "_shutdown_workers"):  # a traceback may keep the iterator alive
            iterator._shutdown_workers()

    def _backward(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Accumulates the gradients of a batch, in parts where memory is short."""
        self.optimizer.zero_grad()
        size = -(-len(batch) // min(self.solver.ACCUMULATE, len(batch)))
        parts: list[Any] = [batch[start : start + size] for start in range(0, len(batch), size)]
        shares = [len(part) / len(batch) for part in parts]
        if len(parts) > 1:
            with torch.autocast(**self._autocast):
                parts = self.learner.label(parts)
        total: dict[str, Tensor] = {}
        for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
            alone = index + 1 < len(parts) and self.model is not self.learner
            with self.model.no_sync() if alone else nullcontext():  # one all-reduce for all parts
                with torch.autocast(**self._autocast):
                    losses = self.model(part)
                losses = {key: value * share for key, value in losses.items()}
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
            "step %d skipped: its gradient is not finite (losses %s; images %s)",
            self.step,
            {key: float(value) for key, value in losses.items()},
            names,
        )
        if self._skipped >= _MAX_SKIPPED:
            raise InputError(
                f"stopped: {_MAX_SKIPPED} steps in a row had no finite gradient, the last on "
                f"images {names}. Look at these images, or start anew with "
                "a lower SOLVER.BASE_LR; the last checkpoint is sound."
            )


def has_bfloat16() -> bool:
    """Whether this process's GPU computes in bfloat16, other than by emulation: from Ampere on."""
    return torch.cuda.get_device_capability() >= (8, 0)


def clip_gradients(parameters: Sequence[nn.Parameter], clip: CfgNode) -> Tensor:
    """Clips gradients as SOLVER.CLIP_GRADIENTS says; returns the norm of all of them before."""
    total = clip.CLIP_VALUE if clip.ENABLED and clip.FULL_MODEL else float("inf")
    norm = nn.utils.clip_grad_norm_(parameters, total, norm_type=clip.NORM_TYPE)
    if clip.ENABLED and not clip.FULL_MODEL:  # parameter by parameter, as Detectron2 does
        if clip.CLIP_TYPE == "value":
            nn.utils.clip_grad_value_(parameters, clip.CLIP_VALUE)
        else:
            for parameter in parameters:
                nn.utils.clip_grad_norm_(parameter, clip.CLIP_VALUE, clip.NORM_TYPE)
    return norm


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.AdamW:
    """AdamW with Deformable DETR's learning rates.

    The backbone's is multiplied by SOLVER.BACKBONE_MULTIPLIER, that of parameters whose names
    contain a text of SOLVER.LR_MULTIPLIERS by the factor given there; WEIGHT_DECAY_NORM,
    WEIGHT_DECAY_BIAS and BIAS_LR_FACTOR mean what they mean in Detectron2.
    """
    solver = cfg.SOLVER
    backbone = getattr(model, "backbone_prefix", "backbone.")
    seen: set[nn.Parameter] = set()
    groups: dict[tuple[int, float, float], dict[str, Any]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if not parameter.requires_grad or parameter in seen:  # modules may share parameters
                continue
            seen.add(parameter)
            kind, multiplier = 0, 1.0
            if name.startswith(backbone):
                kind, multiplier = 1, solver.BACKBONE_MULTIPLIER
            for text, factor in solver.LR_MULTIPLIERS:
                if kind != 1 and text in name:
                    kind, multiplier = 2, factor
            lr, decay = solver.BASE_LR * multiplier, solver.WEIGHT_DECAY
            if isinstance(module, _NORMS):
                decay = solver.WEIGHT_DECAY_NORM
            elif name.endswith(".bias"):
                lr *= solver.BIAS_LR_FACTOR
                decay = decay if solver.WEIGHT_DECAY_BIAS is None else solver.WEIGHT_DECAY_BIAS
            key = (kind, lr, decay)
            groups.setdefault(key, {"params": [], "lr": lr, "weight_decay": decay})
            groups[key]["params"].append(parameter)
    # The order of groups is that of the sum in the gradient's norm: it is part of the numbers.
    return torch.optim.AdamW(
        [groups[key] for key in sorted(groups, key=lambda key: key[0])],
        lr=solver.BASE_LR,
        weight_decay=solver.WEIGHT_DECAY,
        fused=True,
    )


_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)


def _torch_seed(parts: tuple[int, ...]) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)
