"""Every method of the paper goes through the engine on both detectors, with the losses it had.

Each test is a whole second phase, with the method as the repository's config states it, on a tiny
data set: ten steps of training, exemplars, calibration where the method has it, evaluation. The
losses of the ten steps are compared with those in golden_losses.json; after a change that is meant
to move them, `pytest tests/engine/test_methods.py --write-golden` writes them anew.
"""

import json
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.engine import HookBase

from cldetr.config import method_of
from cldetr.config_files import compose
from cldetr.engine import IncrementalTrainer
from cldetr.engine.checkpoint import load_state, save_state
from cldetr.engine.rundata import RunData
from cldetr.errors import InputError
from cldetr.methods.method import Method
from cldetr.methods.pseudo import PseudoRule

from .conftest import train

GOLDEN = Path(__file__).with_name("golden_losses.json")
STEPS = 10

DETECTORS = {
    "deformable": [],
    "detr": [
        *("MODEL.META_ARCHITECTURE", "DETR", "MODEL.DETR.PRE_NORM", "True"),
        *("MODEL.DETR.IN_FEATURES", "['res5']", "MODEL.RESNETS.OUT_FEATURES", "['res5']"),
        *("MODEL.DETR.ONE_CLASS_PER_QUERY", "True"),
        *("MODEL.DETR.LEVELS", "4", "MODEL.DETR.WITH_BOX_REFINE", "False"),  # no keys of DETR
    ],
}
BOTH = list(DETECTORS)
# Scores the three old classes alike, all below 0.4, so that each is the best class of some queries.
DETECTORS["detr, even"] = DETECTORS["detr"]
MAIN = [
    "70_10_finetune",
    "70_10_lwf",
    "70_10_joint_matching",
    "70_10_dkd",
    "70_10_dkd_er",
    "70_10",
    "70_10_icarl",
    "70_10_erd",
    "70_10_joint",
    "70_10_kd_oracle",
    "70_10_er_oracle",
    "ablation_completion",
    "70_10_released",
    "shapes_recommended",
]
MORE = [
    "70_10_er",
    "70_10_lwf_boxes",
    "70_10_skip_annotated",
    "70_10_our_er",
    "70_10_dkd_er_random",
    "70_10_dkd_er_adaptive",
    "70_10_p01",
    "70_10_curriculum",
    "ablation_cached",
    "ablation_hard_labels",
    "ablation_kl_instances",
    "ablation_calibration_oracle",
]
NEWER = [  # published after the paper
    "70_10_threshold",
    "70_10_threshold03",
    "70_10_q_mcmf",
    "70_10_sikd",
    "70_10_psedet",
    "70_10_response",
    "70_10_combined",
]
NEWER_MORE = ["70_10_topology", "70_10_average", "70_10_combined_er", "70_10_dyq"]
VARIANTS = {  # settings that no config has: a config and its overrides
    "q_mcmf, ramp": ["70_10_q_mcmf", "METHOD.MATCHER.RAMP", "1.0"],
    "dkd, weighted": ["70_10_dkd", "METHOD.PSEUDO.WEIGHTED", "True"],
    "dkd_er, ignore": ["70_10_dkd_er", "METHOD.UNLABELLED", "ignore"],
    "topology, unsure": ["70_10_topology", "METHOD.DISTILL.MIN_SCORE", "0.1"],
    "threshold, sure": ["70_10_threshold", "METHOD.PSEUDO.SCORE", "0.65"],
}
DIFFERENT = [  # which of two methods the losses must show, on each detector that runs both
    ("70_10_threshold", "threshold, sure"),
    ("70_10_threshold", "70_10_sikd"),
    ("70_10_threshold", "70_10_psedet"),
    ("70_10_threshold", "70_10_response"),
    ("70_10_threshold", "70_10_topology"),
    ("70_10_threshold", "topology, unsure"),
    ("70_10_threshold03", "70_10_q_mcmf"),  # the matcher alone
    ("70_10_q_mcmf", "70_10_combined"),
    ("70_10_sikd", "70_10_combined"),
    ("70_10_combined", "70_10_combined_er"),
    ("70_10_threshold03", "q_mcmf, ramp"),
    ("70_10_q_mcmf", "q_mcmf, ramp"),
    ("70_10_dkd", "70_10_dyq"),
    ("70_10_dkd", "dkd, weighted"),
    ("70_10_dkd_er", "dkd_er, ignore"),
]
SHORT = [
    *("SCHEDULE.FIRST.MAX_STEPS", "4", "SCHEDULE.TRAIN.MAX_STEPS", "1"),
    *("METHOD.CALIBRATE.ENABLED", "False"),
]
CASES = [(name, detector) for detector in BOTH for name in [*MAIN, *NEWER]]
CASES += [(name, "deformable") for name in [*MORE, *NEWER_MORE, *VARIANTS]]
CASES += [(name, "detr, even") for name in ["70_10_threshold", "topology, unsure"]]


class LossTrainer(IncrementalTrainer):
    """Keeps the loss of each step of the training stage; metrics.json has medians over steps."""

    def build_hooks(self):
        if self.stage != "train":
            return super().build_hooks()
        self.losses = []
        return [LossHook(), *super().build_hooks()]


class LossHook(HookBase):
    def after_step(self):
        self.trainer.losses.append(self.trainer.storage.history("total_loss").latest())


@pytest.fixture(scope="module")
def first_phases(tiny_config, tmp_path_factory):
    """For each detector a first phase whose model takes some of what it sees for objects."""
    paths = {}
    for name, overrides in DETECTORS.items():
        folder = tmp_path_factory.mktemp(name)
        train(tiny_config(folder, *SHORT, *overrides))
        path = folder / "phase1/train/model.pth"
        state = load_state(path)
        for key, value in state["model"].items():
            if "class_embed" in key and key.endswith("bias"):
                if name == "deformable":
                    value += 4.0
                else:
                    value[-1] -= 3.0  # no object
                if name == "detr, even":
                    value[:3] += torch.tensor([0.56, 0.0, 1.03])
        save_state(path, state)
        paths[name] = str(path)
    return paths


@pytest.mark.parametrize(("name", "detector"), CASES)
def test_a_method_runs_with_its_golden_losses(
    name, detector, first_phases, tiny_config, tmp_path, request
):
    cfg = tiny_config(
        tmp_path,
        *DETECTORS[detector],
        *("MODEL.DETECTOR", first_phases[detector]),
        *("SCHEDULE.TRAIN.EPOCHS", "9", "SCHEDULE.TRAIN.MAX_STEPS", str(STEPS)),
        *("SCHEDULE.CALIBRATE.MAX_STEPS", "2", "SOLVER.CHECKPOINT_PERIOD", "100"),
    )
    config, *overrides = VARIANTS.get(name, [name])
    wanted = compose([config], overrides)
    cfg.METHOD, cfg.MODEL.DETR.QUERY_GROUPS = wanted.METHOD, wanted.MODEL.DETR.QUERY_GROUPS
    method = method_of(cfg)
    trainer = LossTrainer(cfg)
    results = trainer.train()
    assert results["method"] == method.name
    assert results["phases"][1]["all"]["AP"] is not None
    assert (tmp_path / "phase2/select/memory.json").exists() == (method.memory is not None)
    assert (tmp_path / "phase2/calibrate/model.pth").exists() == (method.calibrate is not None)
    losses = trainer.losses
    assert len(losses) == STEPS
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    case = f"{name}, {detector}"
    if request.config.getoption("--write-golden"):
        GOLDEN.write_text(json.dumps({**golden, case: losses}, indent=1, sort_keys=True) + "\n")
    else:
        assert losses == pytest.approx(golden[case], rel=2e-3)


def test_golden_losses_tell_the_methods_apart():
    """What trains on other labels or another loss must show within ten steps."""
    golden = json.loads(GOLDEN.read_text())
    same = {  # they differ in exemplar choice or after the training step only
        frozenset({"70_10", "ablation_completion"}),
    }
    for detector in BOTH:
        for one in MAIN:
            for other in MAIN:
                if one < other and frozenset({one, other}) not in same:
                    first, second = (golden[f"{name}, {detector}"] for name in (one, other))
                    assert first != pytest.approx(second, rel=2e-3), (one, other, detector)


@pytest.mark.parametrize(
    ("one", "other", "detector"),
    [
        (*pair, detector)
        for pair in DIFFERENT
        for detector in DETECTORS
        if all((name, detector) in CASES for name in pair)
    ],
)
def test_golden_losses_tell_newer_methods_apart(one, other, detector):
    golden = json.loads(GOLDEN.read_text())
    first, second = (golden[f"{name}, {detector}"] for name in (one, other))
    assert first != pytest.approx(second, rel=2e-3)


def test_an_average_of_the_weights_leaves_the_training_as_it_is():
    golden = json.loads(GOLDEN.read_text())
    average, without = (golden[f"70_10_{x}, deformable"] for x in ("average", "threshold"))
    assert average == pytest.approx(without, rel=1e-6)


def test_every_golden_loss_is_of_a_case():
    assert json.loads(GOLDEN.read_text()).keys() == {", ".join(case) for case in CASES}


def test_the_kd_oracle_sees_the_true_boxes_of_old_classes(tiny_config, tmp_path):
    data = RunData(tiny_config(tmp_path))
    hidden, shown = (
        [entry["annotations"] for entry in DatasetCatalog.get(data.name(kind, 2))]
        for kind in ("phase", "revealed")
    )
    classes = [{item["category_id"] for item in items} for items in shown]
    assert set.union(*classes) == {0, 1, 2, 3}
    assert hidden == [[item for item in items if item["category_id"] == 3] for items in shown]


def test_the_kd_oracle_takes_no_teacher():
    with pytest.raises(InputError, match="take the place"):
        Method(reveal_old=True, pseudo=PseudoRule())
