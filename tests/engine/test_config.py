"""Configs: unknown keys told with the right one, types checked, nothing executed."""

import pytest

from cldetr.config import load_config
from cldetr.engine.from_yaml import recipe_from_cfg, recipe_from_yaml
from cldetr.engine.recipe import Schedule, StageSchedule
from cldetr.engine.settings import build_settings
from cldetr.errors import InputError
from cldetr.methods.method import Method


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("SCENARIO: {NAME: '40+40'}\nSCHEDULE: {TRAIN: {EPOCHS: 3}}\n")
    return str(path)


def test_a_file_and_overrides_become_a_recipe(config):
    recipe = recipe_from_yaml(config, ["METHOD.PSEUDO.K", "5", "SOLVER.BASE_LR", "1e-3"])
    assert recipe.scenario.name == "40+40"
    assert recipe.schedule.train.epochs == 3.0
    assert recipe.method.pseudo.k == 5
    assert recipe.optimizer.lr == 1e-3


def test_a_text_on_the_command_line_stays_a_text(config):
    recipe = recipe_from_yaml(config, ["MODEL.WEIGHTS", "", "OUTPUT_DIR", "12"])
    assert recipe.model.weights == ""
    assert recipe.runtime.output_dir == "12"


def test_the_defaults_are_the_papers(config):
    recipe = recipe_from_yaml(config, ["SCENARIO.NAME", "70+10", "SCHEDULE.TRAIN.EPOCHS", "40"])
    assert recipe.schedule == Schedule()
    assert (recipe.method.pseudo.k, recipe.method.pseudo.iou) == (10, 0.7)
    assert recipe.method.pseudo.soft
    assert recipe.method.memory.budget == 0.1
    assert recipe.method.calibrate.complete is None
    assert recipe.optimizer.batch == 32


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("METHOD.PSUEDO.K", "5", "did you mean METHOD.PSEUDO.K"),
        ("SOLVER.BASE_LRR", "1", "did you mean SOLVER.BASE_LR"),
        ("SCHEDULE.TRAIN.EPOCHS", "many", "takes a float such as 3.0, not 'many'"),
        ("METHOD.UNSEEN", "forget", "one of 'mask', 'negative'"),
        ("METHOD.PSEUDO.SELECT", "best", "topk, threshold"),
        ("METHOD.MEMORY.ENABLED", "False", "calibration needs exemplars"),
    ],
)
def test_a_wrong_override_says_what_would_be_right(config, key, value, says):
    with pytest.raises(InputError, match=says):
        recipe_from_yaml(config, [key, value])


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
    plain = recipe_from_yaml(config)
    assert recipe_from_yaml(config, ["SEED", "1"]).fingerprint() != plain.fingerprint()
    assert (
        recipe_from_yaml(config, ["DATALOADER.NUM_WORKERS", "7"]).fingerprint()
        == plain.fingerprint()
    )


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        load_config(str(tmp_path / "none.yaml"))


def test_settings_are_built_from_nested_plain_data():
    method = build_settings(
        Method, {"name": "x", "pseudo": {"k": 3}, "memory": {}, "calibrate": {}}, "method"
    )
    assert method.pseudo.k == 3
    assert method.calibrate.complete is None
    with pytest.raises(InputError, match=r"unknown key method\.pseudo\.kk; did you mean k"):
        build_settings(Method, {"pseudo": {"kk": 3}}, "method")


def test_the_learning_rate_follows_from_the_step_alone():
    stage = StageSchedule(epochs=10, drops=(4, 8), lr_scale=0.5)
    factors = [stage.lr_factor(step, per_epoch=5) for step in (0, 19, 20, 39, 40)]
    assert factors == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005])
    assert stage.steps(per_epoch=5) == 50
    assert StageSchedule(epochs=10, max_steps=7).steps(per_epoch=5) == 7


def test_the_config_of_every_file_in_the_repository_is_valid(request):
    folder = request.config.rootpath / "configs"
    files = sorted(path for path in folder.rglob("*.yaml") if path.parent.name != "base")
    assert files
    for path in files:
        recipe_from_cfg(load_config(str(path)))
