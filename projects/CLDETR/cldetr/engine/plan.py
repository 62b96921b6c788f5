"""What a run will do and need, told before anything is trained, and what would make it fail.

Steps, images, labels and files follow from the config. Hours and GPU memory are estimates: a few
steps of the run's own model on random images, scaled by the number and size of the images. Loading
data is not part of them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.structures import Boxes, Instances

from cldetr.config import check_keys, identity, method_of, schedule_of
from cldetr.data.audit import setting_warnings
from cldetr.data.exemplars import phase_budget, resolve_budget
from cldetr.data.memory import phase_counts
from cldetr.engine.checkpoint import KEPT
from cldetr.engine.initial_weights import check_weights, load_trained_detector
from cldetr.engine.ledger import check_identity, read_identity
from cldetr.engine.resolve import filled_in, resolve
from cldetr.engine.rundata import RunData
from cldetr.engine.stages import Stage, planned_stages, training_learner
from cldetr.errors import InputError
from cldetr.files import sha256_json
from cldetr.methods.learner import Learner
from cldetr.methods.method import Method
from cldetr.modeling.detector import Detector
from cldetr.modeling.huggingface_files import folder_of
from cldetr.scenario import Scenario

_TEST_SIDE = 256  # a CPU is timed on images of this size
_GIB = 1024**3


@dataclass(frozen=True)
class Cost:
    """What one image costs: seconds of a step, with and without the old model, and of a test."""

    step: float
    step_with_teacher: float
    test: float
    activations: int  # bytes kept for the backward pass, of the largest training image
    device: str


@dataclass
class Plan:
    """A run before it is trained.

    Attributes:
        name: what to call it.
        problems: what would stop the run, now or weeks later.
        notes: what is allowed and yet worth a look.
        stages: of training, in order.
        labels: boxes of each phase's own classes in its images.
        test_images: evaluated after each phase.
        disk: bytes that the run directory will hold at most.
        memory: bytes on each GPU, an estimate; None where nothing was measured.
        hours: with the given number of processes, an estimate; None likewise.
        device: where it was measured.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    labels: dict[int, int] = field(default_factory=dict)
    test_images: int = 0
    disk: int = 0
    memory: float | None = None
    hours: float | None = None
    device: str = ""

    def text(self) -> str:
        """The plan as people read it."""
        lines = [f"plan of {self.name}"]
        for stage in self.stages:
            labels = f", {self.labels[stage.phase]:,} labels" if stage.name == "train" else ""
            lines.append(
                f"  phase {stage.phase} {stage.name}: {stage.images:,} images{labels}, "
                f"{stage.steps:,} steps of {stage.batch}"
            )
        if self.stages:
            steps = sum(stage.steps for stage in self.stages)
            lines.append(f"  in all: {steps:,} steps, {self.test_images:,} test images each phase")
            lines.append(f"  disk: {self.disk / _GIB:.2f} GiB for weights and checkpoints")
        if self.memory is not None and self.hours is not None:
            lines.append(f"  memory: {self.memory / _GIB:.2f} GiB on each device (an estimate)")
            lines.append(f"  time: {self.hours:.2g} hours on {self.device} (an estimate)")
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  PROBLEM: {problem}" for problem in self.problems]
        return "\n".join(lines)


def print_plan(
    cfg: CfgNode, build_model: Callable[[CfgNode], Detector], processes: int
) -> dict[str, Any]:
    """Prints what a run will do and need; problems that would stop it are an error."""
    plan = make_plan(cfg, build_model, processes=processes)
    print(plan.text())
    if plan.problems:
        raise InputError(f"this run would fail; problems: {len(plan.problems)}")
    return {}


def make_plan(
    cfg: CfgNode,
    build_model: Callable[[CfgNode], Detector],
    name: str = "",
    processes: int = 1,
    measure: bool = True,
    costs: dict[str, Cost] | None = None,
    check_files: Callable[[CfgNode], None] | None = None,
) -> Plan:
    """Plans a run; nothing is written and nothing is trained.

    Args:
        cfg: of the run.
        build_model: the trainer's.
        name: what to call it; OUTPUT_DIR by default.
        processes: that share a step.
        measure: time a few steps of the model, for hours and memory.
        costs: what was measured for other runs; a run with the same model takes it from here.
        check_files: refuses initial weights that are not there; another one for runs that take
            over what a run before them has yet to train.
    """
    check_files = check_files or _check_files
    plan = Plan(name or cfg.OUTPUT_DIR)
    for check in (check_keys, check_files):
        _note_problem(plan, check, cfg)
    found = _note_problem(plan, resolve, cfg)
    if found is None:
        return plan
    plan.notes += [f"from the detector and the data: {text}" for text in filled_in(cfg, found[0])]
    cfg, data = found
    _note_problem(plan, _check_directory, cfg)
    plan.stages = planned_stages(cfg, data.scenario)
    plan.labels = {
        phase.index: int(phase_counts(data.scenario, phase.index, data.train[phase.source]).sum())
        for phase in data.scenario.phases
    }
    plan.test_images = sum(len(test.image_ids) for test in data.test.values())
    plan.notes += data.consequences()
    held_out = _held_out_images(plan.stages, cfg, data)
    if held_out:
        plan.notes.append(
            f"SCHEDULE.EARLY_STOP may end a training step before the steps above; its evaluations "
            f"are of {held_out:,} held-out images in all if it never does"
        )
    _check_images(plan, cfg, data.scenario, processes)
    plan.notes += setting_warnings(data.scenario, data.train, cfg)
    detector = _note_problem(plan, build_model, cfg)
    if detector is None:
        return plan
    if cfg.MODEL.DETECTOR and Path(cfg.MODEL.DETECTOR).exists():
        _note_problem(plan, load_trained_detector, detector, cfg.MODEL.DETECTOR, data.scenario)
    weights, trained = _sizes(detector)
    best = weights if held_out else 0  # of an early stop, in each checkpoint
    plan.disk = len(plan.stages) * weights + KEPT * (weights + best + 2 * trained)
    free = shutil.disk_usage(_existing(Path(cfg.OUTPUT_DIR))).free
    if free < plan.disk:
        plan.problems.append(
            f"the disk of {cfg.OUTPUT_DIR} has {free / _GIB:.2f} GiB, the run takes "
            f"{plan.disk / _GIB:.2f} GiB"
        )
    if measure:
        method = method_of(cfg)
        costs = {} if costs is None else costs
        key = _cost_key(cfg, method)
        cost = costs[key] = costs.get(key) or measure_cost(cfg, detector, data, method)
        share = -(-cfg.SOLVER.IMS_PER_BATCH // processes)
        at_once = -(-share // cfg.SOLVER.ACCUMULATE)
        teacher = weights if method.needs_teacher else 0
        plan.memory = weights + 3 * trained + teacher + at_once * cost.activations
        evaluated = len(plan.labels) * plan.test_images + held_out
        seconds = _seconds(plan, cost, method, share) + evaluated * cost.test / processes
        plan.hours = seconds / 3600
        plan.device = f"{processes} × {cost.device}" if processes > 1 else cost.device
    return plan


def sum_text(plans: Sequence[Plan]) -> str:
    """What several runs need together."""
    steps = sum(stage.steps for plan in plans for stage in plan.stages)
    lines = [f"{len(plans)} runs: {steps:,} steps, {sum(p.disk for p in plans) / _GIB:.2f} GiB"]
    hours = [plan.hours for plan in plans if plan.hours is not None]
    if hours:
        lines[0] += f", {sum(hours):.2g} hours one after the other (an estimate)"
    problems = sum(len(plan.problems) for plan in plans)
    if problems:
        lines.append(f"{problems} problems: see above")
    return "\n".join(lines)


def measure_cost(cfg: CfgNode, detector: Detector, data: RunData, method: Method) -> Cost:
    """Times steps of the model on random images and counts what the backward pass keeps."""
    typical, largest = _image_sizes(cfg, data)
    on_gpu = detector.device.type == "cuda"
    side = _TEST_SIDE if not on_gpu else max(typical)
    scale = min(1.0, side / max(typical))
    size = (max(round(typical[0] * scale), 32), max(round(typical[1] * scale), 32))
    pixels, wanted = size[0] * size[1], typical[0] * typical[1]
    batch = _random_batch(size, detector.num_classes)
    seen = range(detector.num_classes)
    plain = Learner(detector, seen=seen).train()
    amp = cfg.SOLVER.AMP
    autocast = torch.autocast(
        detector.device.type,
        dtype=torch.bfloat16 if amp.DTYPE == "bfloat16" else torch.float16,
        enabled=amp.ENABLED,
    )
    half = _random_batch((size[0] // 2, size[1]), detector.num_classes)
    kept, kept_of_half = (_saved_bytes(plain, each, autocast) for each in (batch, half))
    # One part grows with the image, the other, of queries and decoder, does not.
    kept_per_pixel = max(kept - kept_of_half, 0) / (pixels / 2)
    step = _seconds_per_call(lambda: _step(plain, batch, autocast), on_gpu)
    teaching = step
    if method.needs_teacher and len(data.scenario.phases) > 1:
        learner = training_learner(detector, method, data.scenario, 2, old_model=detector).train()
        if not (method.pseudo and method.pseudo.cache):  # asked once per image, not in each step
            teaching = _seconds_per_call(lambda: _step(learner, batch, autocast), on_gpu)
    detector.eval()
    with torch.no_grad():
        test = _seconds_per_call(lambda: detector(batch), on_gpu)
    factor = wanted / pixels
    return Cost(
        step=step * factor,
        step_with_teacher=teaching * factor,
        test=test * factor,
        activations=round(kept + kept_per_pixel * (largest[0] * largest[1] - pixels)),
        device=torch.cuda.get_device_name() if on_gpu else "the CPU",
    )


def _cost_key(cfg: CfgNode, method: Method) -> str:
    """The same for runs whose steps cost the same."""
    asked = method.needs_teacher and not (method.pseudo and method.pseudo.cache)
    settings = {
        key: value
        for key, value in identity(cfg).items()
        if key.startswith(("MODEL.", "INPUT.", "DATASETS.")) and key != "MODEL.DETECTOR"
    }
    return sha256_json([settings, asked])


def _held_out_images(stages: Sequence[Stage], cfg: CfgNode, data: RunData) -> int:
    """Images that the evaluations of an early stop see, each as often as it is evaluated."""
    rule = schedule_of(cfg).early_stop
    if rule is None:
        return 0
    return sum(
        -(-stage.steps // rule.period_steps(stage.steps_per_epoch))
        * data.size([data.name("held_out", stage.phase)])
        for stage in stages
        if stage.name == "train"
    )


def _seconds(plan: Plan, cost: Cost, method: Method, share: int) -> float:
    """Seconds of all training steps."""
    total = 0.0
    for stage in plan.stages:
        taught = stage.name == "train" and stage.phase > 1 and method.needs_teacher
        total += stage.steps * share * (cost.step_with_teacher if taught else cost.step)
    return total


def _note_problem(plan: Plan, call: Any, *inputs: Any) -> Any:
    """Calls something; what it refuses becomes a problem of the plan."""
    try:
        return call(*inputs)
    except InputError as error:
        plan.problems.append(str(error))
        return None


def _check_directory(cfg: CfgNode) -> None:
    stored = Path(cfg.OUTPUT_DIR) / "identity.json"
    if not stored.exists():
        return
    check_identity(read_identity(stored), identity(cfg))


def _check_files(cfg: CfgNode) -> None:
    """Refuses weights that are not there."""
    if cfg.MODEL.DETECTOR:
        if not Path(cfg.MODEL.DETECTOR).exists() and folder_of(cfg.MODEL.DETECTOR) is None:
            raise InputError(f"there is no file {cfg.MODEL.DETECTOR}: set MODEL.DETECTOR")
        return
    check_weights(cfg.MODEL.WEIGHTS)


def _check_images(plan: Plan, cfg: CfgNode, scenario: Scenario, processes: int) -> None:
    """Notes stages that are too small and budgets that cannot be had."""
    batch, memory = cfg.SOLVER.IMS_PER_BATCH, method_of(cfg).memory
    if batch % processes:
        plan.problems.append(
            f"SOLVER.IMS_PER_BATCH {batch} cannot be divided among {processes} processes"
        )
    for stage in plan.stages:
        if stage.images < batch:
            plan.notes.append(
                f"phase {stage.phase} {stage.name} has {stage.images} images for batches of "
                f"{batch}: each batch repeats some"
            )
    for phase in scenario.phases:
        if not phase.image_ids:  # a detector that was given
            continue
        if not plan.labels[phase.index]:
            plan.problems.append(f"phase {phase.index} has no object of its classes")
        if memory is not None:
            share = phase_budget(memory.budget, scenario)
            wanted = resolve_budget(share, len(phase.image_ids))
            if wanted > len(phase.image_ids):
                plan.notes.append(
                    f"phase {phase.index} has {len(phase.image_ids)} images, fewer than the "
                    f"budget of {wanted} exemplars"
                )


def _sizes(detector: Detector) -> tuple[int, int]:
    """Bytes of all weights and of those that are trained."""
    tensors = detector.state_dict().values()
    trained = [p for p in detector.parameters() if p.requires_grad]
    return tuple(  # type: ignore[return-value]
        sum(t.numel() * t.element_size() for t in group) for group in (tensors, trained)
    )


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _image_sizes(cfg: CfgNode, data: RunData) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of a typical and of the largest training image, after resizing."""
    heights = np.concatenate([source.heights for source in data.train.values()])
    widths = np.concatenate([source.widths for source in data.train.values()])
    middle = (float(np.median(heights)), float(np.median(widths)))
    sides = cfg.INPUT.MIN_SIZE_TRAIN
    found = []
    for side in (float(np.median(sides)), float(max(sides))):
        scale = side / min(middle) if side else 1.0
        limit = cfg.INPUT.MAX_SIZE_TRAIN or max(middle) * scale
        scale = min(scale, limit / max(middle))
        found.append((round(middle[0] * scale), round(middle[1] * scale)))
    return found[0], found[1]


def _random_batch(size: tuple[int, int], num_classes: int) -> list[dict[str, Any]]:
    height, width = size
    labels = Instances(size)
    corner = torch.tensor([[0.0, 0.0, width / 2, height / 2]])
    labels.gt_boxes = Boxes(corner.repeat(4, 1))
    labels.gt_classes = torch.arange(4) % num_classes
    image = torch.randint(0, 255, (3, height, width), dtype=torch.uint8)
    return [
        {
            "image": image,
            "instances": labels,
            "height": height,
            "width": width,
            "classes": (),
            "file_name": "random",
        }
    ]


def _step(learner: Learner, batch: list[dict[str, Any]], autocast: torch.autocast) -> None:
    with autocast:
        losses = learner(batch)
    sum(losses.values()).backward()
    learner.zero_grad()


def _saved_bytes(learner: Learner, batch: list[dict[str, Any]], autocast: torch.autocast) -> int:
    """What a forward pass keeps for the backward pass, weights not counted."""
    sizes: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in learner.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _step(learner, batch, autocast)
    return sum(sizes.values())


def _seconds_per_call(call: Any, on_gpu: bool, times: int = 2) -> float:
    call()  # the first is slower
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times
