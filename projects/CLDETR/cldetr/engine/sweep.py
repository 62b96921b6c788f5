"""Repeated orders: configs × seeds, each a run of its own directory.

A seed stands for the category order, the data order and the training's chance at once, as the paper
repeats each experiment. Runs that are finished are skipped and others resumed, so a sweep can be
stopped and started again at any time. `cldetr.report.sweep_table` sums the runs up.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cldetr.engine.from_yaml import recipe_from_yaml
from cldetr.engine.recipe import Recipe
from cldetr.engine.results import load_results
from cldetr.errors import InputError
from cldetr.files import sha256_json

logger = logging.getLogger(__name__)

_TRAIN = "import sys; from cldetr.train import main; sys.exit(main())"


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        name: of its config in the sweep.
        config: the YAML file.
        seed: of category order, data order and training.
        folder: the run directory.
        first_phase: the run whose first phase this one takes over, or None.
        overrides: `KEY VALUE` words that all runs of the sweep get.
        gpus: processes of the run, each with a GPU; 0 is one process on the CPU.
    """

    name: str
    config: Path
    seed: int
    folder: Path
    first_phase: Path | None = None
    overrides: tuple[str, ...] = ()
    gpus: int = 0

    @property
    def finished(self) -> bool:
        """Whether its results are there."""
        return (self.folder / "results.json").exists()

    def command(self) -> list[str]:
        """The command line that starts or resumes the run."""
        words = [sys.executable, "-c", _TRAIN, "--config-file", str(self.config)]
        if self.gpus:
            words += ["--num-gpus", str(self.gpus)]
        if (self.folder / "recipe.json").exists():
            words.append("--resume")
        seed = str(self.seed)
        words += ["SEED", seed, "SCENARIO.CLASS_SEED", seed, "SCENARIO.DATA_SEED", seed]
        if self.first_phase is not None:
            words += ["MODEL.DETECTOR", str(self.first_phase / "phase1/train/model.pth")]
        return [*words, *self.overrides, "OUTPUT_DIR", str(self.folder)]

    def run(self, environment: Mapping[str, str] | None = None) -> None:
        """Starts or resumes the run and waits for it; its words go to `console.txt` beside it."""
        if self.finished:
            logger.info("%s is finished", self.folder)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        console = self.folder / "console.txt"
        logger.info("%s: running, see %s", self.folder, console)
        with open(console, "ab") as file:
            done = subprocess.run(
                self.command(),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        if done.returncode:
            raise InputError(f"{self.folder} ended with {done.returncode}: see {console}")


@dataclass(frozen=True)
class Chain:
    """A run and those that take over its first phase and so wait for it."""

    leader: Job
    rest: tuple[Job, ...] = ()

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All of them, the leader first."""
        return (self.leader, *self.rest)


def plan(
    configs: Sequence[Path],
    seeds: Sequence[int],
    out: Path,
    *,
    share_first: bool = False,
    overrides: Sequence[str] = (),
    gpus: int = 0,
) -> list[Chain]:
    """Lists the runs, seed by seed.

    Args:
        configs: YAML files.
        seeds: category and data orders.
        out: where runs go, as `out/<config>/seed<n>`.
        share_first: configs whose first phases are the same by their settings train it once per
            seed, in the run of the first of them.
        overrides: `KEY VALUE` words for all runs.
        gpus: of each run.
    """
    names = config_names(configs)
    recipes = [recipe_from_yaml(str(config), overrides) for config in configs]
    groups: dict[Any, list[int]] = {}
    for place, recipe in enumerate(recipes):
        groups.setdefault(first_phase_identity(recipe) if share_first else place, []).append(place)
    chains = []
    for seed in seeds:
        for places in groups.values():
            jobs = [
                Job(
                    names[place],
                    configs[place],
                    seed,
                    out / names[place] / f"seed{seed}",
                    None if place == places[0] else out / names[places[0]] / f"seed{seed}",
                    tuple(overrides),
                    gpus,
                )
                for place in places
            ]
            chains.append(Chain(jobs[0], tuple(jobs[1:])))
    return chains


def first_phase_identity(recipe: Recipe) -> str:
    """A digest of all that decides the model after the first phase, the seed aside."""
    identity = recipe.identity()
    parts = [identity[name] for name in ("model", "data", "optimizer", "augmentation")]
    scenario = {
        key: value
        for key, value in identity["scenario"].items()
        if key not in ("class_seed", "data_seed")
    }
    method = identity["method"]
    # Joint training differs from the second phase on only: the first sees D_1 in both.
    return sha256_json([parts, scenario, identity["schedule"]["first"], method["unseen"]])


def config_names(configs: Sequence[Path]) -> list[str]:
    """What tables and folders call the configs: their file names, with the folder where needed."""
    names = [config.stem for config in configs]
    if len(set(names)) < len(names):
        names = [f"{config.parent.name}-{config.stem}" for config in configs]
    if len(set(names)) < len(names):
        raise InputError(f"configs of a sweep need different names: {', '.join(names)}")
    return names


def run_here(chains: Sequence[Chain], parallel: int) -> None:
    """Does what is not finished on this machine, `parallel` runs at a time.

    With GPUs each run gets its own; on the CPU the cores are shared out. Ends with a list of what
    failed; runs that do not depend on it go on.
    """
    slots: queue.Queue[dict[str, str]] = queue.Queue()
    for number in range(parallel):
        slots.put(_slot(number, parallel, chains[0].jobs[0].gpus))

    def execute(job: Job) -> None:
        slot = slots.get()
        try:
            job.run(slot)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(parallel) as pool:
        follow(chains, lambda job: pool.submit(execute, job))


def follow(chains: Sequence[Chain], submit: Callable[[Job], Future[None]]) -> None:
    """Submits every run once its leader is done, waits for all, and tells what failed."""
    waiting: dict[Future[None], tuple[Job, ...]] = {}
    for chain in chains:
        waiting[submit(chain.leader)] = chain.rest
    failures = []
    while waiting:
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            rest = waiting.pop(future)
            try:
                future.result()
            except InputError as error:
                failures.append(str(error))
            else:
                waiting |= {submit(job): () for job in rest}
    if failures:
        raise InputError.listing("some runs failed; start the sweep again to go on:", failures)


def collect(chains: Sequence[Chain]) -> dict[str, dict[int, dict[str, Any]]]:
    """Results of the finished runs, by config and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for chain in chains:
        for job in chain.jobs:
            if job.finished:
                results = load_results(job.folder / "results.json")
                found.setdefault(job.name, {})[job.seed] = results
    return found


def _slot(number: int, parallel: int, gpus: int) -> dict[str, str]:
    """Environment variables of one of several runs at a time."""
    if gpus:
        first = number * gpus
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + gpus)))}
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // parallel, 1))}
