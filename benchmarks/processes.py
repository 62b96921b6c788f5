"""Two processes against one: a training step of the same global batch, on the CPU.

    python benchmarks/processes.py                  # the small detector, 64 images of 80 × 80
    python benchmarks/processes.py --model r50      # R-50, 2 images of 256 × 256

Trains the first phase on the embedded data set for a few steps, loading included, by one process
and by two that average their gradients, in turn; medians over the steps. `cpu` compares CPU time
per step of one process with that of the busier of two: what two free cores would give, whatever
else the machine does meanwhile; time spent waiting for the other process is not in it. `wall` is
what happened, and says little where the cores are not free. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import versions  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
SMALL = ["--config-file", str(CONFIGS / "shapes.yaml")]
R50 = ["--config-file", str(CONFIGS / "detector" / "deformable_detr_r50.yaml"), "MODEL.WEIGHTS", ""]
R50 += ["INPUT.MIN_SIZE_TRAIN", "[256]", "INPUT.CROP.PROBABILITY", "0.0"]
for split, folder in (("TRAIN", "train"), ("TEST", "val")):
    files = f"datasets/shapes/annotations/instances_{folder}.json:datasets/shapes/images/{folder}"
    R50 += [f"DATASETS.{split}", f"['{files}']"]
R50 += ["SCENARIO.NAME", "7+3", "SCENARIO.ORDER", "id", "DATALOADER.NUM_WORKERS", "0"]
# Nothing but steps: no log, no pictures, no checkpoint.
STEPS_ALONE = ["LOG_PERIOD", "1000", "LOG_IMAGES", "0", "SOLVER.CHECKPOINT_PERIOD", "1000"]
MODELS = {"small": (SMALL, 64, 40), "r50": (R50, 2, 8)}  # config, images, steps
WARM = 3  # steps


def train(args: argparse.Namespace) -> None:
    """One process of a run: prints the time of its steps, then leaves."""
    from cldetr.engine.step import StageTrainer
    from cldetr.train import run as train_net

    run_step = StageTrainer.run_step
    moments: list[tuple[float, float]] = []

    def timed_step(trainer: StageTrainer) -> None:
        moments.append((time.process_time(), time.perf_counter()))
        if len(moments) > WARM + args.steps:
            cpu, wall = (
                statistics.median(b - a for a, b in pairwise(clock))
                for clock in zip(*moments[WARM:], strict=True)
            )
            print(json.dumps({"cpu": cpu, "wall": wall}), flush=True)
            os._exit(0)
        run_step(trainer)

    patched: Any = StageTrainer
    patched.run_step = timed_step
    words = ["OUTPUT_DIR", args.folder, "SOLVER.IMS_PER_BATCH", str(args.batch), *STEPS_ALONE]
    sys.exit(train_net([*MODELS[args.model][0], *words]))


def measure(processes: int, args: argparse.Namespace) -> dict[str, float]:
    """Seconds per step of a run by so many processes, of the slowest of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", f"{folder}/run"]
        command += [f"--{key}={getattr(args, key)}" for key in ("model", "steps", "batch")]
        for rank in range(processes):
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            if processes > 1:
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a run failed")
    found: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text in said]
    return {clock: max(one[clock] for one in found) for clock in ("cpu", "wall")}


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--steps", type=int, help="40 for small, 8 for r50")
    parser.add_argument("--batch", type=int, help="images; 64 for small, 2 for r50")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    _, batch, steps = MODELS[args.model]
    args.batch, args.steps = args.batch or batch, args.steps or steps
    os.chdir(ROOT)
    if args.folder:
        train(args)
    make = "from cldetr.data.shapes import ensure_shapes; ensure_shapes('datasets/shapes')"
    subprocess.run([sys.executable, "-c", make], check=True, stdout=subprocess.DEVNULL)
    runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(args.repeat):
        for processes in runs:
            runs[processes].append(measure(processes, args))
    medians = {
        clock: {n: statistics.median(run[clock] for run in found) for n, found in runs.items()}
        for clock in ("cpu", "wall")
    }
    report = {
        "benchmark": "processes",
        "model": args.model,
        "batch": args.batch,
        "seconds_per_step": {
            clock: {str(n): round(value, 4) for n, value in both.items()}
            for clock, both in medians.items()
        },
        "times_faster": {clock: round(both[1] / both[2], 2) for clock, both in medians.items()},
        "load_average": os.getloadavg()[0],
        "steps": args.steps,
        "repeat": args.repeat,
        "versions": versions("detectron2"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
