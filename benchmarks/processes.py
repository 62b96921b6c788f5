"""Two processes against one: a training step of the same global batch, on the CPU.

    python benchmarks/processes.py

Trains the first phase of configs/shapes.yaml for a few steps, loading included, by one process and
by two that average their gradients, in turn. `cpu` compares CPU time per step of one process with
that of the busier of two: what two free cores would give, whatever else the machine does meanwhile;
time spent waiting for the other process is not in it. `wall` is what happened, and says little
where the cores are not free. The last line is JSON.
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
from pathlib import Path
from typing import Any

from measure import versions  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[1]
WARM = 5  # steps


def train(folder: str, steps: int, batch: int) -> None:
    """One process of a run: prints the time of its steps, then leaves."""
    from cldetr.engine.main import main as train_net
    from cldetr.engine.trainer import StageTrainer

    run_step = StageTrainer.run_step
    moments: list[tuple[float, float]] = []

    def timed_step(trainer: StageTrainer) -> None:
        moments.append((time.process_time(), time.perf_counter()))
        if len(moments) > WARM + steps:
            first, last = moments[WARM], moments[-1]
            cpu, wall = ((b - a) / steps for a, b in zip(first, last, strict=True))
            print(json.dumps({"cpu": cpu, "wall": wall}), flush=True)
            os._exit(0)
        run_step(trainer)

    patched: Any = StageTrainer
    patched.run_step = timed_step
    words = ["--config-file", str(ROOT / "configs" / "shapes.yaml"), "OUTPUT_DIR", folder]
    sys.exit(train_net([*words, "SOLVER.IMS_PER_BATCH", str(batch)]))


def measure(processes: int, args: argparse.Namespace) -> dict[str, float]:
    """Seconds per step of a run by so many processes, of the slowest of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", f"{folder}/run"]
        command += [f"--steps={args.steps}", f"--batch={args.batch}"]
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
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.folder:
        train(args.folder, args.steps, args.batch)
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
