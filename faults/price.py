"""What safe checkpoints cost: seconds of a save, as a share of the epoch that it ends.

The state is that of the paper's run (configs/70_10.yaml): Deformable DETR on a ResNet-50 with
AdamW's two moments. A save checks that all numbers are finite, writes, computes the digest, waits
for the disk (fsync) and renames; it is compared with a bare `torch.save`. An epoch of the first
phase is 3,234 steps of 32 images; it is taken to run at 0.25 s a step, 128 images a second, faster
than most machines will be, which makes the share larger than it will be. What is judged is the
processor's time: the time that passed depends on what else the machine does and on its disk, and is
told beside it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from detectron2.modeling import build_model

from cldetr.config import load_config
from cldetr.engine.checkpoint import save_checkpoint
from cldetr.engine.hooks import training_state
from cldetr.engine.step import build_optimizer
from faults.tally import Options, Tally

CONFIG = Path(__file__).parents[1] / "configs/70_10.yaml"
STEPS = 103_501 // 32
STEP_SECONDS = 0.25
LIMIT = 0.01  # share of the epoch


def run(options: Options) -> Tally:
    """Saves some times, safely and barely, in turn."""
    tally = Tally("price")
    cfg = load_config(str(CONFIG), ["MODEL.DEVICE", "cpu", "MODEL.DETR.NUM_CLASSES", "80"])
    detector = build_model(cfg)
    optimizer = build_optimizer(cfg, detector)
    for parameter in detector.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    trainer = SimpleNamespace(
        detector=detector,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        step=0,
        state_dict=dict,  # of hooks: there are none
    )
    safe, bare = [], []
    with tempfile.TemporaryDirectory() as place:  # on a disk: shared memory would flatter
        folder = Path(place)
        for number in range(1, options.number(2, 5, 20) + 1):
            begun = _clocks()
            save_checkpoint(folder / "safe", number, training_state(trainer, {}))
            safe.append(_since(begun))
            begun = _clocks()
            state: dict[str, Any] = {
                "model": detector.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(state, folder / "bare.pth")
            bare.append(_since(begun))
        size = (folder / "bare.pth").stat().st_size / 1e6
    epoch = STEPS * STEP_SECONDS
    cost, wall = (statistics.median(times) for times in zip(*safe, strict=True))
    bare_cost, bare_wall = (statistics.median(times) for times in zip(*bare, strict=True))
    share = cost / epoch
    tally.note(
        f"a checkpoint of {size:.0f} MB costs {cost:.1f} s of a processor (median of {len(safe)}; "
        f"a bare torch.save {bare_cost:.1f} s): {100 * share:.2f}% of an epoch of {STEPS:,} steps "
        f"at {STEP_SECONDS} s; {wall:.1f} s passed on this machine (bare {bare_wall:.1f} s)"
    )
    tally.check("measured shares of a realistic epoch are at most 1%", share <= LIMIT, f"{share}")
    return tally


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _since(begun: tuple[float, float]) -> tuple[float, float]:
    """Seconds of the processor, and seconds that passed."""
    now = _clocks()
    return now[0] - begun[0], now[1] - begun[1]
