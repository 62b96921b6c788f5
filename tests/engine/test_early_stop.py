"""The early stop: what is held out, when a stage ends, with which weights, and after a restart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.structures import Boxes, BoxMode, Instances

from cldetr.config import differing, identity
from cldetr.engine import IncrementalTrainer, trainer
from cldetr.engine.checkpoint import load_state
from cldetr.engine.plan import make_plan
from cldetr.engine.rundata import RunData
from cldetr.engine.step import StageTrainer
from cldetr.errors import InputError
from cldetr.evaluation.evaluator import IncrementalEvaluator
from cldetr.report.rundir import read_run
from cldetr.report.tables import training_spans
from cldetr.scenario import hold_out

from .conftest import TINY, train
from .test_run import CrashError, assert_same

# Phase 1 has 27 images, 7 of them held out: 5 steps an epoch, 20 in all, a drop after 15. Phase 2
# has 9, 2 held out, and all images of both phases are exemplars.
ON = [
    *("SCHEDULE.EARLY_STOP.ENABLED", "True", "SCHEDULE.EARLY_STOP.HOLD_OUT", "0.25"),
    *("SCHEDULE.EARLY_STOP.PERIOD", "0.4", "SCHEDULE.EARLY_STOP.PATIENCE", "2"),
    *("SCHEDULE.FIRST.EPOCHS", "4", "SCHEDULE.FIRST.DROPS", "[3]", "METHOD.MEMORY.BUDGET", "100"),
    *("SCHEDULE.TRAIN.MAX_STEPS", "6", "SCHEDULE.CALIBRATE.MAX_STEPS", "2"),
    *("LOG_IMAGES", "0", "SOLVER.CHECKPOINT_PERIOD", "3"),
]
# AP on the held-out images of phase 1 after so many steps. Best after 4; no better after 6 and 8:
# on to the drop after 15; no better after 16 and 18: the end.
SCORES = {2: 1.0, 4: 5.0, 6: 3.0, 8: 5.0, 16: 4.0, 18: 4.5, 20: 9.0}


@pytest.fixture(scope="module")
def asked():
    """Replaces the evaluation on held-out images; notes (phase, steps done) of each."""
    build, found = IncrementalTrainer._make_early_stop, []

    def scripted(self, stage):
        hook = build(self, stage)
        if hook is not None:

            def evaluate():
                found.append((self.phase, self.step + 1))
                return SCORES[found[-1][1]] if self.phase == 1 else 0.0

            hook.evaluate = evaluate
        return hook

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IncrementalTrainer, "_make_early_stop", scripted)
        yield found


@pytest.fixture(scope="module")
def finished(tiny_config, tmp_path_factory, asked):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("finished")
    train(tiny_config(folder, *ON))
    return folder


def facts_of(folder, stage):
    return json.loads((folder / stage / "stage.json").read_text())["facts"]


def weights(folder, stage):
    return load_state(folder / stage / "model.pth")["model"]


def test_a_share_of_each_phase_is_held_out(tiny_config, tmp_path):
    whole = RunData(tiny_config(tmp_path)).scenario
    rest, held = hold_out(whole, 0.25, seed=0)
    for phase in (1, 2):
        kept, out = ({*part.phase(phase).image_ids} for part in (rest, held))
        assert kept | out == {*whole.phase(phase).image_ids}
        assert not kept & out
    assert [len(phase.image_ids) for phase in held.phases] == [7, 2]
    assert hold_out(whole, 0.25, seed=0) == (rest, held)
    assert hold_out(whole, 0.25, seed=1) != (rest, held)
    assert [len(phase.image_ids) for phase in hold_out(whole, 0.001, 0)[1].phases] == [1, 1]
    with pytest.raises(InputError, match="phase 1 has 27 images: too few"):
        hold_out(whole, 0.999, seed=0)


def test_an_image_of_several_phases_is_held_out_of_all(tiny_config, tmp_path):
    whole = RunData(tiny_config(tmp_path, "SCENARIO.PROTOCOL", "traditional")).scenario
    first, second = ({*phase.image_ids} for phase in whole.phases)
    assert first & second
    rest, held = hold_out(whole, 0.3, seed=0)
    trained = {image for phase in rest.phases for image in phase.image_ids}
    for phase in (1, 2):
        out = {*held.phase(phase).image_ids}
        assert not out & trained
        assert len(out) >= round(0.3 * len(whole.phase(phase).image_ids))


@pytest.mark.parametrize("method", ["phase", "joint", "revealed"])
def test_held_out_images_show_what_the_phase_annotates(tiny_config, tmp_path, method):
    words = {
        "phase": [],
        "joint": [
            *("METHOD.JOINT", "True", "METHOD.PSEUDO.ENABLED", "False"),
            *("METHOD.MEMORY.ENABLED", "False", "METHOD.CALIBRATE.ENABLED", "False"),
        ],
        "revealed": ["METHOD.REVEAL_OLD", "True", "METHOD.PSEUDO.ENABLED", "False"],
    }[method]
    data = RunData(tiny_config(tmp_path, *ON, *words))
    views = [DatasetCatalog.get(data.name("held_out", phase)) for phase in (1, 2)]
    shown = [{x["category_id"] for entry in view for x in entry["annotations"]} for view in views]
    assert shown[0] <= {0, 1, 2}
    assert shown[1] <= ({3} if method == "phase" else {0, 1, 2, 3})
    assert [len(view) for view in views] == [7, 9 if method == "joint" else 2]
    ids = {entry["image_id"] for view in views for entry in view}
    trained = {entry["image_id"] for entry in DatasetCatalog.get(data.name("joint", 2))}
    assert not ids & trained
    assert len(ids | trained) == 36


@pytest.mark.parametrize("joint", [False, True])
def test_a_detector_that_finds_all_held_out_objects_has_an_ap_of_100(tiny_config, tmp_path, joint):
    more = ["METHOD.JOINT", "True", "METHOD.PSEUDO.ENABLED", "False", "METHOD.MEMORY.ENABLED"]
    more += ["False", "METHOD.CALIBRATE.ENABLED", "False"]
    data = RunData(tiny_config(tmp_path, *ON, *(more if joint else [])))
    for phase in (1, 2):
        name = data.name("held_out", phase)
        evaluator = IncrementalEvaluator.from_dataset(name)
        for entry in DatasetCatalog.get(name):
            found = Instances((entry["height"], entry["width"]))
            boxes = torch.tensor([x["bbox"] for x in entry["annotations"]]).reshape(-1, 4)
            found.pred_boxes = Boxes(BoxMode.convert(boxes, BoxMode.XYWH_ABS, BoxMode.XYXY_ABS))
            labels = [x["category_id"] for x in entry["annotations"]]
            found.pred_classes = torch.tensor(labels, dtype=torch.int64)
            found.scores = torch.ones(len(labels))
            evaluator.process([entry], [{"instances": found}])
        assert evaluator.evaluate()["all"]["AP"] == pytest.approx(100)


def test_the_score_is_the_ap_on_the_held_out_images(tiny_config, tmp_path, monkeypatch):
    seen = []
    plain = trainer.run_evaluator

    def watched(model, loader, evaluator):
        entry = plain(model, loader, evaluator)
        seen.append((len(loader.dataset), entry["all"]["AP"]))
        return entry

    monkeypatch.setattr(trainer, "run_evaluator", watched)
    short = ["SCHEDULE.FIRST.MAX_STEPS", "4", "SCHEDULE.TRAIN.MAX_STEPS", "4"]
    train(tiny_config(tmp_path, *ON, *short, "SCHEDULE.EARLY_STOP.PATIENCE", "99"))
    for stage, images in (("phase1/train", 7), ("phase2/train", 2)):
        scores = [x["AP"] for x in facts_of(tmp_path, stage)["early_stop"]["evaluations"]]
        assert scores == [score for size, score in seen if size == images]
        assert len(scores) == 2


def test_a_stage_goes_on_at_the_drop_and_ends_after_it(finished, asked):
    assert [step for phase, step in asked if phase == 1] == [2, 4, 6, 8, 16, 18]
    facts = facts_of(finished, "phase1/train")
    assert (facts["steps"], facts["planned_steps"], facts["images"]) == (11, 20, 20)  # 8 and 3
    found = facts["early_stop"]
    assert found["ended"] == "no better AP in 2 evaluations"
    assert (found["best"], found["passed_over"]) == ({"step": 4, "AP": 5.0}, 7)
    lines = [json.loads(line) for line in (finished / "metrics.json").read_text().splitlines()]
    rates = {line["iteration"]: line["lr"] for line in lines}
    first = {step: rate for step, rate in rates.items() if step < 20}
    assert [*first] == [*range(8), 15, 16, 17]
    assert first == pytest.approx({step: 1e-3 if step < 15 else 1e-4 for step in first})
    assert {line["iteration"]: line.get("held_out/AP") for line in lines}[3] == 5.0


def test_nothing_found_yet_is_no_reason_to_stop(finished):
    second = facts_of(finished, "phase2/train")
    assert second["steps"] == second["planned_steps"] == 6
    assert second["early_stop"]["ended"] == "the schedule's end"
    assert "early_stop" not in facts_of(finished, "phase2/calibrate")


def test_a_stage_ends_with_its_best_weights(finished, tiny_config, tmp_path):
    train(tiny_config(tmp_path, *ON, "SCHEDULE.FIRST.MAX_STEPS", "4"))  # which ends there
    best, four = (weights(folder, "phase1/train") for folder in (finished, tmp_path))
    assert all(torch.equal(value, four[key]) for key, value in best.items())


def test_exemplars_are_none_of_the_held_out_images(finished, tiny_config):
    data = RunData(tiny_config(finished, *ON))
    memory = data.load_memory(finished / "phase2" / "select")
    assert [len(memory.image_ids[phase]) for phase in (1, 2)] == [20, 7]
    for phase in (1, 2):
        out = {x["image_id"] for x in DatasetCatalog.get(data.name("held_out", phase))}
        assert not out & {*memory.image_ids[phase]}


def test_the_report_knows_where_the_stages_lie(finished):
    spans = [(x.phase, x.stage, x.first) for x in training_spans(read_run(finished))]
    assert spans == [(1, "train", 0), (2, "train", 20), (2, "calibrate", 26)]


@pytest.mark.slow
def test_crashes_change_nothing(finished, tiny_config, tmp_path, monkeypatch):
    step, budget = StageTrainer.run_step, [0]

    def limited(self):
        if budget[0] == 0:
            raise CrashError
        budget[0] -= 1
        step(self)

    monkeypatch.setattr(StageTrainer, "run_step", limited)
    for start in range(30):
        budget[0] = 4  # a checkpoint is saved after every third step
        try:
            train(tiny_config(tmp_path, *ON), resume=start > 0)
            break
        except CrashError:
            continue
    assert start > 4
    assert_same(tmp_path, finished)
    for stage in ("phase1/train", "phase2/train"):
        one, other = (facts_of(folder, stage) for folder in (finished, tmp_path))
        assert (one["early_stop"], one["steps"]) == (other["early_stop"], other["steps"])


def test_the_plan_counts_what_is_held_out(tiny_config, tmp_path):
    plan = make_plan(tiny_config(tmp_path, *ON), IncrementalTrainer.build_model, measure=False)
    assert (plan.stages[0].images, plan.stages[0].steps) == (20, 20)
    # Every 2 of 20 steps 7 images; every 2 of 6 steps, an epoch of 27 images, 2 images.
    text = f"{10 * 7 + 3 * 2} held-out images"
    assert any(text in note for note in plan.notes), plan.notes
    assert not plan.problems


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("HOLD_OUT 0", "between 0 and 1"),
        ("PERIOD 0", "above 0"),
        ("PATIENCE 0", "at least 1"),
        ("HOLD_OUT 0.99", "too few"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tiny_config, tmp_path, words, says):
    key, value = words.split()
    cfg = tiny_config(tmp_path, *ON, f"SCHEDULE.EARLY_STOP.{key}", value)
    with pytest.raises(InputError, match=says):
        IncrementalTrainer(cfg)


def test_held_out_images_without_an_object_are_refused(tiny_config, tmp_path):
    path, folder = tiny_config(tmp_path).DATASETS.TRAIN[0].split(".json:")
    content = json.loads(Path(f"{path}.json").read_text())
    shown = content["images"][0]["id"]
    content["annotations"] = [x for x in content["annotations"] if x["image_id"] == shown]
    (tmp_path / "few.json").write_text(json.dumps(content))
    few = ["DATASETS.TRAIN", f"['{tmp_path}/few.json:{folder}']"]
    with pytest.raises(InputError, match=r"held-out images of phase \d show no object"):
        RunData(tiny_config(tmp_path, *ON, *few))


def test_an_average_of_weights_is_refused(tiny_config, tmp_path):
    with pytest.raises(InputError, match=r"METHOD\.AVERAGE"):
        IncrementalTrainer(tiny_config(tmp_path, *ON, "METHOD.AVERAGE.ENABLED", "True"))


def test_runs_from_before_it_keep_their_identity(tiny_config, tmp_path):
    off, on = identity(tiny_config(tmp_path)), identity(tiny_config(tmp_path, *ON))
    before = {key: value for key, value in off.items() if "EARLY_STOP" not in key}
    assert differing(before, off) == []
    assert "SCHEDULE.EARLY_STOP.ENABLED" in [key for key, *_ in differing(before, on)]


SCRIPT = """
import sys
import cldetr.engine.trainer as trainer
from detectron2.utils import comm
from cldetr.config import load_config
from cldetr.engine import IncrementalTrainer, default_argument_parser, default_setup, launch

plain = trainer.run_evaluator
SCORES = {scores}


class Trainer(IncrementalTrainer):
    def run_step(self):
        Trainer.done = (self.phase, self.step + 1)
        super().run_step()


def scripted(model, loader, evaluator):
    entry = plain(model, loader, evaluator)
    if len(loader.dataset) != 7:
        return entry
    # Other ranks have no results: they must follow the first.
    return {{"all": {{"AP": SCORES[Trainer.done[1]]}}}} if comm.is_main_process() else {{}}


trainer.run_evaluator = scripted


def main(args):
    cfg = load_config(args.config_file, args.opts)
    default_setup(cfg, args)
    found = Trainer(cfg)
    found.resume_or_load(resume=args.resume)
    return found.train()


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    sys.exit(launch(main, args.num_gpus, args=(args,)))
"""


@pytest.mark.slow
def test_two_processes_end_a_stage_together(tiny_shapes, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(scores=SCORES))
    command = [sys.executable, str(script), "--config-file", TINY, "--num-gpus", "2", *tiny_shapes]
    short = ["SCHEDULE.TRAIN.MAX_STEPS", "2", "SCHEDULE.CALIBRATE.MAX_STEPS", "1"]
    done = subprocess.run(
        [*command, *ON, *short, "OUTPUT_DIR", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    facts = facts_of(tmp_path / "run", "phase1/train")
    assert (facts["steps"], facts["early_stop"]["best"]) == (11, {"step": 4, "AP": 5.0})
    assert (tmp_path / "run" / "results.json").is_file()
