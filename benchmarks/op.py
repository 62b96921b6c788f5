"""The compiled deformable attention against its formulation with grid_sample, on the CPU.

    python benchmarks/op.py                  # one thread, all shapes
    python benchmarks/op.py --shapes decoder --repeat 9 --memory

Both sides run in turn in one process; a time is the median of the repetitions, of CPU time with one
thread (which other processes disturb least) and of wall-clock time with several. "train" is forward
and backward. With --memory, peak memory above what the inputs take, of one process per side. One
JSON line per shape follows the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import cldetr
from cldetr.layers.libraries import load_libraries
from cldetr.layers.ms_deform_attn import ms_deform_attn, ms_deform_attn_reference

SIDES = {"ours": ms_deform_attn, "grid_sample": ms_deform_attn_reference}
PHOTO = ((100, 134), (50, 67), (25, 34), (13, 17))  # 800 × 1066 pixels, strides 8 to 64
THUMBNAIL = ((16, 16), (8, 8), (4, 4), (2, 2))  # 128 × 128 pixels


@dataclass(frozen=True)
class Shape:
    """Sizes of one comparison; without `queries`, every cell is one."""

    images: int
    levels: tuple[tuple[int, int], ...]
    channels: int
    queries: int | None = None
    spread: float | None = None  # of the points around their query, in cells; anywhere without
    heads: int = 8
    points: int = 4


SHAPES = {
    "encoder": Shape(2, PHOTO, 32, spread=3.0),
    "encoder, points anywhere": Shape(2, PHOTO, 32),
    "decoder": Shape(2, PHOTO, 32, queries=300),
    "small, width 64": Shape(8, THUMBNAIL, 8, spread=3.0),
    "small, width 128": Shape(8, THUMBNAIL, 16, spread=3.0),
    "small decoder, width 128": Shape(8, THUMBNAIL, 16, queries=50),
}


def make_inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws value, sizes, locations and weights as a network would give them."""
    torch.manual_seed(0)
    spatial_shapes = torch.tensor(shape.levels)
    cells = int(spatial_shapes.prod(1).sum())
    queries = shape.queries or cells
    per_head = (shape.images, queries, shape.heads, len(shape.levels), shape.points)
    if shape.spread is None:
        locations = torch.rand(*per_head, 2)
    else:
        centres = [
            torch.cartesian_prod((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w).flip(-1)
            for h, w in shape.levels
        ]
        offsets = shape.spread * torch.randn(*per_head, 2) / spatial_shapes.flip(-1)[:, None]
        locations = torch.cat(centres)[:, None, None, None] + offsets
    weights = torch.randn(per_head).flatten(-2).softmax(-1).view(per_head)
    value = torch.randn(shape.images, cells, shape.heads, shape.channels)
    return value, spatial_shapes, locations, weights


def make_runs(side: str, shape: Shape) -> dict[str, Callable[[], object]]:
    """Returns forward alone, and forward with backward, of one side."""
    function = SIDES[side]
    value, spatial_shapes, locations, weights = make_inputs(shape)
    leaves = [tensor.requires_grad_() for tensor in (value, locations, weights)]
    grad = torch.randn(shape.images, locations.shape[1], shape.heads * shape.channels)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(value, spatial_shapes, locations, weights)

    def train() -> tuple[Tensor, ...]:
        output = function(value, spatial_shapes, locations, weights)
        return torch.autograd.grad(output, leaves, grad)

    return {"forward": forward, "train": train}


def compare_speed(shape: Shape, repeat: int, clock: Callable[[], float]) -> dict[str, float]:
    """Returns the median times of both sides, in milliseconds, and how many times ours fits."""
    runs = {side: make_runs(side, shape) for side in SIDES}
    torch.testing.assert_close(*(runs[side]["forward"]() for side in SIDES), rtol=1e-4, atol=1e-4)
    result: dict[str, float] = {}
    for what in ("forward", "train"):
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        # As many runs in a row as take a tenth of a second.
        start = clock()
        runs["ours"][what]()
        row = {"ours": max(1, min(50, int(0.1 / max(clock() - start, 1e-6)))), "grid_sample": 1}
        for _ in range(repeat):
            for side in SIDES:
                start = clock()
                for _ in range(row[side]):
                    runs[side][what]()
                times[side].append(1000 * (clock() - start) / row[side])
        medians = {side: statistics.median(times[side]) for side in SIDES}
        result |= {f"{what}_ms_{side}": medians[side] for side in SIDES}
        result[f"{what}_ratio"] = medians["grid_sample"] / medians["ours"]
    return result


def peak_memory(side: str, name: str) -> float:
    """Returns the peak of forward and backward above the inputs, in MB, of a process of its own."""
    command = [sys.executable, __file__, "--memory-of", side, "--shapes", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def print_peak_memory(side: str, shape: Shape) -> None:
    """Runs one side once in this process; prints its peak."""
    train = make_runs(side, shape)["train"]
    # The peak is set back to what is in use now; getrusage would give the parent's, too.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmHWM")
    result = train()
    del result
    print((_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def main() -> int:
    """Runs the comparisons and prints the table, then JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="compare peak memory, too (Linux)")
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    backend = load_libraries()["cpu"]
    if not backend.loaded:
        print(f"the compiled op is not there: {backend.reason}", file=sys.stderr)
        return 2
    if args.memory_of:
        print_peak_memory(args.memory_of, SHAPES[args.shapes[0]])
        return 0
    facts = {
        "threads": args.threads,
        "repeat": args.repeat,
        "cldetr": cldetr.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    lines = []
    print(f"{'shape':<25}{'forward, ms':>17}{'times':>7}{'train, ms':>17}{'times':>7}", end="")
    print(f"{'memory, MB':>15}{'times':>7}" if args.memory else "")
    for name in args.shapes:
        clock = time.process_time if args.threads == 1 else time.perf_counter
        result = compare_speed(SHAPES[name], args.repeat, clock)
        text = f"{name:<25}"
        for what in ("forward", "train"):
            ours, theirs = result[f"{what}_ms_ours"], result[f"{what}_ms_grid_sample"]
            text += f"{theirs:>8.1f} →{ours:>7.2f}{result[f'{what}_ratio']:>7.1f}"
        if args.memory:
            peaks = {side: peak_memory(side, name) for side in SIDES}
            result |= {f"memory_mb_{side}": peak for side, peak in peaks.items()}
            result["memory_ratio"] = peaks["grid_sample"] / max(peaks["ours"], 0.1)
            text += f"{peaks['grid_sample']:>8.0f} →{peaks['ours']:>5.0f}"
            text += f"{result['memory_ratio']:>7.1f}"
        print(text, flush=True)
        lines.append(json.dumps({"shape": name, **result, **facts}))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
