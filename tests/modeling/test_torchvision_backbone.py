"""torchvision's networks as backbones: the same maps, the same names of weights."""

import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from torchvision.models import get_model
from torchvision.models.feature_extraction import create_feature_extractor

from cldetr.config import load_config
from cldetr.config_files import find_config
from cldetr.engine.initial_weights import initialise
from cldetr.errors import InputError
from cldetr.modeling import TorchvisionBackbone

# The node of torchvision's graph behind each output.
NODES = {
    "resnet18": {"layer2": "stride8", "layer3": "stride16", "layer4": "stride32"},
    "mobilenet_v3_large": {
        "features.6": "stride8",
        "features.12": "stride16",
        "features.16": "stride32",
    },
    "convnext_tiny": {"features.3": "stride8", "features.5": "stride16", "features.7": "stride32"},
    "regnet_y_400mf": {
        "trunk_output.block2": "stride8",
        "trunk_output.block3": "stride16",
        "trunk_output.block4": "stride32",
    },
}


def random_model(name):
    """A network whose norms have statistics other than those of their initialisation."""
    torch.manual_seed(0)
    model = get_model(name, weights=None).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 2.0)
    return model


@pytest.mark.parametrize("name", NODES)
def test_outputs_are_those_of_torchvisions_graph_with_its_weights(name):
    model = random_model(name)
    backbone = TorchvisionBackbone(name)
    missing, _ = backbone.load_state_dict(model.state_dict(), strict=False)
    assert not missing  # every parameter has torchvision's name
    image = torch.rand(2, 3, 96, 64)
    expected = create_feature_extractor(model, NODES[name])(image)
    found = backbone.train()(image)  # frozen norms compute the same in training
    assert list(found) == ["stride8", "stride16", "stride32"]
    for stride, features in found.items():
        torch.testing.assert_close(features, expected[stride], rtol=1e-4, atol=1e-5)
        shape = backbone.output_shape()[stride]
        assert features.shape[1:] == (shape.channels, 96 // shape.stride, 64 // shape.stride)


def test_parts_up_to_a_stride_can_be_frozen_and_norms_trained():
    backbone = TorchvisionBackbone("resnet18", freeze_at=2)
    trained = {name.split(".")[0] for name, p in backbone.named_parameters() if p.requires_grad}
    assert trained == {"layer2", "layer3", "layer4"}
    assert not any(isinstance(x, torch.nn.BatchNorm2d) for x in backbone.modules())
    free = TorchvisionBackbone("resnet18", norm="BN")
    assert not any(isinstance(x, FrozenBatchNorm2d) for x in free.modules())
    assert all(p.requires_grad for p in free.parameters())


def test_what_lies_behind_the_coarsest_output_is_not_trained():
    backbone = TorchvisionBackbone("resnet18", ["stride8"])
    backbone(torch.rand(1, 3, 64, 64))["stride8"].sum().backward()
    without = [
        name for name, p in backbone.named_parameters() if p.requires_grad and p.grad is None
    ]
    assert not without


def build(**keys):
    overrides = [word for key, value in keys.items() for word in (key.replace("__", "."), value)]
    cfg = load_config(
        str(find_config("deformable_detr_mobilenet")),
        ["MODEL.DETR.NUM_CLASSES", "3", "MODEL.DEVICE", "cpu", *overrides],
    )
    return build_model(cfg)


def test_weights_load_by_torchvisions_names_and_an_image_does_not_depend_on_its_batch(tmp_path):
    model = random_model("mobilenet_v3_large")
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    detector = build().eval()
    initialise(detector, str(tmp_path / "weights.pth"))
    name = "features.4.block.1.0.weight"
    assert torch.equal(detector.backbone.state_dict()[name], model.state_dict()[name])
    images = [
        torch.randint(0, 255, (3, *size), dtype=torch.uint8) for size in ((97, 70), (64, 130))
    ]
    with torch.no_grad():
        both = detector.predict(detector.preprocess([{"image": image} for image in images]))
        alone = detector.predict(detector.preprocess([{"image": images[0]}]))
    torch.testing.assert_close(both.boxes[:, :1], alone.boxes, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"MODEL__TORCHVISION__NAME": "mobilnet_v3_large"}, "do you mean mobilenet_v3_large"),
        ({"MODEL__TORCHVISION__NAME": "swin_t"}, "no feature maps of several resolutions"),
        ({"MODEL__TORCHVISION__NAME": "vit_b_16"}, "vit_b_16 has no stride8"),
        (
            {"MODEL__DETR__IN_FEATURES": "[res3]"},
            "has no res3: choose MODEL.DETR.IN_FEATURES among",
        ),
        ({"MODEL__TORCHVISION__NORM": "GN"}, "takes FrozenBN or BN"),
    ],
)
def test_what_cannot_be_a_backbone_is_refused_by_name(keys, message):
    with pytest.raises(InputError, match=message):
        build(**keys)


def test_unknown_weights_of_torchvision_are_an_error(tmp_path):
    with pytest.raises(InputError, match="cannot get the weights torchvision://Nothing"):
        initialise(build(), "torchvision://Nothing_Weights.V1")
