"""Images that no phase sees, to choose settings by, and another test set for a finished run."""

import json

import pytest

from cldetr.engine.plan import make_plan
from cldetr.engine.rundata import RunData
from cldetr.engine.trainer import IncrementalTrainer
from cldetr.errors import InputError
from cldetr.evaluation.results import load_results

from .conftest import finish, start, train

HOLD_OUT = ["SCENARIO.HOLD_OUT", "0.25"]
ON_IT = ["DATASETS.TEST", "['hold_out']"]


def seen_and_held_out(cfg):
    data = RunData(cfg)
    seen = {image for phase in data.scenario.phases for image in phase.image_ids}
    return seen, set(data.test["base"].image_ids.tolist())


@pytest.mark.parametrize("protocol", ["strict", "traditional"])
def test_no_phase_sees_what_is_held_out(tiny_config, tmp_path, protocol):
    words = [*HOLD_OUT, *ON_IT, "SCENARIO.PROTOCOL", protocol]
    seen, held_out = seen_and_held_out(tiny_config(tmp_path, *words))
    assert len(held_out) == 9  # a quarter of 36
    assert not seen & held_out
    whole = {*RunData(tiny_config(tmp_path)).train["base"].image_ids.tolist()}
    assert held_out <= whole
    if protocol == "strict":
        assert seen | held_out == whole
    _, again = seen_and_held_out(tiny_config(tmp_path, *words))
    assert again == held_out
    _, other = seen_and_held_out(tiny_config(tmp_path, *words, "SCENARIO.DATA_SEED", "1"))
    assert other != held_out


def test_held_out_images_keep_their_objects(tiny_config, tmp_path):
    data = RunData(tiny_config(tmp_path, *HOLD_OUT, *ON_IT))
    whole, part = RunData(tiny_config(tmp_path)).train["base"], data.test["base"]
    for index, image in enumerate(part.image_ids.tolist()):
        (row,) = whole.indices_of([image])
        rows = slice(whole.starts[row], whole.starts[row + 1])
        own = slice(part.starts[index], part.starts[index + 1])
        assert part.file_names[index] == whole.file_names[row]
        assert part.object_ids[own].tolist() == whole.object_ids[rows].tolist()
        assert part.labels[own].tolist() == whole.labels[rows].tolist()


def test_nothing_held_out_cannot_be_tested_on(tiny_config, tmp_path):
    with pytest.raises(InputError, match=r"set SCENARIO\.HOLD_OUT"):
        RunData(tiny_config(tmp_path, *ON_IT))
    plan = make_plan(
        tiny_config(tmp_path, "SCENARIO.HOLD_OUT", "1.5"), IncrementalTrainer.build_model
    )
    assert "from 0 to below 1" in plan.problems[0]


def test_a_finished_run_takes_another_test_set(tiny_config, tiny_shapes, tmp_path):
    train(tiny_config(tmp_path, *HOLD_OUT))
    before = (tmp_path / "results.json").read_bytes()
    finish(start(tmp_path, [*tiny_shapes, *HOLD_OUT, *ON_IT], "--eval-only"))
    found = load_results(tmp_path / "results_hold_out.json")
    assert [entry["stage"] for entry in found["phases"]] == ["train", "calibrate"]
    assert (tmp_path / "results.json").read_bytes() == before
    assert (tmp_path / "results_hold_out.csv").exists()
    confusion = json.loads((tmp_path / "results_hold_out_confusion.json").read_text())
    assert (confusion["phase"], len(confusion["counts"])) == (2, 5)
    assert (tmp_path / "results_hold_out_precision_recall.json").exists()
    stored = json.loads((tmp_path / "identity.json").read_text())["identity"]
    assert stored["DATASETS.TEST"] != ["hold_out"]


def test_another_split_cannot_be_evaluated_as_the_runs(tiny_config, tmp_path):
    train(tiny_config(tmp_path, *HOLD_OUT))
    trainer = IncrementalTrainer(tiny_config(tmp_path, "SCENARIO.HOLD_OUT", "0.5", *ON_IT))
    with pytest.raises(InputError, match="images"):
        trainer.evaluate()
