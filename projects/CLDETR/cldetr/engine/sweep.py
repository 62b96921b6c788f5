"""Repeated orders: configs × seeds, each a run of its own, summed up as mean ± 95% interval.

A seed stands for the category order, the data order and the training's chance at once, as the paper
repeats each experiment. Runs that are finished are skipped and others resumed, so a sweep can be
stopped and started again at any time.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from cldetr.engine.results import load_results
from cldetr.errors import InputError

logger = logging.getLogger(__name__)

_TRAIN = "import sys; from cldetr.engine.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    config: Path
    seed: int
    folder: Path
    first_phase: Path | None  # whose first phase this run takes over, or None

    @property
    def finished(self) -> bool:
        """Whether its results are there."""
        return (self.folder / "results.json").exists()

    def command(self, overrides: Sequence[str]) -> list[str]:
        """The command line that starts or resumes the run."""
        words = [sys.executable, "-c", _TRAIN, "--config-file", str(self.config)]
        if (self.folder / "recipe.json").exists():
            words.append("--resume")
        seed = str(self.seed)
        words += ["SEED", seed, "SCENARIO.CLASS_SEED", seed, "SCENARIO.DATA_SEED", seed]
        if self.first_phase is not None:
            words += ["MODEL.DETECTOR", str(self.first_phase / "phase1/train/model.pth")]
        return [*words, *overrides, "OUTPUT_DIR", str(self.folder)]


def plan(
    configs: Sequence[Path], seeds: Sequence[int], out: Path, share_first: bool
) -> list[list[Job]]:
    """Lists the runs, seed by seed; the runs of a seed follow one another.

    Args:
        configs: YAML files; their names must differ.
        seeds: category and data orders.
        out: where runs go, as `out/<config>/seed<n>`.
        share_first: all configs take the first phase of the first one, which is then trained once
            per seed; right where they differ from the second phase on only.
    """
    names = [config.stem for config in configs]
    if len(set(names)) < len(names):
        raise InputError(f"configs of a sweep need different names: {', '.join(names)}")
    chains = []
    for seed in seeds:
        leader = out / names[0] / f"seed{seed}"
        chains.append(
            [
                Job(
                    config,
                    seed,
                    out / config.stem / f"seed{seed}",
                    leader if share_first and place > 0 else None,
                )
                for place, config in enumerate(configs)
            ]
        )
    return chains


def run_sweep(chains: Sequence[Sequence[Job]], overrides: Sequence[str], parallel: int) -> None:
    """Does what is not finished, `parallel` seeds at a time; stops with a list of what failed."""
    threads = max((os.cpu_count() or 1) // parallel, 1)
    env = {"OMP_NUM_THREADS": str(threads), **os.environ}

    def follow(chain: Sequence[Job]) -> str | None:
        for job in chain:
            if job.finished:
                logger.info("%s is finished", job.folder)
                continue
            job.folder.mkdir(parents=True, exist_ok=True)
            logger.info("%s: running, see %s", job.folder, job.folder / "console.txt")
            with open(job.folder / "console.txt", "ab") as console:
                done = subprocess.run(
                    job.command(overrides), stdout=console, stderr=subprocess.STDOUT, env=env
                )
            if done.returncode:
                return f"{job.folder} ended with {done.returncode}: see its console.txt"
        return None

    with ThreadPoolExecutor(parallel) as pool:
        failures = [failure for failure in pool.map(follow, chains) if failure]
    if failures:
        raise InputError.listing("some runs failed; start the sweep again to go on:", failures)


def collect(chains: Sequence[Sequence[Job]]) -> dict[str, list[dict[str, Any]]]:
    """Results of the finished runs by config, in the order of the seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for chain in chains:
        for job in chain:
            if job.finished:
                found.setdefault(job.config.stem, []).append(
                    load_results(job.folder / "results.json")
                )
    return found


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the half width of its 95% confidence interval (Student's t); None for one."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    factor = float(stats.t.ppf(0.975, len(values) - 1))
    return mean, factor * spread / math.sqrt(len(values))


COLUMNS: Mapping[str, Any] = {
    "AP": lambda results: results["phases"][-1]["all"]["AP"],
    "AP50": lambda results: results["phases"][-1]["all"]["AP50"],
    "AP75": lambda results: results["phases"][-1]["all"]["AP75"],
    "old AP": lambda results: results["phases"][-1]["old"]["AP"],
    "new AP": lambda results: results["phases"][-1]["new"]["AP"],
    "FPP": lambda results: results["fpp"]["AP"],
}


def markdown(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The table of a sweep: a row for each config, mean ± 95% interval over the seeds."""
    lines = ["| config | runs | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, runs in found.items():
        cells = [_cell([read(results) for results in runs]) for read in COLUMNS.values()]
        lines.append(f"| {name} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "n/a"
    mean, half = mean_interval(known)
    return f"{mean:.1f}" if half is None else f"{mean:.1f} ± {half:.1f}"
