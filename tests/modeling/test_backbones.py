import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from detectron2.modeling.backbone.resnet import BasicStem, ResNet

from cldetr.errors import InputError
from cldetr.layers.cpu import can_fold, fold_norms, fold_norms_, folded_features
from cldetr.methods.learner import freeze
from cldetr.modeling import detector, make_small_resnet


def resnet(depth, norm="FrozenBN", freeze_at=2):
    stages = ResNet.make_default_stages(depth, norm=norm)
    model = ResNet(BasicStem(norm=norm), stages, out_features=["stem", "res2", "res4", "res5"])
    for module in model.modules():
        if isinstance(module, FrozenBatchNorm2d):
            for buffer in module.buffers():
                buffer.add_(torch.rand_like(buffer) * 0.4 - 0.1)
    return model.freeze(freeze_at).double()


def folded(model, images):
    return folded_features(model, fold_norms(model), images)


@pytest.mark.parametrize("depth", [18, 50])
def test_folded_features_and_gradients_equal_detectron2s(depth):
    model = resnet(depth)
    assert can_fold(model)
    images = torch.randn(2, 3, 70, 61, dtype=torch.float64)
    gradients = []
    wanted = model(images)
    for features in (wanted, folded(model, images)):
        assert features.keys() == wanted.keys()
        for name, feature in features.items():
            torch.testing.assert_close(feature, wanted[name])
        model.zero_grad()
        sum(x.square().mean() for x in features.values()).backward()
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        )
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
    with torch.no_grad():
        torch.testing.assert_close(folded(model, images)["res5"], wanted["res5"])
        fold_norms_(model)
        torch.testing.assert_close(folded(model, images)["res5"], wanted["res5"])
        torch.testing.assert_close(model(images)["res5"], wanted["res5"])
    assert not any(isinstance(module, FrozenBatchNorm2d) for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_folded_weights_are_converted_once_under_autocast():
    model = resnet(18).float()
    images = torch.randn(1, 3, 64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {w.dtype for pair in fold_norms(model).values() for w in pair} == {torch.bfloat16}
        found = folded(model, images)["res5"]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), model(images)["res5"], rtol=0.1, atol=0.1)


def test_a_frozen_detector_is_folded_and_predicts_the_same(build, batch):
    model = build()
    frozen = freeze(model, range(7))
    assert any(isinstance(module, FrozenBatchNorm2d) for module in model.modules())
    assert not any(isinstance(module, FrozenBatchNorm2d) for module in frozen.modules())
    assert not frozen.training
    images = model.preprocess(batch)
    with torch.no_grad():
        wanted, found = model.eval().predict(images), frozen.predict(images)
    torch.testing.assert_close(found.logits, wanted.logits)
    torch.testing.assert_close(found.boxes, wanted.boxes)


def test_norms_are_folded_once_for_all_sizes_of_a_batch(build, batch, monkeypatch):
    calls = []
    monkeypatch.setattr(detector, "fold_norms", lambda x: calls.append(x) or fold_norms(x))
    model = build(randomised=False)
    images = model.preprocess(batch)
    assert len(set(images.sizes)) > 1
    model.predict(images)
    assert calls == [model.backbone]


@pytest.mark.parametrize("norm", ["SyncBN", "naiveSyncBN"])
def test_synchronised_norms_are_refused_where_sizes_pass_one_by_one(tiny_config, norm):
    cfg = tiny_config()
    cfg.MODEL.RESNETS.NORM = norm
    with pytest.raises(InputError, match="EXACT_PADDING False"):
        build_model(cfg)
    cfg.MODEL.DETR.EXACT_PADDING = False
    build_model(cfg)


def test_only_standard_frozen_resnets_are_folded():
    assert not can_fold(make_small_resnet())
    assert not can_fold(resnet(18, norm="BN", freeze_at=0))
    assert not can_fold(torch.nn.Identity())
    other = resnet(18)
    other.stem.conv1.norm.eps = 1e-3
    assert not can_fold(other)


def test_small_resnet_halves_the_resolution_at_every_stage():
    features = make_small_resnet(out_features=("res2", "res3", "res4", "res5"))(
        torch.randn(1, 3, 64, 96)
    )
    shapes = {name: tuple(feature.shape[1:]) for name, feature in features.items()}
    assert shapes == {
        "res2": (32, 16, 24),
        "res3": (64, 8, 12),
        "res4": (96, 4, 6),
        "res5": (128, 2, 3),
    }
    with pytest.raises(ValueError, match="change their width"):
        make_small_resnet(channels=(32, 64, 64, 128))
