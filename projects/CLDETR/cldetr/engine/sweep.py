"""Experiments × seeds, each a run in a directory of its own.

A seed stands for the category order, the data order and the training's random numbers at once, as
the paper repeats each experiment. Finished runs are skipped and others resumed, so a sweep can be
stopped and started again at any time. `cldetr.report.sweep_table` sums the runs up.

A run directory belongs to one experiment: its name has the digest of all settings, and before a
result is used the directory's identity.json is compared with what the sweep would run.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode

from cldetr.config import differing, identity, without_defaults
from cldetr.config_files import dump_changes
from cldetr.engine.ledger import read_identity
from cldetr.engine.resolve import FROM_DATA
from cldetr.errors import InputError
from cldetr.evaluation.results import load_results
from cldetr.files import atomic_path, sha256_json
from cldetr.grouping import parse_sizes
from cldetr.published import is_published

logger = logging.getLogger(__name__)

_SEEDS = ("SEED", "SCENARIO.CLASS_SEED", "SCENARIO.DATA_SEED")
_FROM_DATA = "MODEL.DETR.NUM_CLASSES"  # a run sets it by its data
_FIRST_MODEL = Path("phase1/train/model.pth")
# What has no effect on the model after the first phase. Joint training differs from the second
# phase on only: the first sees D_1 in both.
_AFTER_FIRST = (
    "METHOD.",
    "SCHEDULE.TRAIN.",
    "SCHEDULE.CALIBRATE.",
    "TEST.",
    "MODEL.DETECTOR",
)


@dataclass(frozen=True, eq=False)
class Experiment:
    """A config of a sweep under the name that tables and folders use."""

    name: str
    cfg: CfgNode

    @property
    def folder_name(self) -> str:
        """The name and a digest of every setting but the seeds."""
        settings = without_defaults(identity(self.cfg)).items()
        digest = sha256_json({key: value for key, value in settings if key not in _SEEDS})
        return f"{self.name}-{digest[:10]}"


@dataclass(frozen=True, eq=False)
class Job:
    """One run of a sweep.

    Attributes:
        name: of its experiment, with the digest where two of a sweep have the same name.
        seed: of category order, data order and training.
        cfg: the whole configuration of the run.
        gpus: processes of the run, each with a GPU; 0 is one process on the CPU.
        leader: the run whose first phase it takes over, and so waits for.
        script: the copy of train_net.py that it starts; None for the package's own.
    """

    name: str
    seed: int
    cfg: CfgNode
    gpus: int = 0
    leader: Job | None = None
    script: Path | None = None

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.cfg.OUTPUT_DIR)

    @property
    def settings(self) -> str:
        """The digest of all settings but the seeds, as in the folder's name."""
        return self.folder.parent.name.rpartition("-")[2]

    @property
    def first_model(self) -> Path:
        """The detector after the first phase, which other runs may take over."""
        return self.folder / _FIRST_MODEL

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run."""
        return (self.folder / "identity.json").exists()

    @property
    def finished(self) -> bool:
        """Whether the results of this very run are there."""
        return (self.folder / "results.json").exists() and not self.differences()

    def differences(self) -> list[str]:
        """How the run in the folder differs from this one; nothing where there is none yet."""
        if not self.begun:
            stray = (self.folder / "results.json").exists()
            return ["results.json without the identity.json of its run"] if stray else []
        stored = read_identity(self.folder / "identity.json")
        return [
            f"{key}: {old!r} there, {new!r} here"
            for key, old, new in differing(stored, identity(self.cfg))
            if key != _FROM_DATA and new not in (FROM_DATA, [FROM_DATA])
        ]

    def command(self) -> list[str]:
        """The command line that starts or resumes the run; writes the config that it names."""
        config = self.folder.with_name(f"{self.folder.name}.yaml")
        with atomic_path(config) as partial:
            partial.write_text(dump_changes(self.cfg), encoding="utf-8")
        train = [str(self.script)] if self.script else ["-m", "cldetr.train"]
        words = [sys.executable, *train, "--config-file", str(config)]
        if self.gpus:
            words += ["--num-gpus", str(self.gpus)]
        if self.begun:
            words.append("--resume")
        return words

    def run(self, environment: Mapping[str, str] | None = None) -> None:
        """Starts or resumes the run and waits for it; it prints to `console.txt` in its folder."""
        if problems := self.differences():
            raise InputError.listing(f"{self.folder} holds another run; move it away:", problems)
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


def plan(
    experiments: Sequence[Experiment],
    seeds: Sequence[int],
    out: Path,
    *,
    share_first: bool = False,
    gpus: int = 0,
    script: Path | None = None,
) -> list[Job]:
    """Lists the runs, seed by seed.

    Args:
        experiments: what to run; one that is given twice runs once.
        seeds: category and data orders.
        out: where runs go, as `out/<name>-<digest>/seed<n>`.
        share_first: experiments whose first phases are the same by their settings train it once
            per seed. It is taken from a run of `out` that has it already, also of an earlier sweep.
        gpus: of each run.
        script: of each run.
    """
    unique = {experiment.folder_name: experiment for experiment in experiments}
    uses = Counter(experiment.name for experiment in unique.values())
    planned: list[Job] = []
    for seed in seeds:
        jobs = []
        for folder, experiment in unique.items():
            name = experiment.name if uses[experiment.name] == 1 else folder
            job = make_job(name, experiment.cfg, out / folder / f"seed{seed}", seed, gpus)
            jobs.append(replace(job, script=script))
        leaders: dict[str, Job] = {}  # by the digest of the first phase that they train
        shared = {
            job: _with_first_phase(job, leaders, out, share_first)
            for job in sorted(jobs, key=lambda job: not job.begun)  # what has begun leads
        }
        planned += [shared[job] for job in jobs]
    return planned


def make_job(name: str, cfg: CfgNode, folder: Path, seed: int = 0, gpus: int = 0) -> Job:
    """A run of a config with that seed in that folder."""
    cfg = cfg.clone()
    cfg.SEED = cfg.SCENARIO.CLASS_SEED = cfg.SCENARIO.DATA_SEED = seed
    cfg.OUTPUT_DIR = str(folder)
    return Job(name, seed, cfg, gpus)


def first_phase_digest(settings: Mapping[str, Any]) -> str:
    """A digest of all in a run's identity that decides its model after the first phase.

    Of the sizes of a scenario only the first counts, and their sum: 7+3 begins as 7+1x3 does.
    """
    first = {
        key: value
        for key, value in without_defaults(settings).items()
        if key == "METHOD.UNSEEN" or not key.startswith((*_AFTER_FIRST, _FROM_DATA))
    }
    if "METHOD.UNSEEN" not in first:  # masked: the queries of later phases are not trained
        first.pop("MODEL.DETR.QUERY_GROUPS", None)
    name = settings.get("SCENARIO.NAME", "")
    if name and not is_published(name) and first.get("SCENARIO.PROTOCOL") != "loco":
        sizes, _ = parse_sizes(name)
        first["SCENARIO.NAME"] = [sizes[0], sum(sizes)]
    return sha256_json(first)


def run_here(jobs: Sequence[Job], parallel: int) -> None:
    """Does what is not finished on this machine, `parallel` runs at a time.

    With GPUs each run gets its own; on the CPU the cores are shared out. Ends with a list of what
    failed; runs that do not depend on it go on.
    """
    slots: queue.Queue[dict[str, str]] = queue.Queue()
    for index in range(parallel):
        slots.put(_slot(index, parallel, jobs[0].gpus))

    def execute(job: Job) -> None:
        slot = slots.get()
        try:
            job.run(slot)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(parallel) as pool:
        run_with_dependencies(jobs, lambda job: pool.submit(execute, job))


def run_with_dependencies(jobs: Sequence[Job], submit: Callable[[Job], Future[None]]) -> None:
    """Submits every run once its leader is done, waits for all, and lists what failed."""
    pending = {submit(job): job for job in jobs if job.leader is None}
    failures = []
    while pending:
        done, _ = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            leader = pending.pop(future)
            try:
                future.result()
            except InputError as error:
                failures.append(str(error))
            else:
                pending |= {submit(job): job for job in jobs if job.leader is leader}
    if failures:
        raise InputError.listing("some runs failed; start the sweep again to go on:", failures)


def collect(jobs: Sequence[Job]) -> tuple[dict[str, dict[int, dict[str, Any]]], list[str]]:
    """Results of the finished runs; a directory that holds another run gives none.

    Returns:
        the results by experiment and seed, and a line for each directory that is refused.
    """
    results: dict[str, dict[int, dict[str, Any]]] = {}
    refused = []
    for job in jobs:
        if problems := job.differences():
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            refused.append(
                f"{job.name}, seed {job.seed}: {job.folder} holds another run "
                f"({'; '.join(problems[:3])}{more})"
            )
        elif job.finished:
            found = load_results(job.folder / "results.json")
            results.setdefault(job.name, {})[job.seed] = found
    return results, refused


def _with_first_phase(job: Job, leaders: dict[str, Job], out: Path, share_first: bool) -> Job:
    """The run as it gets its first phase: its own, or that of a leader or an earlier run."""
    if job.cfg.MODEL.DETECTOR:
        return job
    key, leader = first_phase_digest(identity(job.cfg)), None
    if job.begun:
        model = _taken_first_phase(job, key)  # it keeps what it began with
    else:
        model = _find_first_phase(out, job.seed, key) if share_first else None
        if model is None and (leader := leaders.get(key)):
            model = leader.first_model
    if model is None:
        if share_first:
            leaders.setdefault(key, job)
        return job
    cfg = job.cfg.clone()
    cfg.MODEL.DETECTOR = str(model)
    return replace(job, cfg=cfg, leader=leader)


def _taken_first_phase(job: Job, key: str) -> Path | None:
    """The model that a run which has begun took over; None where it is not of that first phase."""
    model = Path(read_identity(job.folder / "identity.json").get("MODEL.DETECTOR", ""))
    if model.parts[-3:] != _FIRST_MODEL.parts or len(model.parts) < 5:
        return None
    # Looked up beside this run: the folder of a sweep may have been moved.
    stored = job.folder.parents[1].joinpath(*model.parts[-5:-3], "identity.json")
    if stored.exists() and first_phase_digest(read_identity(stored)) == key:
        return model
    return None


def _find_first_phase(out: Path, seed: int, key: str) -> Path | None:
    """A finished first phase with that digest among the runs of a folder."""
    for stored in sorted(out.glob(f"*/seed{seed}/identity.json")):
        if not (stored.parent / "phase1/train/stage.json").exists():
            continue
        settings = read_identity(stored)
        if not settings.get("MODEL.DETECTOR") and first_phase_digest(settings) == key:
            return stored.parent / _FIRST_MODEL
    return None


def _slot(index: int, parallel: int, gpus: int) -> dict[str, str]:
    """Environment variables of one of several runs at a time."""
    if gpus:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")  # what a batch system has allocated
        devices = given.split(",") if given else list(map(str, range(torch.cuda.device_count())))
        if parallel * gpus > len(devices):
            raise InputError(
                f"{parallel} runs at a time with {gpus} GPUs each need {parallel * gpus}, but "
                f"{len(devices)} are visible here: give fewer GPUs or fewer runs at a time"
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices[index * gpus : (index + 1) * gpus])}
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // parallel, 1))}
