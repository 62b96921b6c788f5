"""The split of every config for COCO, audited on the real boxes of val2017."""

import functools

import numpy as np
import pytest

from cldetr.config import method_of, scenario_settings
from cldetr.config_files import compose, config_files, named_runs
from cldetr.data.audit import audit_scenario
from cldetr.data.exemplars import STRATEGIES, phase_budget, resolve_budget
from cldetr.data.memory import phase_counts
from cldetr.engine.rundata import RunData
from cldetr.published import find_published
from cldetr.scenario import images_with
from cldetr.settings import add_keys

from .coco_files import VAL2017_BOXES

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not VAL2017_BOXES.exists(),
        reason="needs CLDETR_SHARED_DATA, a folder with coco_val2017: the boxes of val2017",
    ),
]
SIZES = {
    "70+10": [70, 10],
    "40+40": [40, 40],
    "40+20x2": [40, 20, 20],
    "40+10x4": [40, 10, 10, 10, 10],
    "80": [80],
}


def coco_configs():
    """Names of all configs that train on COCO: runs, and files that are whole configs."""
    whole = [name for name, path in config_files().items() if path.parent.name == "configs"]
    names = [name for name in (*whole, *named_runs()) if name != "add"]  # its data are the user's
    return [name for name in names if compose([name]).DATASETS.TRAIN[0] == "coco_2017_train"]


@functools.cache
def split(settings):
    """The data of a run with these settings of the scenario, on val2017."""
    cfg = compose(["70_10"])
    add_keys(cfg.SCENARIO, settings)
    reference = f"{VAL2017_BOXES}:{VAL2017_BOXES.parent}"
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = [reference]
    cfg.DATASETS.BAD_BOXES = "drop"  # rounded to integers, one box has no width
    return RunData(cfg)


def run_data(name):
    cfg = compose([name])
    return cfg, split(scenario_settings(cfg))


@pytest.mark.parametrize("name", coco_configs())
def test_a_configs_split_is_its_protocols(name):
    cfg, data = run_data(name)
    scenario, coco = data.scenario, data.train["base"]
    audit = audit_scenario(scenario, data.train)
    wanted = scenario_settings(cfg)

    sizes = SIZES.get(wanted.name) or [len(x) for x in find_published(wanted.name).phases]
    assert [len(phase.classes) for phase in scenario.phases] == sizes
    assert sorted(scenario.seen(len(sizes))) == list(range(80))
    assert audit["classes_never_learnt"] == []
    if wanted.protocol != "loco":  # a rare class may lose its few images to other phases
        assert audit["classes_without_instances"] == []

    images = [phase.image_ids for phase in scenario.phases]
    distinct = {image for ids in images for image in ids}
    if wanted.protocol == "strict":
        assert audit["overlap"] == []
        assert sum(map(len, images)) == len(distinct)
        lost = len(sizes) - 1 if wanted.order == "released" else 0
        assert len(coco.image_ids) - lost <= len(distinct)
        for ids, size in zip(images, sizes, strict=True):
            assert len(ids) == pytest.approx(len(coco.image_ids) * size / 80, abs=1)
    elif wanted.protocol == "loco":
        assert audit["overlap"] == []
        assert sum(map(len, images)) == len(distinct) == len(images_with(coco, range(80)))
        for phase in scenario.phases:
            own = coco.image_ids[images_with(coco, phase.classes)]
            assert set(phase.image_ids) <= set(own.tolist())
    else:
        for phase in scenario.phases:
            own = coco.image_ids[images_with(coco, phase.classes)]
            assert sorted(phase.image_ids) == np.sort(own).tolist()
        assert len(audit["overlap"]) == len(sizes) * (len(sizes) - 1) // 2
        assert len(distinct) == len(images_with(coco, range(80)))
    for phase in audit["phases"]:
        assert phase["annotated"] + phase["empty"] == phase["images"]


@pytest.mark.parametrize("name", [x for x in coco_configs() if method_of(compose([x])).memory])
def test_a_configs_exemplars_are_its_share_of_the_data_set(name):
    cfg, data = run_data(name)
    scenario, rule = data.scenario, method_of(cfg).memory
    share = phase_budget(rule.budget, scenario)
    numbers = [resolve_budget(share, len(phase.image_ids)) for phase in scenario.phases]
    distinct = {image for phase in scenario.phases for image in phase.image_ids}
    assert sum(numbers) == pytest.approx(rule.budget * len(distinct), abs=len(numbers))


@pytest.mark.parametrize("name", ["70_10", "70_10_traditional", "70_10_released"])
def test_exemplars_are_of_their_phase_and_as_many_as_the_budget(name):
    cfg, data = run_data(name)
    rule = method_of(cfg).memory
    share = phase_budget(rule.budget, data.scenario)
    for phase in data.scenario.phases:
        counts = phase_counts(data.scenario, phase.index, data.train["base"])
        selection = STRATEGIES[rule.strategy].choose(counts, share)
        assert len(set(selection.indices.tolist())) == len(selection.indices)
        wanted = round(share * len(phase.image_ids))
        if rule.strategy == "kl":
            assert len(selection.indices) == pytest.approx(wanted, abs=1)
            assert selection.kl[-1] < 0.01  # the marginals of the phase, nearly
        else:  # the released code drops images without a label
            assert 0 < len(selection.indices) < wanted
