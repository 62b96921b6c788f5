"""The recipe: everything a run needs to know, in plain data.

YAML files and LazyConfigs both become a `Recipe` (`from_yaml.py`, `from_lazy.py`); the engine never
sees a configuration object. All of it but `runtime` is the identity of a run: a run is resumed only
with the identity it was started with.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cldetr.data.mapper import Augmentation
from cldetr.errors import InputError
from cldetr.files import sha256_json
from cldetr.methods.method import Method
from cldetr.modeling.detector import Detector


@dataclass(frozen=True)
class DataSettings:
    """Where the data is.

    Attributes:
        train: one base data set that the scenario divides, or one data set per phase. Each is the
            name of a registered COCO-format data set or `ANNOTATIONS.json:IMAGE_FOLDER`.
        test: likewise; several data sets are evaluated as one.
        bad_boxes: "stop" at boxes that make no sense, or "drop" and count them.
        scan: check all image files before training.
    """

    train: tuple[str, ...] = ("coco_2017_train",)
    test: tuple[str, ...] = ("coco_2017_val",)
    bad_boxes: Literal["stop", "drop"] = "stop"
    scan: bool = True


@dataclass(frozen=True)
class ScenarioSettings:
    """Which classes and images each phase gets (`cldetr.scenario.make_scenario`)."""

    name: str = "70+10"
    protocol: Literal["strict", "traditional"] = "strict"
    order: str = "seed"  # of the classes: "id", "seed" or "released"
    class_seed: int = 0
    data_seed: int = 0
    phases: tuple[tuple[str, ...], ...] = ()  # category names per phase, instead of `name`


@dataclass(frozen=True)
class StageSchedule:
    """How long a stage trains and at what learning rate.

    Attributes:
        epochs: passes over the stage's images.
        drops: epochs after which the learning rate is divided by ten.
        lr_scale: factor on the base learning rate in this stage.
        max_steps: stop after so many steps at the latest; 0 means no limit.
    """

    epochs: float
    drops: tuple[float, ...] = ()
    lr_scale: float = 1.0
    max_steps: int = 0

    def steps(self, per_epoch: int) -> int:
        """Optimizer steps of the stage, at least one."""
        steps = max(round(self.epochs * per_epoch), 1)
        return min(steps, self.max_steps) if self.max_steps else steps

    def lr_factor(self, step: int, per_epoch: int) -> float:
        """The factor on the base learning rate at a step; a function of the step alone."""
        drops = sum(step >= round(drop * per_epoch) for drop in self.drops)
        return self.lr_scale * 0.1**drops


@dataclass(frozen=True)
class Schedule:
    """The stages' schedules: the first phase, the training step and the calibration step.

    The defaults are the paper's 50 epochs, and 40 + 10 from the second phase on. The paper does not
    say at which learning rate it calibrates; the standard 50-epoch schedule drops at epoch 40, so
    calibration runs at the dropped rate.
    """

    first: StageSchedule = StageSchedule(50, drops=(40,))
    train: StageSchedule = StageSchedule(40)
    calibrate: StageSchedule = StageSchedule(10, lr_scale=0.1)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with three groups of parameters and a clip on the global gradient norm."""

    lr: float = 2e-4
    backbone_factor: float = 0.1
    slow_factor: float = 0.1
    slow_names: tuple[str, ...] = ("sampling_offsets", "reference_points")
    weight_decay: float = 1e-4
    clip: float = 0.1  # 0 turns it off
    batch: int = 32  # images in a step, over all processes
    accumulate: int = 1  # parts in which a process computes its share of a step
    amp: Literal["off", "float16", "bfloat16"] = "off"


@dataclass(frozen=True)
class ModelSettings:
    """How to build the detector, with enough written down to tell two of them apart.

    Attributes:
        description: what `build` builds, as plain data.
        build: makes the detector for a number of classes.
        weights: initial weights of the first phase (a backbone, or a whole detector).
        detector: a trained detector that *is* the first phase: it is not trained, only checked.
        detections_per_image: at most this many results, where `description` does not tell.
    """

    description: Mapping[str, Any]
    build: Callable[[int], Detector]
    weights: str = ""
    detector: str = ""
    detections_per_image: int = 100


@dataclass(frozen=True)
class Runtime:
    """What may change between two starts of the same run."""

    output_dir: str = "output"
    device: str = "cuda"  # without a GPU: the CPU
    workers: int = 2
    log_period: int = 20
    log_images: int = 3  # shown in TensorBoard at every checkpoint
    checkpoint_period: int = 0  # steps; 0 means every epoch
    eval_period: int = 0  # steps; 0 means only at the end of a phase
    restrict_eval: bool = False  # the released code's restricted image set; may not change
    joint_results: str = ""  # results.json of a joint run, for the gap to it
    report: bool = True  # end with pictures, diagnostics and a page of the run


@dataclass(frozen=True)
class Recipe:
    """One run."""

    model: ModelSettings
    data: DataSettings = field(default_factory=DataSettings)
    scenario: ScenarioSettings = field(default_factory=ScenarioSettings)
    method: Method = field(default_factory=Method)
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    augmentation: Augmentation = field(default_factory=Augmentation)
    seed: int = 0
    runtime: Runtime = field(default_factory=Runtime)

    def identity(self) -> dict[str, Any]:
        """All that decides the numbers a run ends with, as JSON data."""
        parts: dict[str, Any] = {
            "model": {
                "description": self.model.description,
                "weights": self.model.weights,
                "detector": self.model.detector,
            },
            "seed": self.seed,
        }
        for name in ("data", "scenario", "method", "schedule", "optimizer", "augmentation"):
            parts[name] = dataclasses.asdict(getattr(self, name))
        if self.runtime.restrict_eval or self.model.detections_per_image != 100:
            parts["evaluation"] = {  # where it is not the usual one
                "restrict_images": self.runtime.restrict_eval,
                "detections_per_image": self.model.detections_per_image,
            }
        return json.loads(json.dumps(parts, default=str))

    def fingerprint(self) -> str:
        """A digest of the identity."""
        return sha256_json(self.identity())


def check_identity(stored: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuses to go on with a run under another identity, showing what differs."""
    differences = list(differing(stored, recipe.identity()))
    if differences:
        raise InputError.listing(
            "this directory holds another run; these settings differ from it "
            "(start in a new OUTPUT_DIR, or take the changes back):",
            [f"{key}: was {old!r}, now {new!r}" for key, old, new in differences],
        )


def differing(
    stored: Mapping[str, Any], current: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, stored value, current value) for every leaf that differs."""
    for key in sorted({*stored, *current}):
        old, new = stored.get(key), current.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differing(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", old, new
