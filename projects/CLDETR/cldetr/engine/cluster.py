"""A sweep on a SLURM cluster, by submitit: one job for each run, requeued until it is finished."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cldetr.engine.sweep import Job, run_with_dependencies
from cldetr.errors import InputError

logger = logging.getLogger(__name__)

_REQUEUES = 100  # of a job whose time was over; the run goes on where it was each time


@dataclass
class ClusterRun:
    """What a cluster job does; submitit calls `checkpoint` when its time is over or it must yield.

    The run directory is the state, so the next try is the same call again.
    """

    job: Job

    def __call__(self) -> None:
        """Starts or resumes the run."""
        self.job.run()

    def checkpoint(self) -> Any:
        """The submission that goes on where this one stops."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def run_on_cluster(
    jobs: Sequence[Job], out: Path, cluster: str, parameters: Mapping[str, Any]
) -> None:
    """Submits what is not finished and waits for it.

    Args:
        jobs: the runs.
        out: where submitit keeps its files, in `out/cluster`.
        cluster: "slurm", or "local" for processes of this machine.
        parameters: of submitit's executor (`timeout_min`, `slurm_partition`, `gpus_per_node`, …).
    """
    try:
        import submitit
    except ImportError as error:
        raise InputError("a cluster needs submitit: pip install submitit") from error
    try:
        executor = submitit.AutoExecutor(
            folder=out / "cluster" / "%j", cluster=cluster, slurm_max_num_timeout=_REQUEUES
        )
        executor.update_parameters(**parameters)
    except (RuntimeError, ValueError, NameError, AssertionError, TypeError) as error:
        raise InputError(f"submitit refuses the cluster {cluster!r}: {error}") from error

    one_at_a_time = threading.Lock()  # submitit's executor is not made for several threads

    def execute(job: Job) -> None:
        if job.finished:
            logger.info("%s is finished", job.folder)
            return
        with one_at_a_time:
            submitted = executor.submit(ClusterRun(job))
        logger.info("%s: job %s", job.folder, submitted.job_id)
        while not submitted.done():
            time.sleep(0.5 if cluster == "local" else 15)
        try:
            submitted.result()
        except submitit.core.utils.UncompletedJobError as error:
            raise InputError(f"{job.folder}: job {submitted.job_id}: {error}") from error
        except submitit.core.utils.FailedJobError as error:
            last = str(error).strip().splitlines()[-1]
            raise InputError(f"{job.folder}: job {submitted.job_id}: {last}") from error

    # A thread for each run, which only waits: the cluster decides how many run at a time.
    with ThreadPoolExecutor(len(jobs)) as pool:
        run_with_dependencies(jobs, lambda job: pool.submit(execute, job))
