"""Every method of the paper goes through the engine on both detectors, with the losses it had.

Each test is a whole second phase, with the method as the repository's config states it, on a tiny
data set: ten steps of training, exemplars, calibration where the method has it, evaluation. The
losses of the ten steps are compared with those in golden_losses.json; after a change that is meant
to move them, `pytest tests/engine/test_methods.py --write-golden` writes them anew.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from cldetr.engine.checkpoint import load_state, save_state
from cldetr.engine.from_yaml import recipe_from_yaml
from cldetr.engine.run import IncrementalRun
from cldetr.engine.trainer import StopRequest
from cldetr.errors import InputError
from cldetr.methods.method import Method
from cldetr.methods.pseudo import PseudoRule

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).with_name("golden_losses.json")
STEPS = 10

DETECTORS = {
    "deformable": [],
    "detr": [
        *("MODEL.META_ARCHITECTURE", "DETR", "MODEL.DETR.PRE_NORM", "True"),
        *("MODEL.DETR.IN_FEATURES", "['res5']", "MODEL.RESNETS.OUT_FEATURES", "['res5']"),
        *("MODEL.DETR.ONE_CLASS_PER_QUERY", "True"),
    ],
}
MAIN = [
    "methods/finetune",
    "methods/lwf",
    "methods/joint_matching",
    "methods/dkd",
    "methods/dkd_er",
    "70_10",
    "methods/icarl",
    "methods/erd",
    "methods/joint",
    "methods/kd_oracle",
    "methods/er_oracle",
    "ablation/completion",
    "70_10_released",
]
MORE = [
    "methods/er",
    "methods/our_er",
    "exemplars/random",
    "exemplars/adaptive",
    "selection/p01",
    "selection/curriculum",
    "ablation/cached",
    "ablation/hard_labels",
    "ablation/kl_instances",
    "ablation/calibration_oracle",
]
CASES = [(name, detector) for detector in DETECTORS for name in MAIN]
CASES += [(name, "deformable") for name in MORE]


@pytest.fixture(scope="module")
def first_phases(tiny_recipe, tmp_path_factory):
    """For each detector a first phase whose model takes some of what it sees for objects."""
    paths = {}
    for name, overrides in DETECTORS.items():
        folder = tmp_path_factory.mktemp(name)
        run = IncrementalRun(tiny_recipe(folder, "SCHEDULE.FIRST.MAX_STEPS", "4", *overrides))
        run._train(1, StopRequest())
        run.ledger.close()
        path = folder / "phase1/train/model.pth"
        state = load_state(path)
        for key, value in state["model"].items():
            if "class_embed" in key and key.endswith("bias"):
                if name == "detr":
                    value[-1] -= 3.0  # no object
                else:
                    value += 4.0
        save_state(path, state)
        paths[name] = str(path)
    return paths


@pytest.mark.parametrize(("config", "detector"), CASES)
def test_a_method_runs_with_its_golden_losses(
    config, detector, first_phases, tiny_recipe, tmp_path, request
):
    recipe = tiny_recipe(
        tmp_path,
        *DETECTORS[detector],
        *("MODEL.DETECTOR", first_phases[detector]),
        *("SCHEDULE.TRAIN.EPOCHS", "9", "SCHEDULE.TRAIN.MAX_STEPS", str(STEPS)),
        *("SCHEDULE.CALIBRATE.MAX_STEPS", "2"),
    )
    method = recipe_from_yaml(str(CONFIGS / f"{config}.yaml")).method
    results = IncrementalRun(dataclasses.replace(recipe, method=method)).run()
    assert results["method"] == method.name
    assert results["phases"][1]["all"]["AP"] is not None
    assert (tmp_path / "phase2/select/memory.json").exists() == (method.memory is not None)
    assert (tmp_path / "phase2/calibrate/model.pth").exists() == (method.calibrate is not None)
    losses = training_losses(tmp_path)
    assert len(losses) == STEPS
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    name = f"{config}, {detector}"
    if request.config.getoption("--write-golden"):
        GOLDEN.write_text(json.dumps({**golden, name: losses}, indent=1, sort_keys=True) + "\n")
    else:
        assert losses == pytest.approx(golden[name], rel=2e-3)


def test_golden_losses_tell_the_methods_apart():
    """What trains on other labels or another loss must show within ten steps."""
    golden = json.loads(GOLDEN.read_text())
    same = {  # they differ in exemplar choice or after the training step only
        frozenset({"70_10", "ablation/completion"}),
    }
    for detector in DETECTORS:
        for one in MAIN:
            for other in MAIN:
                if one < other and frozenset({one, other}) not in same:
                    first, second = (golden[f"{name}, {detector}"] for name in (one, other))
                    assert first != pytest.approx(second, rel=2e-3), (one, other, detector)


def training_losses(folder):
    """The total loss of each step of the second phase's training stage."""
    lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    return [line["total_loss"] for line in lines if "total_loss" in line][:STEPS]


def test_the_kd_oracle_sees_the_true_boxes_of_old_classes(tiny_recipe, tmp_path):
    run = IncrementalRun(tiny_recipe(tmp_path))
    run.ledger.close()
    hidden = [entry["annotations"] for entry in run.data.train_entries(2)]
    shown = [entry["annotations"] for entry in run.data.train_entries(2, reveal_old=True)]
    classes = [{item["category_id"] for item in items} for items in shown]
    assert set.union(*classes) == {0, 1, 2, 3}
    assert hidden == [[item for item in items if item["category_id"] == 3] for items in shown]


def test_the_kd_oracle_takes_no_teacher():
    with pytest.raises(InputError, match="take the place"):
        Method(reveal_old=True, pseudo=PseudoRule())
