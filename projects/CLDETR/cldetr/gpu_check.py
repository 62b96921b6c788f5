"""The first run on a GPU, as one command: `cldetr doctor --gpu`.

It builds the operator, compares it with its PyTorch form in every type, takes ten training steps in
every precision beside the CPU, one step of two processes over NCCL, and times full-size steps.
Every failure names its fix.
"""

from __future__ import annotations

import itertools
import re
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from cldetr.config_files import compose
from cldetr.doctor import Finding, release
from cldetr.engine.environment import environment
from cldetr.engine.launch import set_float32_precision
from cldetr.engine.step import StageTrainer, build_optimizer, has_bfloat16
from cldetr.layers.build import BuildError, build_libraries
from cldetr.layers.libraries import load_libraries
from cldetr.layers.ms_deform_attn import ms_deform_attn, ms_deform_attn_reference
from cldetr.methods.learner import Learner

DRIVER = Path("/proc/driver/nvidia/version")
# The oldest driver of each major version of CUDA (NVIDIA's compatibility table).
OLDEST_DRIVERS = {"11": "450.80", "12": "525.60", "13": "580.65"}
STEPS = 10
_GIB = 2**30
_OLD_BUILD = "for example a CUDA 12.6 build of torch (cu126), which has sm_50 to sm_90"
_REPORT = "please report it, with all of this output"

# Tolerances relative to the largest number, of the operator against float64.
_TYPES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# FLOAT32_PRECISION, SOLVER.AMP.DTYPE, and how far losses may be from the CPU's.
_PRECISIONS = {
    "float32": ("highest", "", 5e-3),
    "TF32": ("high", "", 3e-2),
    "bfloat16": ("high", "bfloat16", 0.1),
    "float16": ("high", "float16", 0.1),
}


def check_gpu(full_size: bool = True) -> Iterator[Finding]:
    """Checks everything that a training run needs of the GPUs; ends at the first that is missing.

    Args:
        full_size: also time steps of the R-50 detector on images of 800 × 1333.
    """
    finding = check_driver()
    yield finding
    if finding.status == "fail":
        return
    for check in (check_architectures, build_operator):
        finding = check()
        yield finding
        if finding.status == "fail":
            return
    for kind in _TYPES:
        yield _guard(compare_operator, f"operator, {str(kind).removeprefix('torch.')}", kind)
    on_cpu = train_small("cpu", "highest", "")
    for precision in _PRECISIONS:
        yield _guard(compare_steps, f"{STEPS} steps, {precision}", precision, on_cpu)
    yield check_processes()
    if full_size:
        for precision in ("TF32", "bfloat16" if has_bfloat16() else "float16"):
            yield _guard(time_step, f"R-50, {precision}", precision)


def check_versions() -> Iterator[Finding]:
    """What a report about the rest must tell."""
    versions = environment("cpu")["versions"]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield Finding("versions", "ok", text)


def check_driver() -> Finding:
    """Whether torch sees a GPU, and if not, why."""
    built = torch.version.cuda
    if not built:
        fix = "install a CUDA build of torch; pytorch.org lists the commands"
        return Finding("GPU", "fail", f"torch {torch.__version__} is built without CUDA", fix)
    if torch.cuda.is_available():
        return Finding("GPU", "ok", f"{_devices()}; driver {_driver() or 'of unknown version'}")
    driver, needed = _driver(), OLDEST_DRIVERS.get(built.split(".")[0], "")
    if driver and needed and release(driver) < release(needed):
        text = f"driver {driver} is too old for torch {torch.__version__} (CUDA {built})"
        fix = f"update it to {needed} or newer, or install a torch for an older CUDA"
    elif driver:
        text = f"driver {driver} is loaded, but torch sees no device"
        fix = "check CUDA_VISIBLE_DEVICES and `nvidia-smi`; in a container, its --gpus option"
    else:
        text = f"there is no NVIDIA driver on this machine ({DRIVER} does not exist)"
        fix = "run this on a machine with an NVIDIA GPU; in a container, start it with --gpus all"
    return Finding("GPU", "fail", text, fix)


def check_architectures() -> Finding:
    """Whether the installed torch has code for every GPU."""
    codes = torch.cuda.get_arch_list()
    missing = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if not runs_on(codes, capability):
            missing.append(f"{torch.cuda.get_device_name(index)} (sm_{_join(capability)})")
    text = f"torch has {', '.join(codes)}"
    if missing:
        fix = f"install a torch that has it, {_OLD_BUILD}; or hide it by CUDA_VISIBLE_DEVICES"
        return Finding("architecture", "fail", f"{text}, not {', '.join(missing)}", fix)
    return Finding("architecture", "ok", text)


def runs_on(codes: list[str], capability: tuple[int, int]) -> bool:
    """Whether one of the codes of a build, such as "sm_80", runs on a GPU of that capability.

    Machine code runs on later GPUs of its major version, PTX ("compute_90") on all later ones.
    """
    for code in codes:
        kind, _, number = code.partition("_")
        digits = re.match(r"\d+", number)
        if digits is None:
            continue
        major, minor = divmod(int(digits[0]), 10)
        exact = number != digits[0]  # sm_90a runs on 9.0 alone
        if exact and (major, minor) != capability:
            continue
        if kind == "compute" and (major, minor) <= capability:
            return True
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
    return False


def build_operator() -> Finding:
    """Builds the CUDA operator where it is missing or out of date, and loads it."""
    try:
        lines = build_libraries(cuda="on")
    except BuildError as error:
        text = str(error)
        major = str(torch.version.cuda).split(".")[0]
        fix = f"install a C++ compiler and the CUDA {major} toolkit (nvcc), or set CUDA_HOME to it"
        if "did not compile" in text:
            fix = "see the log: often nvcc does not support the C++ compiler (set CXX to another)"
        return Finding("operator", "fail", text, fix)
    load_libraries.cache_clear()
    library = load_libraries()["cuda"]
    if not library.loaded:
        return Finding("operator", "fail", library.reason, "`cldetr build --cuda on --force`")
    return Finding("operator", "ok", lines[-1].removeprefix("cuda: "))


def compare_operator(name: str, kind: torch.dtype) -> Finding:
    """Compares the operator on the GPU with the PyTorch form in float64, with gradients."""
    inputs = _attention_inputs(kind)
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    wanted = _with_gradients(ms_deform_attn_reference, exact)
    on_gpu = [x if x.dtype == torch.int64 else x.cuda() for x in inputs]
    found = _with_gradients(ms_deform_attn, on_gpu)
    errors = [
        float((ours.cpu().double() - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip(found, wanted, strict=True)
    ]
    text = f"largest relative error {max(errors):.1e} (output {errors[0]:.1e})"
    if not max(errors) <= _TYPES[kind]:  # also where it is not a number
        return Finding(name, "fail", f"{text}, allowed {_TYPES[kind]:.0e}", _REPORT)
    return Finding(name, "ok", text)


def compare_steps(name: str, precision: str, on_cpu: tuple[float, float, float]) -> Finding:
    """Takes training steps in a precision and compares the losses with the CPU's."""
    if precision == "bfloat16" and not has_bfloat16():
        return Finding(name, "ok", "not checked: this GPU has none; use SOLVER.AMP.DTYPE float16")
    float32, half, tolerance = _PRECISIONS[precision]
    first, last, seconds = train_small("cuda", float32, half)
    text = f"loss {first:.4f} to {last:.4f}, on the CPU {on_cpu[0]:.4f} to {on_cpu[1]:.4f}; "
    text += f"{1000 * seconds:.0f} ms per step of the small detector"
    if not max(abs(first / on_cpu[0] - 1), abs(last / on_cpu[1] - 1)) <= tolerance:
        return Finding(name, "fail", f"{text}; allowed {tolerance:.1%}", _REPORT)
    return Finding(name, "ok", text)


def train_small(device: str, float32: str, half: str) -> tuple[float, float, float]:
    """Trains the small detector on one batch; returns its loss before and after, and the time."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_float32_precision(float32, device)
    try:
        trainer = _small_trainer(device, half)
        batch = next(trainer._data_loader_iter)
        first = _loss(trainer.learner, batch)
        seconds = _seconds_per_step(trainer, device, first=1, last=STEPS)
        return first, _loss(trainer.learner, batch), seconds
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def check_processes(backend: str = "nccl", count: int | None = None) -> Finding:
    """Takes a step with two processes and compares their gradients."""
    name = f"two processes, {backend.upper() if backend == 'nccl' else backend}"
    count = torch.cuda.device_count() if count is None else count
    if count < 2:
        return Finding(name, "ok", "not checked: there is one GPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    try:
        mp.spawn(step_of_two, args=(backend, address), nprocs=2)
    except Exception as error:  # whatever the processes raised, or how they died
        text = str(error).strip().splitlines()[-1]
        fix = "NCCL_DEBUG=INFO tells where; often NCCL_P2P_DISABLE=1, or in a container --ipc=host"
        return Finding(name, "fail", text, fix)
    return Finding(name, "ok", "a step gives both the same gradients")


def step_of_two(rank: int, backend: str, address: str) -> None:
    """What each of two processes does: one backward pass on images of its own."""
    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        init_method=address,
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=2),
        device_id=device if on_gpu else None,
    )
    learner = _small_learner(str(device))[0]
    model = DistributedDataParallel(learner, device_ids=[rank] if on_gpu else None)
    sum(model(_random_batch(2, 64, 96, 10, seed=rank)).values()).backward()
    total = torch.stack([p.grad.abs().sum() for p in learner.parameters() if p.grad is not None])
    both = [torch.empty_like(total) for _ in range(2)]
    distributed.all_gather(both, total)
    distributed.destroy_process_group()
    if not (torch.equal(*both) and bool(torch.isfinite(total).all())):
        raise RuntimeError("the gradients of two processes differ after they were averaged")


def time_step(name: str, precision: str) -> Finding:
    """Times steps of R-50 with four images of 800 × 1333, for comparison with performance.md."""
    float32, half, _ = _PRECISIONS[precision]
    set_float32_precision(float32, "cuda")
    cfg = compose(["70_10"], ["MODEL.DETR.NUM_CLASSES", "80", "MODEL.WEIGHTS", "", *_amp(half)])
    learner = Learner(build_model(cfg).train(), seen=range(80)).to("cuda")
    trainer = _trainer(learner, cfg, _random_batch(4, 800, 1333, 80))
    torch.cuda.reset_peak_memory_stats()
    try:
        seconds = _seconds_per_step(trainer, "cuda", first=3, last=8)
    except torch.cuda.OutOfMemoryError:
        fix = "docs/performance.md has the settings that fit"
        return Finding(name, "warn", "four images of 800 × 1333 do not fit this GPU", fix)
    peak = torch.cuda.max_memory_allocated() / _GIB
    text = f"{1000 * seconds:.0f} ms per step of 4 images of 800 × 1333, peak {peak:.1f} GiB"
    return Finding(name, "ok", text)


def _guard(check: Callable[..., Finding], name: str, *given: Any) -> Finding:
    """Makes a finding of what CUDA raises in a check."""
    try:
        return check(name, *given)
    except (RuntimeError, AssertionError) as error:
        text = str(error).strip().splitlines()[0]
        fix = _REPORT
        if "no kernel image" in text:
            devices = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
            wanted = ";".join(sorted({_join(capability, ".") for capability in devices}))
            fix = f"TORCH_CUDA_ARCH_LIST='{wanted}' cldetr build --cuda on --force"
        elif "out of memory" in text:
            fix = "end other processes on this GPU (`nvidia-smi` lists them)"
        return Finding(name, "fail", text, fix)


def _small_learner(device: str, half: str = "") -> tuple[Learner, Any]:
    overrides = ["MODEL.DETR.NUM_CLASSES", "10", "MODEL.DETR.DROPOUT", "0.0", "LOG_PERIOD", "1000"]
    cfg = compose(["shapes"], [*overrides, "MODEL.DEVICE", "cpu", *_amp(half)])
    torch.manual_seed(0)
    detector = build_model(cfg).train()  # on the CPU, so that all start from the same weights
    return Learner(detector, seen=range(10)).to(device).train(), cfg


def _small_trainer(device: str, half: str) -> StageTrainer:
    learner, cfg = _small_learner(device, half)
    return _trainer(learner, cfg, _random_batch(2, 64, 96, 10))


def _trainer(learner: Learner, cfg: Any, batch: list[dict[str, Any]]) -> StageTrainer:
    cfg.SOLVER.MAX_ITER = 100
    trainer = StageTrainer(
        learner,
        itertools.repeat(batch),
        build_optimizer(cfg, learner.detector),
        cfg,
        offset=0,
        seed=(0,),
        after_backward=lambda: None,
    )
    trainer.iter = trainer.start_iter = 0
    trainer.storage = EventStorage().__enter__()
    return trainer


def _amp(half: str) -> list[str]:
    return ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", half] if half else []


@torch.no_grad()
def _loss(learner: Learner, batch: list[dict[str, Any]]) -> float:
    return float(sum(learner(batch).values()))


def _random_batch(
    images: int, height: int, width: int, classes: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Random images with five objects each."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for _ in range(images):
        low = torch.rand(5, 2, generator=generator) * 0.5
        boxes = torch.cat([low, low + 0.1 + torch.rand(5, 2, generator=generator) * 0.4], dim=1)
        instances = Instances((height, width))
        instances.gt_boxes = Boxes(boxes * torch.tensor([width, height, width, height]))
        instances.gt_classes = torch.randint(0, classes, (5,), generator=generator)
        shape = (3, height, width)
        image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        batch.append({"image": image, "instances": instances, "file_name": "random"})
    return batch


def _attention_inputs(kind: torch.dtype) -> list[Tensor]:
    """Random inputs of the operator, of which some locations lie outside the levels."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[25, 34], [13, 17], [7, 9], [4, 5]])
    points = kind if kind in (torch.float32, torch.float64) else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    value = (random(2, int(sizes.prod(1).sum()), 8, 32) - 0.5).to(kind)
    locations = (random(2, 300, 8, 4, 4, 2) * 1.4 - 0.2).to(points)
    return [value, sizes, locations, random(2, 300, 8, 4, 4).to(points)]


def _with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Output and gradients of the operator."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    output = function(*leaves)
    output.float().square().sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _seconds_per_step(trainer: StageTrainer, device: str, first: int, last: int) -> float:
    """Takes `last` steps; returns the time of one, without those before `first`, which are slow."""
    for trainer.iter in range(last):
        if trainer.iter == first:
            _wait(device)
            start = time.perf_counter()
        trainer.run_step()
    _wait(device)
    return (time.perf_counter() - start) / (last - first)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _devices() -> str:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{len(names)} of CUDA {torch.version.cuda}: {', '.join(names)}"


def _driver() -> str:
    """The driver's version; empty where none is loaded."""
    if not DRIVER.is_file():
        return ""
    found = re.search(r"(\d{3,}\.\d+(?:\.\d+)?)", DRIVER.read_text(errors="replace"))
    return found[1] if found else ""


def _join(capability: tuple[int, int], separator: str = "") -> str:
    return separator.join(map(str, capability))
