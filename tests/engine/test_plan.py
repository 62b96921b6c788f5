"""A plan says what a run will do, and finds beforehand what would make it fail."""

import json
import shutil
from collections import namedtuple

from detectron2.data import DatasetCatalog

from cldetr.cli import main
from cldetr.config import identity
from cldetr.engine import IncrementalTrainer
from cldetr.engine.plan import make_plan, sum_text
from cldetr.engine.rundata import RunData
from cldetr.files import sha256_json

from .conftest import TINY, finish, start, train


def plan_of(cfg, **options):
    return make_plan(cfg, IncrementalTrainer.build_model, **options)


def test_a_plan_counts_what_the_run_then_does(tiny_config, tmp_path):
    cfg = tiny_config(tmp_path / "run")
    plan = plan_of(cfg)
    assert (plan.problems, plan.notes) == ([], [])
    assert not (tmp_path / "run").exists()  # nothing is written
    train(cfg)
    done = {}
    for stage in plan.stages:
        record = tmp_path / "run" / f"phase{stage.phase}" / stage.name / "stage.json"
        done[stage.phase, stage.name] = json.loads(record.read_text())["facts"]["steps"]
    assert {(stage.phase, stage.name): stage.steps for stage in plan.stages} == done
    data = RunData(cfg)
    views = [DatasetCatalog.get(data.name("phase", phase)) for phase in (1, 2)]
    labels = [sum(len(entry["annotations"]) for entry in view) for view in views]
    assert list(plan.labels.values()) == labels
    assert plan.test_images == 8
    written = sum(path.stat().st_size for path in (tmp_path / "run").glob("phase*/*/model.pth"))
    assert written < plan.disk < 5 * written  # two checkpoints with the optimizer's state, too
    assert plan.hours > 0
    assert plan.memory > written / 3
    assert "phase 2 calibrate: 9 images, 4 steps of 4" in plan.text()
    assert "(an estimate)" in plan.text()


def test_more_processes_take_less_time_and_memory(tiny_config, tmp_path):
    one, two = (plan_of(tiny_config(tmp_path), processes=n) for n in (1, 2))
    assert two.memory < one.memory
    assert two.device == f"2 × {one.device}"


def problems(cfg, **options):
    return "\n".join(plan_of(cfg, measure=False, **options).problems)


def test_what_would_fail_later_is_found_and_all_of_it(tiny_config, tmp_path):
    found = problems(
        tiny_config(
            tmp_path,
            *("MODEL.WEIGHTS", "nowhere.pth", "SOLVER.IMS_PER_BATCH", "3"),
            *("SCENARIO.NAME", "4+1"),
        ),
        processes=2,
    )
    assert "no weights at nowhere.pth" in found
    assert "needs 5 categories" in found
    cfg = tiny_config(tmp_path, "SOLVER.IMS_PER_BATCH", "3", "MODEL.DETECTOR", "gone.pth")
    found = problems(cfg, processes=2)
    assert "3 cannot be divided among 2 processes" in found
    assert "no file gone.pth" in found


def test_data_that_nobody_registered_is_found(tiny_config, tmp_path):
    cfg = tiny_config(tmp_path, "DATASETS.TRAIN", "['my_own_data']")
    assert "no data set 'my_own_data' is registered" in problems(cfg)


def test_a_full_disk_is_found(tiny_config, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")(10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "GiB, the run takes" in problems(tiny_config(tmp_path / "not" / "yet"))


def test_a_directory_of_another_run_is_found(tiny_config, tmp_path):
    cfg = tiny_config(tmp_path)
    other = {**identity(cfg), "SEED": 5, "MODEL.DETR.NUM_CLASSES": 4}
    content = {"identity": other, "digest": sha256_json(other)}
    (tmp_path / "identity.json").write_text(json.dumps(content))
    assert "SEED: was 5, now 0" in problems(cfg)


def test_small_phases_and_great_budgets_are_noted(tiny_config, tmp_path):
    cfg = tiny_config(tmp_path, "SOLVER.IMS_PER_BATCH", "30", "METHOD.MEMORY.BUDGET", "20.0")
    plan = plan_of(cfg, measure=False)
    assert plan.problems == []
    assert any("phase 1 train has 27 images for batches of 30" in note for note in plan.notes)
    assert any("phase 2 has 9 images, fewer than the budget of 20" in note for note in plan.notes)


def test_runs_are_summed_up(tiny_config, tmp_path):
    plan = plan_of(tiny_config(tmp_path), measure=False)
    steps = sum(stage.steps for stage in plan.stages)
    assert sum_text([plan, plan]).startswith(f"2 runs: {2 * steps} steps")


def test_the_command_prints_a_plan_and_trains_nothing(tiny_shapes, tmp_path):
    said = finish(start(tmp_path / "run", tiny_shapes, "--plan", "--num-gpus", "2"))
    assert "phase 2 calibrate" in said
    assert "2 × the CPU" in said
    assert not (tmp_path / "run").exists()
    process = start(tmp_path / "run", tiny_shapes, "--plan", "MODEL.WEIGHTS", "gone.pth")
    assert "no weights at gone.pth" in finish(process, 2)


def test_a_sweep_prints_the_sum_of_its_runs(tiny_shapes, tmp_path, capsys):
    command = ["sweep", TINY, "--seeds", "0", "1", "--out", str(tmp_path / "out"), "--plan"]
    assert main([*command, "--set", *tiny_shapes]) == 0
    said = capsys.readouterr().out
    assert said.count("phase 2 calibrate") == 2
    assert "2 runs: " in said
    assert not (tmp_path / "out").exists()
    assert main([*command, "--set", *tiny_shapes, "MODEL.WEIGHTS", "gone.pth"]) == 2
    assert "2 problems" in capsys.readouterr().out
