import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling.backbone.resnet import BasicStem, ResNet

from cldetr.layers.cpu import can_fold, folded_features
from cldetr.modeling import make_small_resnet


def resnet(depth, norm="FrozenBN", freeze_at=2):
    stages = ResNet.make_default_stages(depth, norm=norm)
    model = ResNet(BasicStem(norm=norm), stages, out_features=["stem", "res2", "res4", "res5"])
    for module in model.modules():
        if isinstance(module, FrozenBatchNorm2d):
            for buffer in module.buffers():
                buffer.add_(torch.rand_like(buffer) * 0.4 - 0.1)
    return model.freeze(freeze_at).double()


@pytest.mark.parametrize("depth", [18, 50])
def test_folded_features_and_gradients_equal_detectron2s(depth):
    model = resnet(depth)
    assert can_fold(model)
    images = torch.randn(2, 3, 70, 61, dtype=torch.float64)
    gradients = []
    wanted = model(images)
    for features in (wanted, folded_features(model, images)):
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
        torch.testing.assert_close(folded_features(model, images)["res5"], wanted["res5"])


def test_only_standard_frozen_resnets_are_folded():
    assert not can_fold(make_small_resnet())
    assert not can_fold(resnet(18, norm="BN", freeze_at=0))
    assert not can_fold(torch.nn.Identity())


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
