"""LazyConfigs: twins of the YAML files, and overrides that cannot create or run anything."""

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances

from cldetr.config import identity, load_config, method_of, schedule_of
from cldetr.config_files import find_config
from cldetr.data.audit import setting_warnings
from cldetr.engine.resolve import resolve
from cldetr.errors import InputError
from cldetr.lazy import _KEYS
from cldetr.settings import Schedule, StageSchedule


def lazy(name, *overrides):
    return load_config(str(find_config(f"lazy/{name}.py")), overrides)


def build(cfg, num_classes=10):
    cfg.MODEL.DETR.NUM_CLASSES = num_classes
    cfg.MODEL.DEVICE = "cpu"
    return build_model(cfg)


@pytest.mark.parametrize("name", ["shapes", "70_10"])
def test_twins_start_with_the_same_weights_and_losses(name):
    losses, states = [], []
    image = torch.randint(0, 255, (3, 64, 96), dtype=torch.uint8)
    instances = Instances((64, 96))
    instances.gt_boxes = Boxes(torch.tensor([[5.0, 6, 40, 50]]))
    instances.gt_classes = torch.tensor([2])
    for cfg in (load_config(str(find_config(name))), lazy(name)):
        torch.manual_seed(0)
        detector = build(cfg).train()
        states.append(detector.state_dict())
        torch.manual_seed(1)
        losses.append(detector([{"image": image, "instances": instances}]))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["custom", "custom_small"])
def test_twins_for_own_data_choose_the_same_from_the_data(name, tiny_config, tmp_path):
    data = tiny_config(tmp_path).DATASETS
    words = [f"DATASETS.{part} ['{data[part][0]}']".split(" ", 1) for part in ("TRAIN", "TEST")]
    words += [("SCENARIO.NAME", "3+1"), ("MODEL.DEVICE", "cpu")]
    keys = {key: name for name, key in _KEYS.items()} | {"SCENARIO.NAME": "scenario.name"}
    plain = load_config(str(find_config(name)), [word for pair in words for word in pair])
    twin = lazy(name, *(f"{keys[key]}={value}" for key, value in words))
    found, settings = [], []
    for cfg in (plain, twin):
        cfg, _ = resolve(cfg)
        found.append({key: x.shape for key, x in build_model(cfg).state_dict().items()})
        settings.append(
            {key: x for key, x in identity(cfg).items() if not key.startswith(("MODEL.", "LAZY."))}
        )
    assert settings[0] == settings[1]
    assert (settings[0]["SOLVER.IMS_PER_BATCH"], settings[0]["INPUT.MIN_SIZE_TEST"]) == (4, 64)
    assert found[0] == found[1]  # as many queries, too
    assert twin.LAZY.model.num_queries == -1
    assert found[1]["query_embed.weight"][0] == 20


def test_a_lazy_model_with_too_few_queries_is_warned_of(tiny_config, tmp_path):
    data = tiny_config(tmp_path).DATASETS.TRAIN[0]
    words = [f"dataloader.train.dataset.names=['{data}']", "scenario.name=3+1"]
    words += [f"dataloader.test.dataset.names=['{data}']", "train.device=cpu"]
    said = []
    for queries in (1, 20):
        cfg, found = resolve(lazy("shapes", *words, f"model.num_queries={queries}"))
        said.append("\n".join(setting_warnings(found.scenario, found.train, cfg)))
    assert "more objects than the detector has queries (1)" in said[0]
    assert "queries" not in said[1]


def test_overrides_change_what_exists():
    cfg = lazy(
        "shapes",
        *("dataloader.train.total_batch_size=4", "model.num_queries=7"),
        *("train.accumulate=2", "train.seed=3", "optimizer.lr=4e-4", "solver.gamma=0.2"),
    )
    assert (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATE, cfg.SEED) == (4, 2, 3)
    assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.GAMMA) == (4e-4, 0.2)
    assert build(cfg, 3).num_queries == 7


@pytest.mark.parametrize("text", ["scenario.name=7", "scenario.name='7'"])
def test_a_text_that_looks_like_a_number_stays_a_text(text):
    assert lazy("shapes", text).SCENARIO.NAME == "7"
    assert lazy("shapes", "train.output_dir=2024").OUTPUT_DIR == "2024"


def test_overrides_reach_settings_that_the_file_leaves_at_their_defaults():
    cfg = lazy("70_10", "schedule.calibrate.epochs=2", "method.pseudo.score=0.2")
    schedule, method = schedule_of(cfg), method_of(cfg)
    assert schedule.train == Schedule().train
    assert schedule.calibrate == StageSchedule(2.0, lr_scale=0.1)
    assert (method.pseudo.score, method.pseudo.k) == (0.2, 10)


def test_parts_of_a_method_that_a_file_does_not_name_are_off(tmp_path):
    path = tmp_path / "method.py"
    path.write_text(
        "from cldetr.config_files import CONFIGS\n"
        "from detectron2.config import LazyConfig\n"
        "model = LazyConfig.load(str(CONFIGS / 'lazy/shapes.py')).model\n"
        "method = dict(pseudo=dict(k=3), memory={}, calibrate=dict(complete={}))\n"
    )
    method = method_of(load_config(str(path)))
    assert (method.name, method.pseudo.k, method.pseudo.iou) == ("finetune", 3, 0.7)
    assert (method.memory.budget, method.distill) == (0.1, None)
    assert method.calibrate.complete.foreground == 0.2
    assert method_of(load_config(str(path), ["method.calibrate=null"])).calibrate is None
    path.write_text(path.read_text().replace("k=3", "kk=3"))
    with pytest.raises(InputError, match=r"unknown key method\.pseudo\.kk; did you mean"):
        load_config(str(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "dataloader.train.total_batch_sise=4",
            r"did you mean dataloader\.train\.total_batch_size",
        ),
        ("model.num_querys=4", r"did you mean model\.num_queries"),
        ("modle.num_queries=4", r"did you mean model\.num_queries"),
        ("optimizer.lr", "key=value"),
        ("dataloader.train.total_batch_size=four", "takes a int"),
        ("model._target_=os.system", "may only name"),
        ("model.backbone={_target_: os.system, command: ls}", "may only name"),
    ],
)
def test_a_wrong_override_says_what_would_be_right(text, says):
    with pytest.raises(InputError, match=says):
        lazy("shapes", text)


def test_a_part_without_what_the_stage_sets_is_refused(tmp_path):
    path = tmp_path / "no_lr.py"
    path.write_text(
        "from cldetr.config_files import CONFIGS\n"
        "from detectron2.config import LazyCall as L, LazyConfig\n"
        "from torch.optim import SGD\n"
        "model = LazyConfig.load(str(CONFIGS / 'lazy/shapes.py')).model\n"
        "optimizer = L(SGD)(lr=0.1)\n"
    )
    from cldetr.engine import IncrementalTrainer

    cfg = load_config(str(path))
    with pytest.raises(InputError, match=r"optimizer has no params"):
        IncrementalTrainer.build_optimizer(cfg, torch.nn.Linear(2, 2))
