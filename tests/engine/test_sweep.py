"""Sweeps: what runs, what is shared, skipped and refused, here and as jobs of a cluster."""

import csv
import dataclasses
import json
import pickle
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from cldetr.cli import main
from cldetr.config import identity, load_config
from cldetr.config_files import compose
from cldetr.engine.cluster import run_on_cluster
from cldetr.engine.sweep import (
    Experiment,
    _slot,
    collect,
    first_phase_digest,
    make_job,
    plan,
    run_with_dependencies,
)
from cldetr.errors import InputError
from cldetr.files import sha256_json
from cldetr.methods.pseudo import SELECTIONS

from .conftest import ROOT, TINY, start_script


def experiments(*names):
    return [Experiment(name, compose([name])) for name in names]


def pretend_to_begin(job, first_phase_finished=False, **changes):
    """Writes what a run directory has once its run has begun."""
    content = {**identity(job.cfg), "MODEL.DETR.NUM_CLASSES": 80, **changes}
    job.folder.mkdir(parents=True)
    text = json.dumps({"identity": content, "digest": sha256_json(content)})
    (job.folder / "identity.json").write_text(text)
    if first_phase_finished:
        (job.folder / "phase1/train").mkdir(parents=True)
        (job.folder / "phase1/train/stage.json").write_text("{}")


def test_runs_carry_their_seed_and_share_the_first_phase(tmp_path):
    jobs = plan(experiments("70_10", "70_10_lwf"), [4, 5], tmp_path, share_first=True)
    assert [job.leader for job in jobs] == [None, jobs[0], None, jobs[2]]
    first, second = jobs[:2]
    assert {second.cfg.SEED, second.cfg.SCENARIO.CLASS_SEED, second.cfg.SCENARIO.DATA_SEED} == {4}
    assert str(first.folder / "phase1/train/model.pth") == second.cfg.MODEL.DETECTOR
    assert first.cfg.MODEL.DETECTOR == ""
    words = second.command()
    assert "--resume" not in words
    written = load_config(words[words.index("--config-file") + 1])
    assert identity(written) == identity(second.cfg)
    assert str(second.folder) == written.OUTPUT_DIR
    pretend_to_begin(second)
    assert "--resume" in second.command()


def test_first_phases_that_differ_are_not_shared(tmp_path):
    names = ["70_10", "40_40", "70_10_lwf", "40_40_erd", "70_10_up_detr", "70_10_traditional"]
    jobs = plan(experiments(*names), [0], tmp_path, share_first=True)
    assert [job.name for job in jobs] == names
    assert {job.name: job.leader.name for job in jobs if job.leader} == {
        "70_10_lwf": "70_10",
        "40_40_erd": "40_40",
    }


def test_rows_of_unseen_classes_are_part_of_the_first_phase(tmp_path):
    pair = experiments("shapes", "ablation_released")
    assert not any(job.leader for job in plan(pair, [0], tmp_path, share_first=True))


def test_a_first_phase_of_an_earlier_sweep_is_taken_over(tmp_path):
    """Whichever run of a table led before: the rows that tables share train once."""
    (earlier,) = plan(experiments("70_10_lwf"), [0], tmp_path)
    pretend_to_begin(earlier, first_phase_finished=True)
    trio = experiments("70_10", "70_10_lwf", "40_40")
    jobs = {job.name: job for job in plan(trio, [0], tmp_path, share_first=True)}
    assert str(earlier.first_model) == jobs["70_10"].cfg.MODEL.DETECTOR
    assert jobs["70_10_lwf"].cfg.MODEL.DETECTOR == ""
    assert jobs["40_40"].cfg.MODEL.DETECTOR == ""


def test_results_come_in_the_order_of_the_experiments(tmp_path, monkeypatch):
    """Changes in a table are against the first, whichever run leads or takes a phase over."""
    pair = experiments("70_10", "70_10_lwf")
    (lwf,) = plan(pair[1:], [0], tmp_path)
    pretend_to_begin(lwf, first_phase_finished=True)
    jobs = plan(pair, [0], tmp_path, share_first=True)
    for job in jobs:
        if not job.begun:
            pretend_to_begin(job)
        (job.folder / "results.json").write_text("{}")
    monkeypatch.setattr("cldetr.engine.sweep.load_results", lambda path: {})
    results, _ = collect(jobs)
    assert list(results) == ["70_10", "70_10_lwf"]


def test_a_run_keeps_the_first_phase_that_it_began_with(tmp_path):
    """Also when its folder was copied and when the next sweep shares or does not share."""
    out = tmp_path / "out"
    for job in plan(experiments("70_10", "70_10_lwf"), [0], out, share_first=True):
        pretend_to_begin(job)
    for folder in (out, tmp_path / "copy"):
        if not folder.exists():
            shutil.copytree(out, folder)
            shutil.rmtree(out)
        for share in (False, True):
            for job in plan(experiments("70_10", "70_10_lwf"), [0], folder, share_first=share):
                assert job.differences() == []


def test_runs_that_began_with_their_own_first_phase_keep_it(tmp_path):
    pair = experiments("70_10", "70_10_lwf")
    for job in plan(pair, [0], tmp_path):
        pretend_to_begin(job)
    for job in plan(pair, [0], tmp_path, share_first=True):
        assert job.differences() == []


def test_a_first_phase_of_another_run_is_refused(tmp_path):
    leader, second = plan(experiments("70_10", "70_10_lwf"), [0], tmp_path, share_first=True)
    pretend_to_begin(leader, SEED=9)
    pretend_to_begin(second)
    (job,) = plan(experiments("70_10_lwf"), [0], tmp_path)
    assert job.differences()[0].startswith("MODEL.DETECTOR")


def test_different_experiments_have_different_folders(tmp_path):
    """Whatever their files are called; the seeds alone do not make another experiment."""
    cfg = compose(["70_10"])
    other = compose(["70_10"], ["SCENARIO.PROTOCOL", "traditional"])
    seeded = compose(["70_10"], ["SEED", "7", "OUTPUT_DIR", "elsewhere"])
    names = [Experiment("70_10", each).folder_name for each in (cfg, other, seeded)]
    assert names[0] != names[1]
    assert names[0] == names[2]
    twice = [Experiment("70_10", cfg), Experiment("70_10", cfg.clone())]
    assert len(plan(twice, [0], tmp_path)) == 1
    same_name = plan([Experiment("a", cfg), Experiment("a", other)], [0], tmp_path)
    assert len({job.name for job in same_name}) == 2


def test_a_planted_result_is_not_shown(tmp_path):
    """A strict result in the folder of a traditional run: named with what differs, no number."""
    (job,) = plan(experiments("70_10_traditional"), [0], tmp_path)
    pretend_to_begin(job, **{"SCENARIO.PROTOCOL": "strict"})
    (job.folder / "results.json").write_text("{}")
    results, refused = collect([job])
    assert results == {}
    assert "SCENARIO.PROTOCOL: 'strict' there, 'traditional' here" in refused[0]
    assert not job.finished
    with pytest.raises(InputError, match="holds another run"):
        job.run()
    (job.folder / "identity.json").unlink()
    assert "without the identity.json" in collect([job])[1][0]


def test_the_first_phase_does_not_depend_on_what_comes_later():
    base = compose(["70_10"])
    same = [
        "METHOD.PSEUDO.K",
        "3",
        "SCHEDULE.CALIBRATE.EPOCHS",
        "1",
        "TEST.RESTRICT_IMAGES",
        "True",
    ]
    other = [["SEED", "1"], ["SOLVER.BASE_LR", "1e-3"], ["METHOD.UNSEEN", "negative"]]
    digest = first_phase_digest(identity(base))
    assert first_phase_digest(identity(compose(["70_10"], same))) == digest
    for words in other:
        assert first_phase_digest(identity(compose(["70_10"], words))) != digest


def test_scenarios_that_begin_alike_share_the_first_phase():
    def digest(*words):
        return first_phase_digest(identity(compose(["70_10"], words)))

    for protocol in ("strict", "traditional"):
        words = ("SCENARIO.PROTOCOL", protocol, "SCENARIO.NAME")
        assert digest(*words, "70+10") == digest(*words, "70 + 5×2") == digest(*words, "70+1x10")
        assert digest(*words, "70+10") not in (digest(*words, "40+40"), digest(*words, "70+5"))
    loco = ("SCENARIO.PROTOCOL", "loco", "SCENARIO.NAME")  # images go to any of the phases
    assert digest(*loco, "70+10") != digest(*loco, "70+5x2")


def test_each_run_has_its_gpus(tmp_path, monkeypatch):
    (job,) = plan(experiments("70_10"), [0], tmp_path, gpus=4)
    words = job.command()
    assert words[words.index("--num-gpus") + 1] == "4"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")  # what a cluster allocated
    assert _slot(1, 2, 2) == {"CUDA_VISIBLE_DEVICES": "5,7"}


def test_a_run_gets_all_gpus_unless_told_otherwise(tmp_path, monkeypatch, capsys):
    """The batches of the paper do not fit on one."""
    asked = []

    def note(*args, gpus, **options):
        asked.append(gpus)
        return plan(*args, gpus=gpus, **options)

    monkeypatch.setattr("cldetr.commands.sweep.plan", note)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    words = ["sweep", "70_10", "--seeds", "0", "--out", str(tmp_path), "--table-only"]
    assert main(words) == 0
    assert main([*words, "--gpus-per-run", "2"]) == 0
    assert main([*words, "--cluster", "slurm", "--job", "gpus_per_node=4"]) == 0
    assert asked == [8, 2, 4]


def test_runs_wait_for_their_leader_and_a_failure_stops_only_what_needs_it(tmp_path):
    a, b = (make_job(name, compose(["shapes"]), tmp_path / name) for name in "ab")
    a1, a2, b1 = (
        dataclasses.replace(leader, name=name, leader=leader)
        for name, leader in {"a1": a, "a2": a, "b1": b}.items()
    )
    done = []

    def execute(task):
        if task.name == "b":
            raise InputError("b ended with 1")
        done.append(task.name)

    with ThreadPoolExecutor(2) as pool, pytest.raises(InputError, match="b ended with 1"):
        run_with_dependencies([a1, a, b1, b, a2], lambda task: pool.submit(execute, task))
    assert done[0] == "a"
    assert sorted(done) == ["a", "a1", "a2"]


def test_up_detr_is_refused_without_its_weights(tmp_path, capsys):
    words = ["sweep", "70_10_up_detr", "--seeds", "0", "--out", str(tmp_path)]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "github.com/dddzg/up-detr" in told
    assert "cldetr convert" in told
    assert main([*words, "--weights", "up_detr=x.pth"]) == 2
    told = capsys.readouterr().err
    assert "unknown detector 'up_detr'; choose one of" in told
    assert "up_detr_r50" in told


def test_weights_are_those_of_a_detector(tmp_path, capsys):
    weights = tmp_path / "converted.pth"
    weights.write_bytes(b"")
    words = ["sweep", "--table", "1", "--seeds", "0", "--out", str(tmp_path), "--table-only"]
    assert main([*words, "--weights", f"up_detr_r50={weights}"]) == 0
    assert f"--weights up_detr_r50={weights}" in (tmp_path / "table.md").read_text()
    from cldetr.commands.sweep import _experiment

    found = {
        name: _experiment(name, [], {"up_detr_r50": str(weights)}).cfg.MODEL.WEIGHTS
        for name in ("70_10_up_detr", "70_10")
    }
    assert found["70_10_up_detr"] == str(weights)
    assert found["70_10"].startswith("detectron2://")


def fork_run(command, stdout, stderr, env):
    """Stands for `subprocess.run`: what `python -m cldetr.train` or a script does, in a fork."""
    assert command[0] == sys.executable
    own = command[1:3] == ["-m", "cldetr.train"]
    script, words = (ROOT / "train_net.py", command[3:]) if own else (command[1], command[2:])
    child = start_script(script, words, Path(stdout.name).parent, env=env)
    return SimpleNamespace(returncode=child.wait())


@pytest.fixture
def forked_runs(monkeypatch):
    forking = SimpleNamespace(run=fork_run, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr("cldetr.engine.sweep.subprocess", forking)


def test_a_sweep_runs_skips_what_is_finished_and_writes_its_tables(
    tmp_path, tiny_shapes, capsys, forked_runs
):
    second = tmp_path / "second.yaml"
    second.write_text(
        f"_BASE_: {TINY}\nREPORT: True\nMETHOD: {{NAME: other, CALIBRATE: {{ENABLED: False}}}}\n"
    )
    out = tmp_path / "out"
    words = ["sweep", TINY, str(second), "--seeds", "0", "--share-first", "--out", str(out)]
    assert main([*words, "--set", *tiny_shapes]) == 0
    table = (out / "table.md").read_text()
    assert "| cldetr | 1 |" in re.sub(" +", " ", table)
    assert "| other | 1 |" in re.sub(" +", " ", table)
    (tiny,), (other,) = out.glob("tiny-*/seed0"), out.glob("second-*/seed0")
    stage = json.loads((other / "phase1/train/stage.json").read_text())
    assert stage["facts"]["given"] == str(tiny / "phase1/train/model.pth")
    assert (out / "table.tex").read_text().startswith("\\begin{tabular}")
    lines = list(csv.DictReader((out / "runs.csv").open()))
    assert [(line["config"], line["seed"]) for line in lines] == [("tiny", "0"), ("second", "0")]
    results = json.loads((other / "results.json").read_text())
    assert float(lines[1]["old.AP"]) == results["phases"][1]["old"]["AP"]
    assert float(lines[1]["phase1.AP"]) == results["phases"][0]["all"]["AP"]
    assert "2 methods on 3+1" in (out / "report/index.html").read_text()
    assert (other / "report/index.html").exists()  # drawn by the run itself
    assert not (tiny / "report").exists()
    before = (tiny / "results.json").stat().st_mtime_ns
    assert main([*words, "--set", *tiny_shapes]) == 0
    assert (tiny / "results.json").stat().st_mtime_ns == before


def test_runs_start_the_users_script(tmp_path, tiny_shapes, forked_runs, monkeypatch, capsys):
    rule = "from cldetr.methods.pseudo import SELECTIONS\nSELECTIONS['mine'] = SELECTIONS['all']\n"
    (tmp_path / "my_sweep_rule.py").write_text(rule)
    script = tmp_path / "my_train_net.py"
    trace = "import my_sweep_rule\nprint('my script', flush=True)\n"
    script.write_text(trace + (ROOT / "train_net.py").read_text())
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"_BASE_: {TINY}\nMETHOD: {{NAME: mine, PSEUDO: {{SELECT: mine}}}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # of the forked run, as python has it for a script
    words = ["sweep", TINY, str(mine), "--seeds", "0", "--share-first"]
    words += ["--out", str(tmp_path / "out"), "--script", script.name, "--set", *tiny_shapes]
    assert main(words) == 2  # the sweep itself does not know the rule
    monkeypatch.setattr("cldetr.methods.pseudo.SELECTIONS", dict(SELECTIONS))
    assert main(["--import", "my_sweep_rule", *words]) == 0
    del sys.modules["my_sweep_rule"]
    lines = list(csv.DictReader((tmp_path / "out/runs.csv").open()))
    assert [line["method"] for line in lines] == ["cldetr", "mine"]
    for name in ("tiny", "mine"):  # the second takes its first phase from the first
        printed = [path.read_text() for path in tmp_path.glob(f"out/{name}-*/seed0/console*.txt")]
        assert "my script" in "".join(printed)
    made_by = (tmp_path / "out/table.md").read_text()
    assert "cldetr --import my_sweep_rule sweep" in made_by
    assert "--script my_train_net.py" in made_by
    assert main([*words, "--plan"]) == 2
    assert "plan a run with `python my_train_net.py" in capsys.readouterr().err
    script.unlink()
    assert main(words) == 2
    assert "there is no file my_train_net.py" in capsys.readouterr().err


def test_a_script_may_use_keys_that_the_trainer_does_not(tmp_path, capsys):
    script = tmp_path / "my_train_net.py"
    script.write_text("")
    words = ["sweep", TINY, "--seeds", "0", "--out", str(tmp_path / "out"), "--table-only"]
    words += ["--set", "SOLVER.MOMENTUM", "0.8"]
    assert main(words) == 2
    assert "SOLVER.MOMENTUM is not used" in capsys.readouterr().err
    assert main([*words, "--script", str(script)]) == 0


@pytest.mark.slow
def test_jobs_of_a_cluster_run_and_fail_by_name(tmp_path, tiny_shapes):
    pytest.importorskip("submitit")
    parameters = {"timeout_min": 5}
    good = Experiment("tiny", load_config(TINY, tiny_shapes))
    jobs = plan([good], [0], tmp_path / "good")
    assert identity(pickle.loads(pickle.dumps(jobs[0])).cfg) == identity(jobs[0].cfg)
    run_on_cluster(jobs, tmp_path / "good", "local", parameters)
    assert list(collect(jobs)[0]["tiny"]) == [0]
    wrong = Experiment("tiny", load_config(TINY, [*tiny_shapes, "SCENARIO.NAME", "9+9"]))
    jobs = plan([wrong], [0], tmp_path / "bad")
    with pytest.raises(InputError, match=r"seed0.*job"):
        run_on_cluster(jobs, tmp_path / "bad", "local", parameters)
    with pytest.raises(InputError, match="submitit refuses"):
        run_on_cluster(jobs, tmp_path / "bad", "local", {"slurm_patition": "gpu"})
