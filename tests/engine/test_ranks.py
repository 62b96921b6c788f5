"""Ranks that agree: a slow or dead rank 0, different files, shares of the work, GPUs of their own.

Processes are forked as `faults.tiny` does it: importing torch takes longer than the tests.
"""

import errno
import importlib
import json
import logging
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_cuda import available, fake_cuda
from faults import tiny

from cldetr.engine import ranks, restore
from cldetr.engine.launch import Rank, check_gpus, rank_from_environment
from cldetr.engine.ledger import Ledger
from cldetr.engine.sweep import _slot
from cldetr.errors import InputError

from .conftest import start

launch = importlib.import_module("cldetr.engine.launch")  # the package has a function of that name
TIMEOUT = 6.0  # seconds that a process waits for another


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork(folder, work, world=2):
    """Forks processes that call `work(rank)` in one group; returns them."""
    url = f"tcp://127.0.0.1:{free_port()}"
    folder.mkdir()

    def body(rank):
        launch.join(Rank(rank, world, rank, world), url, timedelta(seconds=TIMEOUT))
        work(rank)

    return [
        tiny.Child(lambda rank=rank: body(rank), folder / f"{rank}.txt") for rank in range(world)
    ]


def said(children):
    return [child.said()[-1500:] for child in children]


def test_a_rank_0_that_takes_longer_than_the_timeout_is_waited_for(tmp_path):
    def slow():
        time.sleep(TIMEOUT + 3)
        return 7

    def decide(rank):
        assert ranks.from_rank0(slow) == 7

    def evaluate(rank):
        def work():
            gathered = ranks.comm.gather(rank)
            if rank == 0:
                slow()
            return gathered

        assert ranks.beside_rank0(work) == ([] if rank else [0, 1])

    sets = [fork(tmp_path / name.__name__, name) for name in (decide, evaluate)]
    for children in sets:
        assert tiny.finish(children, 60) == [0, 0], said(children)


def test_a_rank_0_that_dies_is_not_waited_for(tmp_path):
    def work(rank):
        ranks.from_rank0(lambda: os._exit(9))

    begin = time.monotonic()
    children = fork(tmp_path / "dies", work, world=4)
    statuses = tiny.finish(children, 60)
    assert statuses[0] == 9
    assert 0 not in statuses
    assert time.monotonic() - begin < TIMEOUT + 20


def test_an_error_of_rank_0_is_raised_on_all_and_other_values_are_found(tmp_path):
    def work(rank):
        with pytest.raises(InputError, match="no such"):
            ranks.from_rank0(lambda: fail())
        ranks.same_on_all("settings", {"SEED": 1})
        with pytest.raises(InputError, match=r"SEED: [15] on rank \d"):
            ranks.same_on_all("settings", {"SEED": 5 if rank == 1 else 1, "same": 2})
        ranks.from_rank0(lambda: None)  # they are still in step

    def fail():
        raise InputError("no such file")

    children = fork(tmp_path / "errors", work)
    assert tiny.finish(children, 60) == [0, 0], said(children)


def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path):
    def work(rank):
        stop = ranks.StopRequest()
        for step in range(10):
            if rank == 1 and step == 3:
                stop.signum = 15
            if signum := stop.after_step():
                assert (signum, step) == (15, 4)  # asked after step 3, answered after step 4
                return
        raise AssertionError("nobody stopped")

    children = fork(tmp_path / "signal", work)
    assert tiny.finish(children, 60) == [0, 0], said(children)


@pytest.mark.skipif(bool(available()), reason=available() or "available")
def test_asking_for_a_stop_does_not_wait_for_the_gpu(tmp_path, monkeypatch):
    def work(rank):
        with pytest.MonkeyPatch.context() as patch, fake_cuda(patch) as waits:
            weights = torch.ones(3, device="cuda")
            stop = ranks.StopRequest()
            for _ in range(3):
                weights = weights * 2
                assert stop.after_step() == 0
            assert not waits, waits
            assert float(weights.sum()) == 24
            assert sum(waits.values()) == 1  # it does count

    children = fork(tmp_path / "waits", work)
    assert tiny.finish(children, 60) == [0, 0], said(children)


def test_herding_chooses_the_same_exemplars_with_any_number_of_processes(tmp_path):
    data = tiny.TinyData(tmp_path)
    tiny.start(data.command(tmp_path / "first"), tmp_path / "first.txt").wait()
    more = ["METHOD.MEMORY.STRATEGY", "herding"]
    more += ["MODEL.DETECTOR", str(tmp_path / "first/phase1/train/model.pth")]
    chosen = []
    for world in (1, 2):
        run = tmp_path / f"run{world}"
        children = tiny.start_ranks(data.command(run, *more), tmp_path / f"log{world}", world)
        assert tiny.finish(children) == [0] * world, said(children)
        chosen.append((run / "phase1/select/memory.json").read_bytes())
    assert chosen[0] == chosen[1]


def test_a_step_in_parts_has_one_all_reduce_and_the_same_gradient(tmp_path):
    data = tiny.TinyData(tmp_path)
    more = ["MODEL.DETR.DROPOUT", "0.0", "SCHEDULE.FIRST.MAX_STEPS", "1"]
    counted = "parts.txt"

    def count(rank):
        reduced = torch.nn.parallel.DistributedDataParallel.no_sync

        def no_sync(self):
            with open(tmp_path / counted, "a") as file:
                file.write(f"{rank}\n")
            return reduced(self)

        torch.nn.parallel.DistributedDataParallel.no_sync = no_sync

    found = []
    for parts in (1, 2):
        run = tmp_path / str(parts)
        words = data.command(run, *more, "SOLVER.ACCUMULATE", str(parts))
        children = tiny.start_ranks(words, tmp_path / f"log{parts}", 2, count)
        assert tiny.finish(children) == [0, 0], said(children)
        found.append(json.loads((run / "metrics.json").read_text().splitlines()[0]))
    for key in ("total_loss", "loss_bbox", "grad_norm"):
        assert found[1][key] == pytest.approx(found[0][key], rel=1e-4), key
    facts = [json.loads(path.read_text())["facts"] for path in run.glob("phase*/*/stage.json")]
    steps = sum(each.get("steps", 0) for each in facts)
    assert sorted((tmp_path / counted).read_text().split()) == ["0"] * steps + ["1"] * steps


def test_processes_without_an_image_of_their_own(tmp_path):
    data = tiny.TinyData(tmp_path)
    content = json.loads(data.paths.annotations("val").read_text())
    content["images"] = content["images"][:1]  # four processes evaluate one image
    only = content["images"][0]["id"]
    content["annotations"] = [x for x in content["annotations"] if x["image_id"] == only]
    (tmp_path / "one.json").write_text(json.dumps(content))
    test = ["DATASETS.TEST", f"['{tmp_path / 'one.json'}:{data.paths.images('val')}']"]
    more = ["METHOD.MEMORY.STRATEGY", "herding", "METHOD.PSEUDO.CACHE", "True"]
    children = tiny.start_ranks(data.command(tmp_path / "run", *more, *test), tmp_path / "log", 4)
    assert tiny.finish(children) == [0] * 4, said(children)
    assert (tmp_path / "run/results.json").exists()
    children = tiny.start_ranks(data.command(tmp_path / "three", *test), tmp_path / "log3", 3)
    assert tiny.finish(children) == [2] * 3, said(children)
    assert "choose SOLVER.IMS_PER_BATCH as a multiple of 3" in children[0].said()


@pytest.mark.slow
@pytest.mark.parametrize("by_torchrun", [True, False])
def test_two_machines_that_see_files_late(by_torchrun, tiny_shapes, tmp_path):
    port, machines = free_port(), []
    for machine, view in enumerate(("own", "late")):
        launcher, more = [], []
        if by_torchrun:
            launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            launcher += ["--node-rank", str(machine), "--master-addr", "127.0.0.1"]
            launcher += ["--master-port", str(port)]
        else:
            more = ["--num-machines", "2", "--machine-rank", str(machine)]
            more += ["--dist-url", f"tcp://127.0.0.1:{port}"]
        machines.append(start(tmp_path / view, tiny_shapes, *more, launcher=launcher))
    with tiny.LateCopy(tmp_path / "own", tmp_path / "late"):
        statuses = tiny.finish(machines, 250)
    output = [machine.said() for machine in machines]
    assert statuses == [0, 0], output
    assert "after phase 2" in output[0]
    assert "after phase 2" not in output[1]  # rank 1 is on the other machine and stays silent
    [begun] = json.loads((tmp_path / "own/starts.json").read_text())["starts"]
    assert begun["processes"] == 2
    facts = json.loads((tmp_path / "own/phase1/train/stage.json").read_text())["facts"]
    assert facts["steps"] == 27 // 4  # batches of four over both machines


def test_a_rank_follows_from_the_environment():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert rank_from_environment(torchrun, 4) == Rank(5, 8, 1, 4)
    assert rank_from_environment(torchrun, 8) == Rank(5, 8, 1, 4)  # four of eight GPUs
    by_hand = {"RANK": "5", "WORLD_SIZE": "8"}
    assert rank_from_environment(by_hand, 4) == Rank(5, 8, 1, 4)
    assert rank_from_environment(by_hand, 1) == Rank(5, 8, 0, 1)  # a GPU allocated to each task
    assert rank_from_environment(by_hand, 0) == Rank(5, 8, 0, 1)
    # LOCAL_RANK alone is from elsewhere: a notebook's, an outer launcher's.
    assert rank_from_environment({**by_hand, "LOCAL_RANK": "7"}, 4) == Rank(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("changes", "gpus", "message"),
    [
        ({"LOCAL_RANK": "3"}, 4, "contradict"),
        ({"WORLD_SIZE": "6"}, 4, "contradict"),
        ({"RANK": "8"}, 4, "contradict"),
        ({"RANK": "five"}, 4, "which process"),
        ({"RANK": None}, 4, "which process"),
        ({}, 2, "4 processes on a machine with 2 visible GPUs"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(changes, gpus, message):
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **changes}
    with pytest.raises(InputError, match=message):
        rank_from_environment({key: x for key, x in given.items() if x is not None}, gpus)


def test_more_processes_than_gpus_are_refused_but_not_on_a_cpu():
    check_gpus(8, 0)
    check_gpus(8, 8)
    with pytest.raises(InputError, match="--num-gpus 4"):
        check_gpus(8, 4)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_group_is_bound_to_the_device_of_the_process(on_gpu, monkeypatch):
    calls = []
    monkeypatch.setenv("LOCAL_RANK", "6")  # inherited
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set", device)))
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, **named: calls.append((backend, named)),
    )
    for name in ("create_local_process_group", "synchronize"):
        monkeypatch.setattr(launch.comm, name, lambda *given: None)
    monkeypatch.setattr(launch, "control_group", lambda timeout: calls.append(timeout))
    wait = timedelta(seconds=5)
    launch.join(Rank(5, 8, 1, 4), "tcp://host:1", wait)
    device = torch.device("cuda", 1) if on_gpu else None
    named = {"init_method": "tcp://host:1", "rank": 5, "world_size": 8, "timeout": wait}
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    expected = [(backend, {**named, "device_id": device}), wait]
    assert calls == [("set", device), *expected] if on_gpu else expected
    assert os.environ["LOCAL_RANK"] == "1"


def test_a_driver_that_torch_cannot_use_is_an_error(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(restore, "_DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with caplog.at_level(logging.WARNING):
        assert restore.usable_device("cuda") == "cpu"
    assert "no GPU here" in caplog.text
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57\n")
    with pytest.raises(InputError, match=r"470\.57.*MODEL\.DEVICE cpu"):
        restore.usable_device("cuda")
    assert restore.usable_device("cpu") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the GPUs are hidden on purpose
    assert restore.usable_device("cuda") == "cpu"


def test_a_file_system_without_locks_is_no_other_run(monkeypatch, tmp_path, caplog):
    def refuse(number):
        def lockf(*given):
            raise OSError(number, os.strerror(number))

        return SimpleNamespace(lockf=lockf, LOCK_EX=2, LOCK_NB=4)

    ledger = Ledger(tmp_path)
    monkeypatch.setattr("cldetr.engine.ledger.fcntl", refuse(errno.ENOLCK))
    with caplog.at_level(logging.WARNING):
        ledger._lock()
    assert "without locks" in caplog.text
    ledger.close()
    monkeypatch.setattr("cldetr.engine.ledger.fcntl", refuse(errno.EAGAIN))
    with pytest.raises(InputError, match="in use"):
        ledger._lock()


def test_a_sweep_takes_no_gpu_that_was_not_allocated(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,GPU-7")
    assert _slot(2, 3, 1) == {"CUDA_VISIBLE_DEVICES": "GPU-7"}
    with pytest.raises(InputError, match="need 4, but 3 are visible"):
        _slot(0, 2, 2)
