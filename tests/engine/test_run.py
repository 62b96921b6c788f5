"""Whole runs: every stage happens, stopping anywhere changes nothing, bad starts are refused."""

import contextlib
import io
import json
import logging
import math
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cldetr.config import load_config
from cldetr.engine import IncrementalTrainer
from cldetr.engine.checkpoint import load_state
from cldetr.engine.ledger import Ledger
from cldetr.engine.step import StageTrainer
from cldetr.errors import InputError

from .conftest import finish, start, train, wait_for


def artefacts(folder):
    """What a run ends with: weights, memory and metrics."""
    weights = {
        path.relative_to(folder).as_posix(): load_state(path)["model"]
        for path in sorted(folder.glob("phase*/*/model.pth"))
    }
    texts = {
        path.relative_to(folder).as_posix(): path.read_text()
        for pattern in ("phase*/select/*.json", "phase*/evaluate/metrics.json", "results.json")
        for path in sorted(folder.glob(pattern))
        if path.name != "stage.json"
    }
    return weights, texts


def assert_same(folder, other):
    weights, texts = artefacts(folder)
    other_weights, other_texts = artefacts(other)
    assert texts == other_texts
    assert weights.keys() == other_weights.keys()
    for path, state in weights.items():
        for key, value in state.items():
            assert torch.equal(value, other_weights[path][key]), f"{path}: {key}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_config):
    """An uninterrupted run to compare with."""
    folder = tmp_path_factory.mktemp("finished")
    train(tiny_config(folder))
    return folder


def test_a_run_goes_through_every_stage_and_ends_in_a_table(finished):
    done = {path.parent.relative_to(finished).as_posix() for path in finished.rglob("stage.json")}
    assert done == {
        *(f"phase1/{stage}" for stage in ("train", "select", "evaluate")),
        *(f"phase2/{stage}" for stage in ("train", "select", "calibrate", "evaluate")),
    }
    results = json.loads((finished / "results.json").read_text())
    assert [phase["phase"] for phase in results["phases"]] == [1, 2]
    assert results["fpp"] is not None
    assert set(results["phases"][1]["new"]) == {"AP", "AP50", "AP75", "APs", "APm", "APl"}
    assert (finished / "results.csv").exists()
    assert not list(finished.rglob("checkpoints"))


def test_a_run_notes_its_data_its_pseudo_labels_and_what_it_ran_with(finished):
    audit = json.loads((finished / "audit.json").read_text())
    assert [phase["classes"] for phase in audit["phases"]] == [3, 1]
    [start] = json.loads((finished / "starts.json").read_text())["starts"]
    assert start["versions"]["torch"] == torch.__version__
    facts = json.loads((finished / "phase2/train/stage.json").read_text())["facts"]
    old = set(audit["phases"][0]["instances_per_class"])
    assert facts["pseudo"]["images"] == facts["images"] * 2  # two epochs
    assert set(facts["pseudo"]["per_category"]) <= old
    assert "pseudo" not in json.loads((finished / "phase1/train/stage.json").read_text())["facts"]


def test_a_stage_shorter_than_the_log_period_shows_its_loss(tiny_config, tmp_path, caplog):
    stages = ("FIRST", "TRAIN", "CALIBRATE")
    short = [word for stage in stages for word in (f"SCHEDULE.{stage}.MAX_STEPS", "2")]
    with caplog.at_level(logging.INFO, logger="cldetr"):
        train(tiny_config(tmp_path, *short, "LOG_PERIOD", "20", "LOG_IMAGES", "0"))
    lines = [line for line in caplog.text.splitlines() if "  loss " in line]
    losses = [float(line.split("  loss ")[1].split()[0]) for line in lines]
    assert len(losses) == 3
    assert min(losses) > 0


def test_a_finished_run_resumes_to_the_same_without_training(finished, tiny_config, monkeypatch):
    def refuse(self):
        raise AssertionError("a finished stage trained again")

    monkeypatch.setattr(StageTrainer, "run_step", refuse)
    before = artefacts(finished)[1]
    train(tiny_config(finished), resume=True)
    train(load_config(str(finished / "config.yaml")), resume=True)  # the run's own file
    assert artefacts(finished)[1] == before


def test_tensorboard_shows_pictures_which_change_nothing(finished, tiny_config, tmp_path):
    train(tiny_config(tmp_path, "LOG_IMAGES", "1", "VIS_PERIOD", "2"))
    assert_same(tmp_path, finished)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    tags = events.Tags()["images"]
    assert tags == [f"{x}/image1" for x in ("phase1_train", "phase2_train", "phase2_calibrate")]
    first = events.Images("phase2_train/image1")
    assert [event.step for event in first][-1] == max(event.step for event in first)
    assert len(first) > 1
    with Image.open(io.BytesIO(first[0].encoded_image_string)) as picture:
        assert picture.width == 2 * 320 + 12 + 16  # merged labels beside matched predictions


class CrashError(Exception):
    """Stands for a crash at a chosen moment."""


@pytest.mark.parametrize("workers", [0, 2])
def test_crashes_all_along_change_nothing(finished, tiny_config, tmp_path, monkeypatch, workers):
    # The run crashes after 3 steps again and again, in every training stage, and goes on.
    step = StageTrainer.run_step
    budget = [0]

    def limited(self):
        if budget[0] == 0:
            raise CrashError
        budget[0] -= 1
        step(self)

    monkeypatch.setattr(StageTrainer, "run_step", limited)
    crashes = 0
    while not (tmp_path / "results.json").exists():
        budget[0] = 3
        cfg = tiny_config(tmp_path, "DATALOADER.NUM_WORKERS", str(workers))
        try:
            train(cfg, resume=crashes > 0)
        except CrashError:
            crashes += 1
    assert crashes >= 4
    assert_same(tmp_path, finished)


def test_a_crash_at_the_end_of_every_stage_changes_nothing(
    finished, tiny_config, tmp_path, monkeypatch
):
    # Each stage has written its results and crashes just before it is declared finished.
    finish = Ledger.finish
    crashed = []

    def crash_once(self, phase, stage, *rest):
        if (phase, stage) not in crashed:
            crashed.append((phase, stage))
            raise CrashError
        finish(self, phase, stage, *rest)

    monkeypatch.setattr(Ledger, "finish", crash_once)
    while not (tmp_path / "results.json").exists():
        with contextlib.suppress(CrashError):
            train(tiny_config(tmp_path), resume=bool(crashed))
    stages = [(2, "train"), (2, "select"), (2, "calibrate"), (2, "evaluate")]
    assert crashed == [(1, "train"), (1, "select"), (1, "evaluate"), *stages]
    assert_same(tmp_path, finished)


def test_kill_and_sigterm_are_survived(finished, tiny_shapes, tmp_path):
    run = tmp_path / "run"
    first = start(run, tiny_shapes)
    wait_for(run / "phase1/train/checkpoints/step_00000002", first)
    first.kill()
    second = start(run, tiny_shapes, "--resume")
    wait_for(run / "phase2/train/checkpoints", second)
    second.send(signal.SIGTERM)
    finish(second, 143)
    assert "after phase 2" in finish(start(run, tiny_shapes, "--resume"))
    assert_same(run, finished)


def test_three_phases_with_label_completion(tiny_config, tmp_path):
    overrides = ["SCENARIO.NAME", "2+1x2", "METHOD.CALIBRATE.COMPLETE.ENABLED", "True"]
    results = train(tiny_config(tmp_path, *overrides))
    assert len(results["phases"]) == 3
    assert len(results["matrix"][2]) == 3
    memory = json.loads((tmp_path / "phase3/select/memory.json").read_text())
    assert [phase["index"] for phase in memory["phases"]] == [1, 2, 3]


def first_losses(folder):
    """The total losses of the first phase's steps."""
    lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    return [line["total_loss"] for line in lines if "total_loss" in line][:9]


def test_parts_of_a_batch_in_bfloat16_train_as_the_whole_batch_does(
    finished, tiny_config, tmp_path
):
    train(tiny_config(tmp_path, "SOLVER.ACCUMULATE", "2", "SOLVER.AMP.ENABLED", "True"))
    parts, whole = first_losses(tmp_path), first_losses(finished)
    assert parts != whole  # each part is normalised by its own boxes, and rounded more
    assert parts[0] == pytest.approx(whole[0], rel=0.1)


def test_the_traditional_protocol_shares_images_and_unseen_classes_may_be_negatives(
    finished, tiny_config, tmp_path
):
    train(tiny_config(tmp_path, "SCENARIO.PROTOCOL", "traditional", "METHOD.UNSEEN", "negative"))
    phases = json.loads((tmp_path / "manifest.json").read_text())["phases"]
    assert set(phases[0]["image_ids"]) & set(phases[1]["image_ids"])
    states = [
        load_state(folder / "phase1/train/model.pth")["model"] for folder in (tmp_path, finished)
    ]
    # Only as negatives do the rows of the class of phase 2 learn something in phase 1.
    moved = [state["class_embed.0.bias"][3].item() for state in states]
    assert moved[1] == pytest.approx(-math.log(99), abs=1e-4)  # but for weight decay
    assert moved[0] < moved[1] - 1e-3


def test_each_phase_may_be_a_data_set_of_its_own(tiny_config, tmp_path):
    json_file, images = tiny_config(tmp_path).DATASETS.TRAIN[0].split(".json:")
    whole = json.loads(Path(f"{json_file}.json").read_text())
    references = []
    for name, ids, own in (("old", {1, 2, 3}, slice(0, 24)), ("new", {4}, slice(24, 36))):
        kept = {image["id"] for image in whole["images"][own]}
        part = {
            "images": whole["images"][own],
            "annotations": [
                x for x in whole["annotations"] if x["image_id"] in kept and x["category_id"] in ids
            ],
            "categories": [x for x in whole["categories"] if x["id"] in ids],
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
        references.append(f"{tmp_path / name}.json:{images}")
    trainer = IncrementalTrainer(tiny_config(tmp_path / "run", "DATASETS.TRAIN", str(references)))
    assert [len(phase.classes) for phase in trainer.data.scenario.phases] == [3, 1]
    results = trainer.train()
    assert results["phases"][1]["new"]["AP"] is not None


def test_a_trained_detector_can_be_the_first_phase(finished, tiny_config, tmp_path):
    given = finished / "phase1/train/model.pth"
    train(tiny_config(tmp_path, "MODEL.DETECTOR", str(given)))
    assert_same(tmp_path, finished)  # all that follows phase 1 is as if it had been trained here
    facts = json.loads((tmp_path / "phase1/train/stage.json").read_text())["facts"]
    assert facts["steps"] == 0


def test_a_detector_of_other_classes_is_refused_as_the_first_phase(finished, tiny_config, tmp_path):
    later = finished / "phase2/calibrate/model.pth"
    with pytest.raises(InputError, match="not of phase 1"):
        train(tiny_config(tmp_path, "MODEL.DETECTOR", str(later)))


def test_eval_only_repeats_the_runs_last_numbers(finished, tiny_shapes):
    said = finish(start(finished, tiny_shapes, "--eval-only"))
    metrics = json.loads((finished / "phase2/evaluate/metrics.json").read_text())
    assert f"{metrics['all']['AP50']:.1f}" in said


def test_weights_that_a_run_started_from_are_not_those_to_evaluate(finished, tiny_config, tmp_path):
    given = finished / "phase2/calibrate/model.pth"
    cfg = tiny_config(tmp_path, "MODEL.WEIGHTS", str(given), "SCHEDULE.FIRST.MAX_STEPS", "1")
    results = train(cfg)
    trainer = IncrementalTrainer(cfg)
    assert trainer.evaluate()["all"] == results["phases"][1]["all"]
    last = load_state(tmp_path / "phase2/calibrate/model.pth")["model"]
    assert all(torch.equal(x, last[key]) for key, x in trainer.detector.state_dict().items())


def test_the_data_may_not_change_under_a_run(finished, tiny_config):
    with pytest.raises(InputError, match=r"SCENARIO\.DATA_SEED: was 0, now 5"):
        train(tiny_config(finished, "SCENARIO.DATA_SEED", "5"), resume=True)
