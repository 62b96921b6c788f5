"""What a training step costs a GPU, counted without one: R-50, 800 × 1333, 4 images.

    python benchmarks/gpu.py                   # all tables of docs/performance.md, "On a GPU"
    python benchmarks/gpu.py --only launches

`launches` runs a step on tensors that say "cuda" and compute on the CPU (tests/fake_cuda.py), on
small images: it counts operators that start a kernel and places where the host waits. Everything
else runs on tensors without numbers (FakeTensorMode) of the real size: `flops` counts operations
and bytes by part, `time` estimates the step from them under the assumptions below, `memory` follows
what is allocated. No GPU has run any of it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.utils.events import EventStorage
from measure import make_detector, versions  # type: ignore[import-not-found]
from teacher import make_batch  # type: ignore[import-not-found]
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from cldetr.config import default_config
from cldetr.engine.step import StageTrainer, build_optimizer
from cldetr.layers.cpu import fold_norms
from cldetr.methods.learner import Learner, freeze
from cldetr.methods.pseudo import PseudoRule
from cldetr.modeling.levels import extract_levels
from cldetr.modeling.structures import ImageBatch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fake_cuda import available, fake_cuda, no_context  # type: ignore[import-not-found]

CONFIG, CLASSES, OLD = "70_10.yaml", 80, 70
HEIGHT, WIDTH, IMAGES = 800, 1333, 4
GIB = 2**30
# Sizes of a batch that has one size, and of one that has four.
SMALL = {"one size": [(64, 96)] * 4, "four sizes": [(64, 96), (96, 64), (64, 80), (72, 96)]}

# Operators that start no kernel, besides views.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
FREE |= {"lift_fresh", "device", "_reshape_alias", "set_", "resize_"}


@dataclass(frozen=True)
class Gpu:
    """Peak rates from the vendor's data sheet, in 1/s, and the shares of them that are assumed."""

    single: float  # float32 products: in TF32 where the GPU has it
    half: float
    memory: float  # bytes
    cache: float  # bytes of the second-level cache
    efficiency: float = 0.5  # of the peak rate, in products and convolutions
    bandwidth: float = 0.8  # of the peak rate


GPUS = {
    "A100": Gpu(single=156e12, half=312e12, memory=1.555e12, cache=4e12, efficiency=0.4),
    "V100": Gpu(single=15.7e12, half=125e12, memory=0.9e12, cache=2e12),
}
SHORTEST = 3e-6  # seconds of a kernel that has nothing to do
HOST = 8e-6  # seconds in which the host starts one


def name_of(func: Any) -> str:
    """The operator's name without its library."""
    return str(func._schema.name.partition("::")[2])


def is_launch(func: Any, tensors: list[Tensor]) -> bool:
    """Whether an operator starts a kernel on the GPU, as nearly as one can tell from outside."""
    on_gpu = any(tensor.device.type == "cuda" for tensor in tensors)
    return on_gpu and not func.is_view and name_of(func) not in FREE


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size(tensor: Tensor) -> int:
    """Bytes of the numbers that a tensor shows."""
    return tensor.numel() * tensor.element_size()


class Launches(TorchDispatchMode):
    """Counts operators that start a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator."""
        result = func(*args, **(kwargs or {}))
        if is_launch(func, tensors_in((args, kwargs, result))):
            self.names[name_of(func)] += 1
        return result


class Cost(TorchDispatchMode):
    """Adds up operations, bytes and the estimated time of kernels; follows what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.bytes, self.launches = 0, 0, 0
        self.op_bytes, self.op_gathered = 0, 0  # of ms_deform_attn: its tensors; from the cache
        self.seconds = dict.fromkeys(GPUS, 0.0)
        self.alive, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        self.follow(outputs)
        if is_launch(func, inputs + outputs):
            self._add(func, args, kwargs, result, inputs, outputs)
        return result

    def follow(self, tensors: list[Tensor]) -> None:
        """Counts memory that these tensors hold until it is freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, count = storage._cdata, storage.nbytes()
            if tensor.device.type != "cuda" or key in self._known:
                continue
            self._known.add(key)
            self.alive += count
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._free, key, count)

    def _free(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.alive -= count

    def _add(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Any], outputs: list[Any]
    ) -> None:
        name = name_of(func)
        moved = sum(map(size, inputs + outputs))
        gathered = 0
        if name.startswith("ms_deform_attn"):
            flops, gathered = sampling(name, args)
            self.op_bytes += moved
            self.op_gathered += gathered
        else:
            formula = flop_registry.get(func._overloadpacket)
            flops = formula(*args, **kwargs, out_val=result) if formula else 0
        self.launches += 1
        self.flops += flops
        self.bytes += moved
        half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in inputs)
        for key, gpu in GPUS.items():
            rate = (gpu.half if half else gpu.single) * gpu.efficiency
            if gathered:  # by the general-purpose cores
                rate = 0.25 * 15e12
            self.seconds[key] += max(
                flops / rate,
                moved / (gpu.memory * gpu.bandwidth),
                gathered / gpu.cache,
                SHORTEST,
            )


def sampling(name: str, args: Any) -> tuple[int, int]:
    """Operations of `ms_deform_attn` and the bytes that it gathers: four cells for each sample."""
    value, _, _, weights = args[-4:]
    samples = weights.numel() * value.shape[-1]
    if name.endswith("backward"):  # reads the cells and adds to their gradients, in float32
        return 20 * samples, 4 * samples * (value.element_size() + 4)
    return 8 * samples, 4 * samples * value.element_size()


@contextlib.contextmanager
def without_numbers() -> Iterator[None]:
    """Tensors on "cuda" that have a shape and a type and nothing else."""
    with (
        pytest.MonkeyPatch.context() as patch,
        FakeTensorMode(allow_non_fake_inputs=True),
        no_context(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        # Autocast would ask for a GPU.
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        yield


def fake_detector(*overrides: str) -> Any:
    """The detector with weights on "cuda" that have no numbers."""
    with _disable_current_modes():
        model = make_detector(CONFIG, CLASSES, *overrides).train()
    move(model)
    return model


def move(model: Any, layout: torch.memory_format = torch.contiguous_format) -> None:
    """Replaces weights and buffers by ones without numbers; `layout` is that of convolutions."""
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                new = torch.empty(old.shape, dtype=old.dtype, device="cuda")
                new = new.contiguous(memory_format=layout) if old.dim() == 4 else new
                module._parameters[name] = torch.nn.Parameter(new, old.requires_grad)
        for name, old in list(module._buffers.items()):
            if old is not None:
                module._buffers[name] = torch.empty(old.shape, dtype=old.dtype, device="cuda")


def fake_images(count: int = IMAGES, mixed: bool = False) -> ImageBatch:
    """A batch of the largest images; `mixed`: every other one is upright."""
    sizes = [(HEIGHT, WIDTH), (WIDTH, HEIGHT) if mixed else (HEIGHT, WIDTH)] * count
    sizes = sizes[:count]
    height, width = (max(side) for side in zip(*sizes, strict=True))
    return ImageBatch(torch.empty(count, 3, height, width, device="cuda"), sizes)


def autocast(half: bool) -> Any:
    """Mixed precision, or none."""
    return torch.autocast("cuda", dtype=torch.float16, enabled=half)


def total(outputs: list[Tensor]) -> Tensor:
    """A number that depends on all outputs, in the place of a loss."""
    return torch.stack([output.float().sum() for output in outputs]).sum()


def count_launches() -> dict[str, Any]:
    """Kernel launches of the forward passes and of a whole step, and the step's host waits."""
    if available():
        raise SystemExit(f"cannot count launches: {available()}")
    found: dict[str, Any] = {}
    for name, sizes in SMALL.items():
        with pytest.MonkeyPatch.context() as patch, fake_cuda(patch) as waits:
            trainer, batch = make_trainer(sizes)
            with EventStorage() as storage:
                trainer.storage = storage
                trainer.iter = trainer.start_iter = 0
                trainer.run_step()  # the optimizer makes its state
                learner = trainer.learner
                images = learner.detector.preprocess(batch)
                with Launches() as student:
                    learner.detector.predict(images)
                with Launches() as teacher, torch.no_grad():
                    learner.teacher.predict(images)
                before = sum(waits.values())
                with Launches() as step:
                    trainer.run_step()
        forward = sum(student.names.values()) + sum(teacher.names.values())
        found[name] = {
            "student": sum(student.names.values()),
            "teacher": sum(teacher.names.values()),
            "forward": forward,
            "step": sum(step.names.values()),
            "optimizer": sum(n for op, n in step.names.items() if "adam" in op),
            "host_waits": sum(waits.values()) - before,
        }
    print(f"\n{'launches':16}" + "".join(f"{key:>12}" for key in found["one size"]))
    for name, row in found.items():
        print(f"{name:16}" + "".join(f"{value:12,}" for value in row.values()))
    return found


def make_trainer(sizes: list[tuple[int, int]]) -> tuple[Any, list[dict[str, Any]]]:
    """A trainer with a live teacher and one batch, again and again."""
    torch.manual_seed(0)
    detector = make_detector(CONFIG, CLASSES, "MODEL.DEVICE", "cuda")
    learner = Learner(
        detector,
        seen=range(CLASSES),
        teacher=freeze(detector, range(OLD)),
        teacher_classes=range(OLD),
        rule=PseudoRule(foreground=0.0),
    ).train()
    learner.to("cuda")
    batch = [make_batch(1, *size, CLASSES)[0] for size in sizes]
    cfg = default_config()
    cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_ITER, cfg.LOG_PERIOD = 1e-6, 10, 1000
    trainer = StageTrainer(
        learner,
        itertools.repeat(batch),
        build_optimizer(cfg, detector),
        cfg,
        offset=0,
        seed=(0,),
        after_backward=lambda: None,
    )
    return trainer, batch


def count_flops() -> dict[str, Any]:
    """Operations, bytes and launches of each part of the student, forward and backward."""
    found: dict[str, Any] = {}
    with without_numbers():
        model, images = fake_detector(), fake_images()
        transformer = model.transformer
        state: dict[str, Any] = {}

        def backbone() -> list[Tensor]:
            state["features"] = model._features(images.tensor)
            return list(state["features"])

        def projections() -> list[Tensor]:
            features = [x.detach().requires_grad_() for x in state["features"]]
            maps = model._project(features)
            state["levels"] = extract_levels(images, lambda _: maps, model.strides)
            return maps

        def encoder() -> list[Tensor]:
            levels = state["levels"]
            levels.maps = [x.detach().requires_grad_() for x in levels.maps]
            state["encoded"] = transformer.encode(levels)
            return [state["encoded"].tokens]

        def decoder() -> list[Tensor]:
            encoded = state["encoded"]
            encoded.tokens = encoded.tokens.detach().requires_grad_()
            queries = model.query_embed.weight.expand(IMAGES, -1, -1)
            query_pos, states = queries.split(transformer.dim, dim=-1)
            reference = transformer.reference_points(query_pos).sigmoid()
            states = transformer.decode(encoded, states, query_pos, reference, None).states
            return [model.class_embed[0](states), model.bbox_embed[0](states)]

        for part in (backbone, projections, encoder, decoder):
            found[part.__name__] = part_cost(part)
    columns = ("tflop", "gb", "op_gb", "op_cache_gb")
    print(f"\n{'forward, backward':18}" + "".join(f"{column:>16}" for column in columns))
    for name, row in found.items():
        cells = (f"{row['forward'][key]:8.2f}{row['backward'][key]:8.2f}" for key in columns)
        print(f"{name:18}" + "".join(cells))
    return found


def part_cost(part: Callable[[], list[Tensor]]) -> dict[str, dict[str, float]]:
    """The cost of a part and of its backward pass."""
    with Cost() as forward:
        outputs = part()
    loss = total(outputs)
    with Cost() as backward:
        loss.backward()
    return {
        name: {
            "tflop": round(cost.flops / 1e12, 3),
            "gb": round(cost.bytes / 1e9, 1),
            "op_gb": round(cost.op_bytes / 1e9, 1),
            "op_cache_gb": round(cost.op_gathered / 1e9, 1),
        }
        for name, cost in (("forward", forward), ("backward", backward))
    }


def estimate_time() -> dict[str, Any]:
    """Estimated milliseconds of a step, by GPU and precision, without and with a live teacher."""
    found: dict[str, Any] = {}
    columns = ("plain", "with teacher", "host", "TFLOP")
    print(f"\n{'milliseconds':24}" + "".join(f"{column:>14}" for column in columns))
    for precision in ("float32", "half"):
        student, teacher = step_costs(precision == "half")
        for name in GPUS:
            plain = student.seconds[name]
            host = (student.launches + teacher.launches) * HOST
            row = {"plain": plain, "with teacher": plain + teacher.seconds[name], "host": host}
            row = {key: round(1000 * value) for key, value in row.items()}
            row["TFLOP"] = round((student.flops + teacher.flops) / 1e12, 2)
            found[f"{name}, {precision}"] = row
            print(f"{name + ', ' + precision:24}" + "".join(f"{x:>14}" for x in row.values()))
    return found


def step_costs(half: bool) -> tuple[Cost, Cost]:
    """The cost of a step without a teacher, and that of the teacher's forward pass."""
    with without_numbers():
        model, teacher, images = fake_detector(), fake_detector(), fake_images()
        optimizer = build_optimizer(default_config(), model)
        teacher.freeze()
        with Cost() as asked, autocast(half), torch.no_grad():
            teacher.predict(images)
        with Cost() as cost:
            with autocast(half):
                output = model.predict(images)
            total([output.logits, output.boxes]).backward()
            parameters = [p for p in model.parameters() if p.requires_grad]
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
    return cost, asked


def try_variants() -> dict[str, Any]:
    """Launches and bytes of what was tried: folding, channels-last, optimizers, compilation."""
    found: dict[str, Any] = {}
    with without_numbers():
        model, images = fake_detector(), fake_images()
        with Launches() as folding:
            fold_norms(model.backbone)
        found["launches of one fold"] = sum(folding.names.values())
        parameters = [p for p in model.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for name, fused, foreach in (
            ("fused", True, False),
            ("foreach", False, True),
            ("one by one", False, False),
        ):
            optimizer = torch.optim.AdamW(parameters, fused=fused, foreach=foreach)
            optimizer.step()
            with Launches() as launches:
                optimizer.step()
            found[f"launches of AdamW, {name}"] = sum(launches.names.values())
        for name in ("contiguous_format", "channels_last"):
            layout = getattr(torch, name)
            move(model, layout)
            images.tensor = images.tensor.contiguous(memory_format=layout)
            with Cost() as cost, autocast(True):
                output = model.predict(images)
            with cost:
                total([output.logits, output.boxes]).backward()
            found[f"launches of a step, {name}"] = cost.launches
            found[f"GB of a step, {name}"] = round(cost.bytes / 1e9, 1)
    found |= compile_encoder()
    for name, value in found.items():
        print(f"{name:48}{value:>10,}")
    return found


def compile_encoder() -> dict[str, int]:
    """Compiles an encoder layer with its backward for the CPU: kernels, and images sizes later."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    layer = make_detector("shapes.yaml", 10).transformer.encoder.layers[0].train()
    dim, levels = layer.norm1.normalized_shape[0], layer.self_attn.levels

    def step(run: Any, side: int) -> None:
        shapes = torch.tensor([[max(side >> level, 1)] * 2 for level in range(levels)])
        cells = int(shapes.prod(1).sum())
        tokens = torch.randn(1, cells, dim, requires_grad=True)
        reference = torch.rand(1, cells, levels, 2)
        run(tokens, torch.randn(1, cells, dim), reference, shapes, None).sum().backward()

    with CountAll() as eager:
        step(layer, 16)
    metrics.reset()
    counters.clear()
    compiled = torch.compile(layer)
    step(compiled, 16)
    kernels = metrics.generated_kernel_count
    for side in (20, 24, 28):
        step(compiled, side)
    return {
        "operators of an encoder layer with backward": eager.count,
        "its generated kernels, compiled": kernels,
        "its graph breaks": sum(counters["graph_break"].values()),
        "its compilations for four image sizes": counters["stats"]["unique_graphs"],
    }


class CountAll(TorchDispatchMode):
    """Counts operators that compute something, on any device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator."""
        self.count += not func.is_view and name_of(func) not in FREE
        return func(*args, **(kwargs or {}))


SETTINGS = {  # images in a pass, mixed precision, checkpointing
    "float32, 4 images": (4, False, False),
    "float32, 2 images": (2, False, False),
    "float32, 1 image": (1, False, False),
    "half, 4 images": (4, True, False),
    "half, 2 images": (2, True, False),
    "half, 1 image": (1, True, False),
    "half, checkpointing, 4 images": (4, True, True),
    "half, checkpointing, 2 images": (2, True, True),
    "half, checkpointing, 1 image": (1, True, True),
}
CONTEXT = 1.0  # GiB: the CUDA context and the workspaces of cuBLAS and cuDNN
SPARE = 1.1  # what the allocator holds for what is used


def measure_memory() -> dict[str, Any]:
    """Peak memory of a step with a live teacher, by setting."""
    found: dict[str, Any] = {}
    print(f"\n{'peak, GiB':32}{'one size':>10}{'mixed':>8}{'needs':>8}")
    for name, (count, half, checkpointing) in SETTINGS.items():
        peaks = [
            peak_memory(fake_images_of(count, mixed), half, checkpointing)
            for mixed in (False, True)
        ]
        plain, mixed = (peak / GIB for peak in peaks)
        row = {"one_size": plain, "mixed": mixed, "needs": SPARE * max(plain, mixed) + CONTEXT}
        found[name] = {key: round(value, 1) for key, value in row.items()}
        print(f"{name:32}" + "".join(f"{x:>9.1f}" for x in found[name].values()))
    return found


def fake_images_of(count: int, mixed: bool) -> Callable[[], ImageBatch]:
    """A batch, to be made where tensors have no numbers."""
    return lambda: fake_images(count, mixed)


def peak_memory(make_images: Callable[[], ImageBatch], half: bool, checkpointing: bool) -> int:
    """Bytes at the peak of a step: weights, teacher, gradients, optimizer and activations."""
    with without_numbers():
        model = fake_detector("MODEL.DETR.CHECKPOINTING", str(checkpointing))
        teacher = fake_detector()
        teacher.freeze()
        optimizer = build_optimizer(default_config(), model)
        with Cost() as cost:
            for module in (model, teacher):
                cost.follow([*module.parameters(), *module.buffers()])
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # its state stays
            images = make_images()
            with autocast(half):
                with torch.no_grad():
                    output = teacher.predict(images)
                output = model.predict(images)
            total([output.logits, output.boxes]).backward()
        return cost.peak


PARTS = {
    "launches": count_launches,
    "flops": count_flops,
    "time": estimate_time,
    "memory": measure_memory,
    "variants": try_variants,
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "gpu", "images": IMAGES, "size": [HEIGHT, WIDTH]}
    for name in args.only:
        report[name] = PARTS[name]()
    print(json.dumps({**report, "versions": versions("detectron2")}))


if __name__ == "__main__":
    main()
