"""Processes that die, hang, are slow, disagree or see another disk; a parent that is killed.

Real command lines: `train_net.py --num-gpus 2 --timeout …` in a session of its own. Whatever
happens to one process, all of them must be gone within the timeout and a margin, no stage may be
finished by those that are left, and the run must go on with `--resume`. Processes that are only
slow, or whose file system shows them older files, must end as undisturbed ones do, because rank 0
decides for all.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cldetr.train
from cldetr.engine import trainer
from cldetr.engine.ledger import Ledger
from cldetr.engine.rundata import RunData
from cldetr.evaluation.evaluator import IncrementalEvaluator
from faults import tiny, user_project
from faults.tally import Options, Tally

ROOT = Path(__file__).parents[1]
TIMEOUT = 15.0  # seconds that a process waits for another
MARGIN = 60.0  # torch gives processes half a minute to end by themselves


def run(options: Options) -> Tally:
    """Tries late, slow, differing and dying processes, then each fate once."""
    tally = Tally("processes")
    data = tiny.TinyData(options.work)
    work = options.folder("runs")
    short = options.size == "short"
    _late(tally, data, work / "late")
    _slow(tally, data, work / "slow")
    _late_view(tally, data, work / "view")
    _disagreement(tally, data, work / "other")
    for world in (2,) if short else (2, 4):
        _deaths(tally, data, work / f"deaths{world}", world, options)
    if not short:
        _fates(tally, data, work, options)
    return tally


def _fates(tally: Tally, data: tiny.TinyData, work: Path, options: Options) -> None:
    """Kills, stops or interrupts a process, or the one that started them."""
    slowest = 0.0
    for name, fate in FATES.items():
        if options.out_of_time:
            break
        folder = work / name.replace(" ", "_")
        process = _start(data, folder, work / f"{folder.name}.txt", background="&" in name)
        ready = _wait(folder / "phase1/train/checkpoints/step_00000002", process)
        if not ready:
            tally.check("fates", False, f"{name}: did not start: {_said(work, folder)}")
            _end(process)
            continue
        fate(process)
        begun = time.monotonic()
        while _members(process) and time.monotonic() - begun < TIMEOUT + MARGIN:
            time.sleep(0.1)
        took, left = time.monotonic() - begun, _members(process)
        slowest = max(slowest, took)
        tally.check(
            "fates: all processes gone in time, no orphan",
            not left,
            f"{name}: {len(left)} left after {took:.0f} s: {_said(work, folder)}",
        )
        _end(process)
        again = tiny.start(data.command(folder), work / f"{folder.name}_again.txt")
        tally.check("fates: the run goes on", again.wait() == 0, f"{name}: {again.said()[-500:]}")
    if slowest:
        tally.note(f"the slowest end took {slowest:.0f} s with a timeout of {TIMEOUT:.0f} s")


def _run(
    data: tiny.TinyData,
    folder: Path,
    *more: str,
    world: int = 2,
    before: Callable[[int], None] | None = None,
    views: Sequence[str] = (),
) -> str:
    """Runs processes to the end; says what went wrong.

    Args:
        data: what to train on.
        folder: the run is in `run` in it.
        more: overrides.
        world: how many processes.
        before: run in each of them first with its rank.
        views: names of the run's folder as each rank sees it, where they differ.
    """
    names = views or ["run"] * world
    resume = (folder / "run/identity.json").exists()
    children = tiny.start_ranks(
        lambda rank: data.command(folder / names[rank], *more, resume=resume),
        folder,
        world,
        before,
        timeout=TIMEOUT,
    )
    try:
        statuses = tiny.finish(children, 2 * TIMEOUT + MARGIN)
    except TimeoutError as error:
        return f"hangs: {error}"
    return "" if not any(statuses) else f"{statuses}: {children[0].said()[-600:]}"


def _deaths(tally: Tally, data: tiny.TinyData, work: Path, world: int, options: Options) -> None:
    """Kills a process in each stage, another one each time."""
    wrong = _run(data, work / "plain", world=world)
    tally.check(f"{world} processes end well", not wrong, wrong)
    expected = tiny.artefacts(work / "plain/run")
    stages = tiny.STAGES[3:5] if options.size == "short" else tiny.STAGES
    for number, stage in enumerate(stages):
        if options.out_of_time:
            return
        folder, rank = work / stage.replace("/", "_"), number % world
        wrong = _run(data, folder, world=world, before=_die(rank, stage))
        # Rank 0 chooses exemplars alone: it may be done before it misses the other.
        finished = stage in tiny.finished_stages(folder / "run") and "select" not in stage
        tally.check(
            f"deaths among {world} processes: all end in time, the stage is not finished",
            bool(wrong) and not wrong.startswith("hangs") and not finished,
            f"rank {rank} in {stage}: {wrong or 'went on'}",
        )
        wrong = _run(data, folder, world=world) or tiny.difference(folder / "run", expected)
        tally.check(
            f"deaths among {world} processes: resumed, bit-identical",
            not wrong,
            f"rank {rank} in {stage}: {wrong}",
        )


def _die(victim: int, stage: str) -> Callable[[int], None]:
    """Makes one process kill itself in the middle of a stage."""
    phase, name = int(stage[5]), stage.partition("/")[2]

    def before(rank: int) -> None:
        if rank == victim:
            run_step, test = trainer.IncrementalTrainer.run_step, trainer.run_evaluator
            features, evaluations = RunData.object_features, itertools.count(1)

            def step_or_die(self: Any) -> None:
                if (self.phase, self.stage, self.step) == (phase, name, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                run_step(self)

            def features_or_die(self: RunData, index: int, *inputs: Any) -> Any:
                if (index, name) == (phase, "select"):
                    os.kill(os.getpid(), signal.SIGKILL)
                return features(self, index, *inputs)

            def test_or_die(*inputs: Any) -> Any:
                if (next(evaluations), name) == (phase, "evaluate"):
                    os.kill(os.getpid(), signal.SIGKILL)
                return test(*inputs)

            trainer.IncrementalTrainer.run_step = step_or_die  # type: ignore[method-assign]
            RunData.object_features = features_or_die  # type: ignore[method-assign, assignment]
            trainer.run_evaluator = test_or_die  # type: ignore[assignment]

    return before


def _slow(tally: Tally, data: tiny.TinyData, work: Path) -> None:
    """Lets rank 0 take longer than the timeout where it works alone."""

    def before(rank: int) -> None:
        for owner, name in ((RunData, "select_exemplars"), (IncrementalEvaluator, "_score")):
            usual, calls = getattr(owner, name), itertools.count()

            def slowly(*inputs: Any, usual: Any = usual, calls: Any = calls, **more: Any) -> Any:
                if next(calls) == 0:
                    time.sleep(TIMEOUT + 5)
                return usual(*inputs, **more)

            setattr(owner, name, slowly)

    wrong = _run(data, work, before=before)
    tally.check(
        "rank 0 slower than the timeout in select and evaluate: waited for", not wrong, wrong
    )


def _late_view(tally: Tally, data: tiny.TinyData, work: Path) -> None:
    """Shows rank 1 every file some seconds late; kills the run in its last stage and resumes it."""
    folder, more = (
        work / "late",
        ("METHOD.PSEUDO.CACHE", "True", "METHOD.MEMORY.STRATEGY", "herding"),
    )
    wrong = _run(data, work / "plain", *more)
    tally.check("two processes end well", not wrong, wrong)
    last = folder / "run/phase2/calibrate/checkpoints" / f"step_{2 * tiny.PERIOD:08d}"
    with tiny.LateCopy(folder / "run", folder / "view"):
        children = tiny.start_ranks(
            lambda rank: data.command(folder / ("run", "view")[rank], *more, resume=False),
            folder,
            2,
            timeout=TIMEOUT,
        )
        tiny.kill_at(children, last)
        hit = last.exists()
        wrong = _run(data, folder, *more, views=("run", "view"))
    wrong = wrong or tiny.difference(folder / "run", tiny.artefacts(work / "plain/run"))
    tally.check(
        "a process that sees all files late: killed, resumed, bit-identical",
        hit and not wrong,
        wrong,
    )


def _disagreement(tally: Tally, data: tiny.TinyData, work: Path) -> None:
    """Gives the second process other settings, or other data."""
    other = tiny.TinyData(work, seed=4)
    for name, second in (
        ("settings", data.command(work / "settings/run", "SOLVER.BASE_LR", "0.5", resume=False)),
        ("data", other.command(work / "data/run", resume=False)),
    ):
        first = data.command(work / name / "run", resume=False)
        words = (first, second)
        children = tiny.start_ranks(lambda rank: words[rank], work / name, 2, timeout=TIMEOUT)  # noqa: B023
        statuses = tiny.finish(children, 2 * TIMEOUT + MARGIN)
        told = "the processes have different" in children[0].said()
        begun = (work / name / "run/identity.json").exists()
        tally.check(
            "processes with different settings or data: refused before anything is written",
            statuses == [2, 2] and told and not begun,
            f"{name}: {statuses}: {children[0].said()[-600:]}",
        )


def _late(tally: Tally, data: tiny.TinyData, work: Path) -> None:
    """Delays a process around each decision of a run, or shows it an older directory."""

    def run_two(name: str, *more: str, before: Callable[[int], None] | None = None) -> str:
        return _run(data, work / name, *more, before=before)

    wrong = run_two("plain")
    tally.check("two processes end well", not wrong, wrong)
    plain = work / "plain/run"
    given = ("MODEL.DETECTOR", str(plain / "phase1/train/model.pth"))
    wrong = run_two("given", *given)
    tally.check("two processes end well", not wrong, wrong)
    for rank, function in itertools.product((0, 1), DELAYED):
        name = f"{function}{rank}"
        wrong = run_two(name, *given, before=_delay(rank, function))
        wrong = wrong or tiny.difference(work / name / "run", tiny.artefacts(work / "given/run"))
        tally.check(
            "late processes at the adoption of a detector: nobody hangs, bit-identical",
            not wrong,
            f"rank {rank} late at {function}: {wrong}",
        )
    for name, blind in BLIND.items():
        children = tiny.start_ranks(
            data.command(work / name / "run"), work / name, 2, timeout=TIMEOUT
        )
        last = work / name / "run/phase2/calibrate/checkpoints" / f"step_{2 * tiny.PERIOD:08d}"
        tiny.kill_at(children, last)
        hit = last.exists()
        wrong = run_two(name, before=lambda rank: blind() if rank else None)  # noqa: B023
        wrong = wrong or tiny.difference(work / name / "run", tiny.artefacts(plain))
        tally.check(
            "processes that see older files than rank 0: resumed, bit-identical",
            hit and not wrong,
            f"{name}: {wrong}",
        )
    for rank in (0, 1):
        name = f"fails{rank}"
        wrong = run_two(name, before=lambda each: _fail() if each == rank else None)  # noqa: B023
        said = (work / name / f"rank{rank}.txt").read_text(encoding="utf-8")
        told = "Hook.after_step" in said or rank  # rank 0 alone writes to the console
        tally.check(
            "hooks that fail on one process: all processes end in time",
            bool(wrong) and not wrong.startswith("hangs") and bool(told) and "KeyError" in said,
            f"rank {rank}: {wrong}",
        )
        wrong = run_two(name) or tiny.difference(work / name / "run", tiny.artefacts(plain))
        tally.check(
            "hooks that fail on one process: fixed and resumed, bit-identical",
            not wrong,
            f"rank {rank}: {wrong}",
        )


def _fail() -> None:
    """Gives a process the user's trainer with a hook that fails in its last training stage."""
    user_project.Trainer.fault = "Hook.after_step"
    cldetr.train.Trainer = user_project.Trainer  # type: ignore[misc]


DELAYED = ("_finished", "load_trained_detector", "_save", "_load")


def _delay(late: int, function: str) -> Callable[[int], None]:
    """Makes one process wait for three seconds before it first calls a function of the trainer."""

    def before(rank: int) -> None:
        owner: Any = trainer if hasattr(trainer, function) else trainer.IncrementalTrainer
        usual, calls = getattr(owner, function), itertools.count()

        def slowly(*inputs: Any, **more: Any) -> Any:
            if rank == late and next(calls) == 0:
                time.sleep(3)
            return usual(*inputs, **more)

        setattr(owner, function, slowly)

    return before


def _sees_older_checkpoint() -> None:
    usual = trainer.latest_checkpoint

    def older(folder: Path) -> Any:
        found = usual(folder)
        return found and trainer.load_checkpoint(folder / f"step_{found.step - tiny.PERIOD:08d}")

    trainer.latest_checkpoint = older


def _sees_no_checkpoint() -> None:
    trainer.latest_checkpoint = lambda folder: None


def _sees_no_finished_stage() -> None:
    Ledger.finished = lambda *_, **__: None  # type: ignore[method-assign]


BLIND = {
    "older_checkpoint": _sees_older_checkpoint,
    "no_checkpoint": _sees_no_checkpoint,
    "no_finished_stage": _sees_no_finished_stage,
}


def _start(
    data: tiny.TinyData, folder: Path, log: Path, background: bool
) -> subprocess.Popen[bytes]:
    words = data.command(folder)
    command = [sys.executable, str(ROOT / "train_net.py"), "--num-gpus", "2"]
    command += ["--timeout", str(TIMEOUT / 60), *words]

    def ignore_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what a shell does for `command &`

    with open(log, "wb") as stream:
        return subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ignore_interrupts if background else None,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def _wait(path: Path, process: subprocess.Popen[bytes], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None and not path.exists():
        time.sleep(0.002)
    return path.exists()


def _members(process: subprocess.Popen[bytes]) -> list[int]:
    """Processes of the command's session that are still there."""
    process.poll()
    return tiny.members(process.pid)


def _ranks(process: subprocess.Popen[bytes]) -> list[int]:
    """The training processes: children of the command that run `spawn_main`, in order."""
    found = []
    for pid in sorted(_members(process)):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        if "spawn_main" in words:
            found.append(pid)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    for pid in _members(process):
        os.kill(pid, signal.SIGKILL)
    process.wait(30)


def _said(work: Path, folder: Path) -> str:
    return (work / f"{folder.name}.txt").read_text(encoding="utf-8", errors="replace")[-600:]


def _to_rank(number: int, signum: int) -> Callable[[subprocess.Popen[bytes]], None]:
    return lambda process: os.kill(_ranks(process)[number], signum)


def _to_parent(signum: int) -> Callable[[subprocess.Popen[bytes]], None]:
    return lambda process: os.kill(process.pid, signum)


FATES: dict[str, Callable[[subprocess.Popen[bytes]], None]] = {
    "first process killed": _to_rank(0, signal.SIGKILL),
    "second process killed": _to_rank(1, signal.SIGKILL),
    "first process hangs": _to_rank(0, signal.SIGSTOP),
    "second process hangs": _to_rank(1, signal.SIGSTOP),
    "parent killed": _to_parent(signal.SIGKILL),
    "parent killed, started with &": _to_parent(signal.SIGKILL),
    "parent asked to stop": _to_parent(signal.SIGTERM),
    "Ctrl-C": lambda process: os.killpg(process.pid, signal.SIGINT),
}
