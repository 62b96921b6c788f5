"""From the command line to the first training step, on the embedded data set.

    python benchmarks/start.py

Starts `train_net.py --config-file configs/shapes.yaml` in a fresh process again and again and stops
it after its first step: imports, configuration, annotation files, the scan of all image files, the
model, one step. The data set is drawn before. Wall-clock time counts; where other processes use the
machine, CPU time is what a free one would take. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import ask_fresh_process, versions  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[1]


def run_one_step(folder: str) -> None:
    """Starts a run in this process and leaves it after its first step."""
    from cldetr.engine.step import StageTrainer
    from cldetr.train import run as train_net

    imported = time.process_time()
    run_step = StageTrainer.run_step

    def only_step(trainer: StageTrainer) -> None:
        begin = time.process_time()
        run_step(trainer)
        spent = time.process_time()
        parts = {"imports": imported, "data_and_model": begin - imported, "step": spent - begin}
        print(json.dumps({"cpu": spent, "ended": time.time(), "parts": parts}), flush=True)
        os._exit(0)

    patched: Any = StageTrainer
    patched.run_step = only_step
    config = str(ROOT / "configs" / "shapes.yaml")
    sys.exit(train_net(["--config-file", config, "OUTPUT_DIR", folder]))


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        run_one_step(args.folder)
    os.chdir(ROOT)
    make = "from cldetr.data.shapes import ensure_shapes; ensure_shapes('datasets/shapes')"
    subprocess.run([sys.executable, "-c", make], check=True, stdout=subprocess.DEVNULL)
    found = []
    for _ in range(args.repeat + 1):  # the first reads the disk
        with tempfile.TemporaryDirectory() as folder:
            begin = time.time()
            found.append(ask_fresh_process(__file__, "--folder", f"{folder}/run"))
            found[-1]["wall"] = found[-1]["ended"] - begin
    found = found[1:]
    report = {
        "benchmark": "start",
        "wall_s": round(statistics.median(run["wall"] for run in found), 2),
        "cpu_s": round(statistics.median(run["cpu"] for run in found), 2),
        "cpu_parts_s": {
            part: round(statistics.median(run["parts"][part] for run in found), 2)
            for part in ("imports", "data_and_model", "step")
        },
        "repeat": args.repeat,
        "versions": versions("detectron2"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
