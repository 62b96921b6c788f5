"""LazyConfigs: twins of the YAML files, and overrides that cannot create or run anything."""

import pytest
import torch
from cldetr.engine.from_lazy import recipe_from_lazy
from cldetr.engine.from_yaml import recipe_from_yaml
from cldetr.engine.recipe import Schedule, StageSchedule
from detectron2.structures import Boxes, Instances

from cldetr.errors import InputError

TWINS = ["shapes", "70_10", "40_40", "40_20x2", "40_10x4"]


@pytest.fixture
def configs(request):
    return request.config.rootpath / "configs"


def twins(configs, name):
    return (
        recipe_from_yaml(str(configs / f"{name}.yaml")),
        recipe_from_lazy(str(configs / "lazy" / f"{name}.py")),
    )


@pytest.mark.parametrize("name", TWINS)
def test_twins_have_the_same_settings(configs, name):
    identities = [recipe.identity() for recipe in twins(configs, name)]
    for identity in identities:
        del identity["model"]["description"]  # the same model, told in two languages
    assert identities[0] == identities[1]


@pytest.mark.parametrize("name", ["shapes", "70_10"])
def test_twins_start_with_the_same_weights_and_losses(configs, name):
    losses, states = [], []
    image = torch.randint(0, 255, (3, 64, 96), dtype=torch.uint8)
    instances = Instances((64, 96))
    instances.gt_boxes = Boxes(torch.tensor([[5.0, 6, 40, 50]]))
    instances.gt_classes = torch.tensor([2])
    for recipe in twins(configs, name):
        torch.manual_seed(0)
        detector = recipe.model.build(10).train()
        states.append(detector.state_dict())
        torch.manual_seed(1)
        losses.append(detector([{"image": image, "instances": instances}]))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert losses[0] == losses[1]


def test_overrides_change_what_exists(configs):
    path = str(configs / "lazy/shapes.py")
    recipe = recipe_from_lazy(
        path, ["optimizer.batch=4", "model.num_queries=7", "optimizer.accumulate=2", "seed=3"]
    )
    assert (recipe.optimizer.batch, recipe.optimizer.accumulate, recipe.seed) == (4, 2, 3)
    assert recipe.model.build(3).num_queries == 7


def test_overrides_reach_settings_that_the_file_leaves_at_their_defaults(configs):
    path = str(configs / "lazy/70_10.py")
    recipe = recipe_from_lazy(path, ["schedule.calibrate.epochs=2", "method.pseudo.score=0.2"])
    assert recipe.schedule.train == Schedule().train
    assert recipe.schedule.calibrate == StageSchedule(2.0, lr_scale=0.1)
    assert (recipe.method.pseudo.score, recipe.method.pseudo.k) == (0.2, 10)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optimizer.bach=4", "did you mean batch"),
        ("model.num_querys=4", "did you mean num_queries"),
        ("modle.num_queries=4", "did you mean model"),
        ("optimizer.batch", "key=value"),
        ("optimizer.batch=four", "takes a int"),
        ("model._target_=os.system", "may only name"),
    ],
)
def test_a_wrong_override_says_what_would_be_right(configs, text, says):
    with pytest.raises(InputError, match=says):
        recipe_from_lazy(str(configs / "lazy/shapes.py"), [text])
