"""Where a run starts from: backbones, whole detectors, and what does not fit."""

import pytest
import torch
from detectron2.modeling import build_model

from cldetr.engine.checkpoint import save_state
from cldetr.engine.initial_weights import initialise, load_trained_detector
from cldetr.engine.rundata import RunData
from cldetr.errors import InputError


@pytest.fixture
def detector(tiny_config, tmp_path):
    cfg = tiny_config(tmp_path)
    cfg.MODEL.DETR.NUM_CLASSES = 4
    return build_model(cfg)


def other(detector, seed=1):
    """The same keys with other numbers."""
    torch.manual_seed(seed)
    return {key: torch.randn(value.shape).to(value) for key, value in detector.state_dict().items()}


def test_no_weights_leave_everything_as_initialised(detector):
    before = {key: value.clone() for key, value in detector.state_dict().items()}
    initialise(detector, "")
    assert all(torch.equal(value, before[key]) for key, value in detector.state_dict().items())


@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_a_backbone_file_fills_the_backbone_alone(detector, tmp_path, prefix):
    weights = {
        key.replace("backbone.", prefix): value
        for key, value in other(detector).items()
        if key.startswith("backbone.")
    }
    head = detector.state_dict()["class_embed.0.weight"].clone()
    save_state(tmp_path / "backbone.pth", {"model": weights})
    initialise(detector, str(tmp_path / "backbone.pth"))
    found = detector.state_dict()
    assert torch.equal(found["backbone.stem.conv1.weight"], weights[f"{prefix}stem.conv1.weight"])
    assert torch.equal(found["class_embed.0.weight"], head)


def test_a_backbone_of_another_shape_is_refused(detector, tmp_path):
    save_state(tmp_path / "backbone.pth", {"model": {"stem.conv1.weight": torch.zeros(3, 3)}})
    with pytest.raises(InputError, match="do not fit"):
        initialise(detector, str(tmp_path / "backbone.pth"))


def test_a_pre_trained_detector_without_class_head_keeps_the_new_head(detector, tmp_path):
    weights = {k: v for k, v in other(detector).items() if not k.startswith("class_embed.")}
    head = detector.state_dict()["class_embed.0.weight"].clone()
    save_state(tmp_path / "up.pth", {"model": weights})
    initialise(detector, str(tmp_path / "up.pth"))
    found = detector.state_dict()
    assert torch.equal(found["query_embed.weight"], weights["query_embed.weight"])
    assert torch.equal(found["class_embed.0.weight"], head)


TWO_STAGE = ["MODEL.DETR.TWO_STAGE", "True"]
DETR = [
    *("MODEL.META_ARCHITECTURE", "DETR", "MODEL.DETR.IN_FEATURES", "['res5']"),
    *("MODEL.RESNETS.OUT_FEATURES", "['res5']", "MODEL.DETR.LEVELS", "4"),
    *("MODEL.DETR.WITH_BOX_REFINE", "False"),
]


@pytest.mark.parametrize("words", [[], TWO_STAGE, DETR], ids=["plain", "two_stage", "detr"])
def test_a_detector_of_other_classes_brings_all_but_their_rows(tiny_config, tmp_path, words):
    cfg = tiny_config(tmp_path, *words)
    weights = {}
    for classes in (6, 4):  # the one that is given, and the one that starts from it
        cfg.MODEL.DETR.NUM_CLASSES = classes
        torch.manual_seed(classes)
        detector = build_model(cfg)
        if classes == 6:
            weights = other(detector)
            save_state(tmp_path / "six.pth", {"model": weights})
    fresh = {key: value.clone() for key, value in detector.state_dict().items()}
    initialise(detector, str(tmp_path / "six.pth"))
    head = detector.class_parameters()
    for key, value in detector.state_dict().items():
        if key == "visible_classes":
            continue
        if key not in head:
            assert torch.equal(value, weights[key])
            continue
        kept = {0} if key in detector.proposal_parameters() else set()
        for row in range(4):
            assert torch.equal(value[row], (weights if row in kept else fresh)[key][row])
        if words == DETR:
            assert torch.equal(value[4], weights[key][6])  # no-object


def test_half_a_detector_is_refused(detector, tmp_path):
    weights = {k: v for k, v in other(detector).items() if not k.startswith("bbox_embed.")}
    save_state(tmp_path / "half.pth", {"model": weights})
    with pytest.raises(InputError, match="missing: bbox_embed"):
        initialise(detector, str(tmp_path / "half.pth"))


def test_a_head_with_other_rows_than_its_categories_is_refused(tiny_config, detector, tmp_path):
    scenario = RunData(tiny_config(tmp_path)).scenario
    names = [scenario.categories[label].name for label in scenario.phases[0].classes]
    weights = other(detector)  # rows for four categories
    meta = {"categories": [{"id": i, "name": name} for i, name in enumerate(names)]}
    save_state(tmp_path / "rows.pth", {"model": weights, "cldetr": meta})
    with pytest.raises(InputError, match="has 4 rows for 3 categories"):
        load_trained_detector(detector, str(tmp_path / "rows.pth"), scenario)
    for key in detector.class_parameters():
        weights[key] = weights[key][:3]
    save_state(tmp_path / "fits.pth", {"model": weights, "cldetr": meta})
    load_trained_detector(detector, str(tmp_path / "fits.pth"), scenario)
    labels = list(scenario.phases[0].classes)
    for key in detector.class_parameters():
        assert torch.equal(detector.state_dict()[key][labels], weights[key]), key
