"""Configs: unknown keys told with the right one, types checked, nothing executed."""

import pytest
import torch

from cldetr.config import (
    check_keys,
    config_from_text,
    default_config,
    differing,
    identity,
    load_config,
    method_of,
    schedule_of,
    without_defaults,
)
from cldetr.engine.launch import set_float32_precision
from cldetr.errors import InputError
from cldetr.settings import Schedule, StageSchedule


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("SCENARIO: {NAME: '40+40'}\nSCHEDULE: {TRAIN: {EPOCHS: 3}}\n")
    return str(path)


def test_a_file_and_overrides_become_a_config(config):
    cfg = load_config(config, ["METHOD.PSEUDO.K", "5", "SOLVER.BASE_LR", "1e-3"])
    assert cfg.SCENARIO.NAME == "40+40"
    assert schedule_of(cfg).train.epochs == 3.0
    assert method_of(cfg).pseudo.k == 5
    assert cfg.SOLVER.BASE_LR == 1e-3


def test_a_text_on_the_command_line_stays_a_text(config):
    cfg = load_config(config, ["MODEL.WEIGHTS", "", "OUTPUT_DIR", "12"])
    assert (cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR) == ("", "12")


def test_the_defaults_are_the_papers(config):
    cfg = load_config(config, ["SCENARIO.NAME", "70+10", "SCHEDULE.TRAIN.EPOCHS", "40"])
    assert schedule_of(cfg) == Schedule()
    method = method_of(cfg)
    assert (method.pseudo.k, method.pseudo.iou, method.pseudo.soft) == (10, 0.7, True)
    assert method.memory.budget == 0.1
    assert method.calibrate.complete is None
    assert cfg.SOLVER.IMS_PER_BATCH == 32


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("METHOD.PSUEDO.K", "5", "did you mean METHOD.PSEUDO.K"),
        ("SOLVER.BASE_LRR", "1", "did you mean SOLVER.BASE_LR"),
        ("SCHEDULE.TRAIN.EPOCHS", "many", "takes a float such as 3.0, not 'many'"),
        ("METHOD.UNSEEN", "forget", "one of 'mask', 'negative'"),
        ("METHOD.PSEUDO.SELECT", "best", "topk, threshold"),
        ("METHOD.MEMORY.ENABLED", "False", "calibration needs exemplars"),
        ("SOLVER.MAX_ITER", "9", "SOLVER.MAX_ITER is not used: set SCHEDULE"),
        ("SOLVER.MOMENTUM", "0.5", "override build_optimizer"),
        ("INPUT.FLIP", "0.5", "INPUT.FLIP is now INPUT.RANDOM_FLIP"),
        ("SOLVER.CLIP", "0.5", "SOLVER.CLIP is now SOLVER.CLIP_GRADIENTS.CLIP_VALUE"),
        ("SOLVER.BACKBONE_FACTOR", "1", "is now SOLVER.BACKBONE_MULTIPLIER"),
    ],
)
def test_a_wrong_override_says_what_would_be_right(config, key, value, says):
    with pytest.raises(InputError, match=says):
        check_keys(load_config(config, [key, value]))


def test_a_key_that_an_override_may_obey_is_left_to_it(config):
    cfg = load_config(config, ["SOLVER.MOMENTUM", "0.5"])
    check_keys(cfg, overridden={"build_optimizer"})


def test_an_override_without_value_is_refused(config):
    with pytest.raises(InputError, match="pairs"):
        load_config(config, ["SEED"])


def test_an_unknown_key_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "typo.yaml"
    path.write_text("METHOD: {PSEUDOS: {K: 3}}")
    with pytest.raises(InputError, match=r"typo\.yaml"):
        load_config(str(path))


def test_yaml_never_runs_code(tmp_path):
    proof = tmp_path / "executed"
    path = tmp_path / "evil.yaml"
    path.write_text(f"OUTPUT_DIR: !!python/object/apply:os.mkdir ['{proof}']")
    with pytest.raises(InputError, match="cannot read"):
        load_config(str(path))
    assert not proof.exists()


def test_two_seeds_differ_in_identity_and_workers_do_not(config):
    plain = identity(load_config(config))
    assert identity(load_config(config, ["SEED", "1"])) != plain
    assert identity(load_config(config, ["DATALOADER.NUM_WORKERS", "7"])) == plain


def test_a_dumped_config_is_the_same_run(config, tmp_path):
    cfg = load_config(config, ["SCENARIO.PHASES", "[[cat, dog], [bus]]", "SOLVER.BASE_LR", "3e-4"])
    dumped = tmp_path / "config.yaml"
    dumped.write_text(cfg.dump())
    assert identity(load_config(str(dumped))) == identity(cfg)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        load_config(str(tmp_path / "none.yaml"))


def test_a_wrong_value_inside_a_list_is_located(config):
    with pytest.raises(
        InputError, match=r"SCENARIO\.PHASES\[0\]\[1\]: expected a text, got a list"
    ):
        check_keys(load_config(config, ["SCENARIO.PHASES", "[[cat, [dog]]]"]))
    with pytest.raises(InputError, match="give a list of categories for each phase"):
        check_keys(load_config(config, ["SCENARIO.PHASES", "[cat, dog]"]))


def test_a_schedule_counts_steps_and_milestones_in_epochs():
    stage = StageSchedule(epochs=10, drops=(4, 8))
    assert stage.steps(per_epoch=5) == 50
    assert stage.milestones(per_epoch=5) == (20, 40)
    assert StageSchedule(epochs=10, max_steps=7).steps(per_epoch=5) == 7
    assert StageSchedule(epochs=10, drops=(1, 8), max_steps=7).milestones(per_epoch=5) == (5,)
    assert StageSchedule(epochs=10, drops=(1, 8), max_steps=5).milestones(per_epoch=5) == ()


def test_a_tuple_may_be_written_as_detectron2_writes_it(config):
    cfg = load_config(config, ["DATASETS.TRAIN", "('a', 'b')", "DATASETS.TEST", "[c]"])
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("a", "b"), ("c",))


@pytest.mark.parametrize(
    ("precision", "device", "gpu", "found"),
    [
        ("high", "cuda", True, ("high", True)),
        ("highest", "cuda:1", True, ("highest", False)),
        ("", "cuda", True, ("highest", True)),
        ("high", "cpu", True, ("highest", True)),  # the digits of a CPU must not depend on it
        ("high", "cuda", False, ("highest", True)),  # the default on a machine without a GPU
    ],
)
def test_float32_precision_is_that_of_products_and_convolutions(
    precision, device, gpu, found, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    torch.set_float32_matmul_precision("highest")  # PyTorch's own; a fixture restores what was
    torch.backends.cudnn.allow_tf32 = True
    set_float32_precision(precision, device)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == found


def test_an_unknown_float32_precision_is_refused():
    cfg = default_config()
    cfg.FLOAT32_PRECISION = "tf32"
    with pytest.raises(InputError, match="FLOAT32_PRECISION takes highest, high, medium"):
        check_keys(cfg)


def test_the_config_of_a_weights_file_may_have_keys_of_a_method_that_are_gone():
    cfg = config_from_text("METHOD: {PSEUDO: {GONE: 1, K: 7}}\nINPUT: {FORMAT: RGB}\n", "a.pth")
    assert (cfg.METHOD.PSEUDO.K, cfg.INPUT.FORMAT) == (7, "RGB")
    with pytest.raises(InputError, match=r"in a.pth:\n.*unknown key MODEL\.GONE"):
        config_from_text("MODEL: {GONE: 1}\n", "a.pth")


def test_a_key_that_a_later_version_adds_leaves_runs_the_same(tiny_config, tmp_path):
    current = identity(tiny_config(tmp_path))
    before = {key: value for key, value in current.items() if key != "MODEL.DETR.QUERY_GROUPS"}
    assert differing(before, current) == []
    assert without_defaults(before) == without_defaults(current)
    set_now = {**current, "MODEL.DETR.QUERY_GROUPS": [-1]}
    assert differing(before, set_now) == [("MODEL.DETR.QUERY_GROUPS", [], [-1])]
    assert without_defaults(set_now) != without_defaults(current)
