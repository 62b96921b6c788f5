"""Sweeps: what runs, what is shared and skipped, here and as jobs of a cluster."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cldetr.cli import main
from cldetr.engine.cluster import run_on_cluster
from cldetr.engine.sweep import Chain, Job, collect, config_names, follow, plan
from cldetr.errors import InputError

from .conftest import TINY

CONFIGS = Path(__file__).parents[2] / "configs"


def test_runs_carry_their_seed_and_share_the_first_phase(tmp_path):
    configs = [CONFIGS / "70_10.yaml", CONFIGS / "methods/lwf.yaml"]
    chains = plan(configs, [4, 5], tmp_path, share_first=True)
    assert len(chains) == 2
    first, (second,) = chains[0].leader, chains[0].rest
    words = second.command()
    assert words[words.index("SCENARIO.CLASS_SEED") + 1] == "4"
    assert words[words.index("MODEL.DETECTOR") + 1] == str(first.folder / "phase1/train/model.pth")
    assert "--resume" not in words
    second.folder.mkdir(parents=True)
    (second.folder / "recipe.json").write_text("{}")
    assert "--resume" in second.command()
    assert "MODEL.DETECTOR" not in first.command()


def test_first_phases_that_differ_are_not_shared(tmp_path):
    names = ["70_10", "40_40", "methods/lwf", "methods_40_40/erd", "up_detr/70_10"]
    configs = [CONFIGS / f"{name}.yaml" for name in names]
    groups = [
        [job.name for job in chain.jobs] for chain in plan(configs, [0], tmp_path, share_first=True)
    ]
    assert groups == [
        ["configs-70_10", "methods-lwf"],
        ["configs-40_40", "methods_40_40-erd"],
        ["up_detr-70_10"],
    ]


def test_rows_of_unseen_classes_are_part_of_the_first_phase(tmp_path):
    configs = [CONFIGS / "ablation/cldetr.yaml", CONFIGS / "ablation/released.yaml"]
    assert len(plan(configs, [0], tmp_path, share_first=True)) == 2


def test_each_run_has_its_gpus(tmp_path):
    (chain,) = plan([CONFIGS / "70_10.yaml"], [0], tmp_path, gpus=4)
    words = chain.leader.command()
    assert words[words.index("--num-gpus") + 1] == "4"


def test_equal_names_get_their_folders_before_them():
    assert config_names([Path("x/a.yaml"), Path("y/a.yaml")]) == ["x-a", "y-a"]
    with pytest.raises(InputError, match="different names"):
        config_names([Path("x/a.yaml"), Path("x/a.yaml")])


def test_runs_wait_for_their_leader_and_a_failure_stops_only_what_needs_it():
    def job(name):
        return Job(name, Path(f"{name}.yaml"), 0, Path(name))

    done = []

    def execute(task):
        if task.name == "b":
            raise InputError("b ended with 1")
        done.append(task.name)

    chains = [Chain(job("a"), (job("a1"), job("a2"))), Chain(job("b"), (job("b1"),))]
    with ThreadPoolExecutor(2) as pool, pytest.raises(InputError, match="b ended with 1"):
        follow(chains, lambda task: pool.submit(execute, task))
    assert done[0] == "a"
    assert sorted(done) == ["a", "a1", "a2"]


def test_a_sweep_runs_skips_what_is_finished_and_writes_its_tables(tmp_path, tiny_shapes, capsys):
    second = tmp_path / "second.yaml"
    second.write_text(
        f"_BASE_: {TINY}\nREPORT: True\nMETHOD: {{NAME: other, CALIBRATE: {{ENABLED: False}}}}\n"
    )
    out = tmp_path / "out"
    words = ["sweep", TINY, str(second), "--seeds", "0", "--share-first", "--out", str(out)]
    assert main([*words, "--set", *tiny_shapes]) == 0
    table = (out / "table.md").read_text()
    assert "| cldetr | 1 |" in table
    assert "| other | 1 |" in table
    stage = json.loads((out / "second/seed0/phase1/train/stage.json").read_text())
    assert stage["facts"]["given"] == str(out / "tiny/seed0/phase1/train/model.pth")
    assert (out / "table.tex").read_text().startswith("\\begin{tabular}")
    assert "2 methods on 3+1" in (out / "report/index.html").read_text()
    assert (out / "second/seed0/report/index.html").exists()  # drawn by the run itself
    assert not (out / "tiny/seed0/report").exists()
    before = (out / "tiny/seed0/results.json").stat().st_mtime_ns
    assert main([*words, "--set", *tiny_shapes]) == 0
    assert (out / "tiny/seed0/results.json").stat().st_mtime_ns == before


def test_jobs_of_a_cluster_run_and_fail_by_name(tmp_path, tiny_shapes):
    pytest.importorskip("submitit")
    parameters = {"timeout_min": 5}
    chains = plan([Path(TINY)], [0], tmp_path / "good", overrides=tiny_shapes)
    run_on_cluster(chains, tmp_path / "good", "local", parameters)
    assert list(collect(chains)["tiny"]) == [0]
    wrong = [*tiny_shapes, "SCENARIO.NAME", "9+9"]
    chains = plan([Path(TINY)], [0], tmp_path / "bad", overrides=wrong)
    with pytest.raises(InputError, match=r"seed0.*job"):
        run_on_cluster(chains, tmp_path / "bad", "local", parameters)
    with pytest.raises(InputError, match="submitit refuses"):
        run_on_cluster(chains, tmp_path / "bad", "local", {"slurm_patition": "gpu"})
