"""Small detectors and inputs that the modelling tests share."""

import importlib.util
from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances

import cldetr.modeling  # noqa: F401 (registers)
from cldetr.config import load_config
from cldetr.modeling.config import add_model_config


def tiny_config(arch="DeformableDETR", **detr):
    """A detector of full structure and little width, on a ResNet-50 of little width."""
    cfg = get_cfg()
    add_model_config(cfg)
    cfg.MODEL.META_ARCHITECTURE = arch
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.PIXEL_MEAN = [123.675, 116.28, 103.53]
    cfg.MODEL.PIXEL_STD = [58.395, 57.12, 57.375]
    cfg.INPUT.FORMAT = "RGB"
    cfg.MODEL.BACKBONE.NAME = "build_resnet_backbone"
    cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res3", "res4", "res5"]
    cfg.MODEL.RESNETS.STEM_OUT_CHANNELS = 8
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 16
    cfg.MODEL.RESNETS.WIDTH_PER_GROUP = 4
    settings = {
        "NUM_CLASSES": 7,
        "NUM_QUERIES": 20,
        "HIDDEN_DIM": 64,
        "HEADS": 4,
        "ENC_LAYERS": 2,
        "DEC_LAYERS": 3,
        "FFN_DIM": 48,
        "DROPOUT": 0.0,
    }
    cfg.MODEL.DETR.merge_from_other_cfg(CfgNode(settings | detr))
    return cfg


def randomise(model):
    """Moves every weight off its initial value, so that no part of the model is idle."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.backbone.buffers()]:
            if tensor.dtype.is_floating_point:
                noise = torch.rand(tensor.shape, generator=generator) - 0.5
                tensor += noise * (0.2 if tensor.dim() == 1 else 0.1)
    return model


@pytest.fixture(name="tiny_config")
def _tiny_config():
    return tiny_config


@pytest.fixture(name="example")
def _example():
    return example


@pytest.fixture(scope="session")
def config_file():
    """Reads a file of `configs`."""

    def read(name):
        cfg = load_config(str(Path(__file__).parents[2] / "configs" / name))
        cfg.MODEL.DEVICE = "cpu"
        cfg.MODEL.DETR.NUM_CLASSES = 80
        return cfg

    return read


@pytest.fixture
def build():
    """Builds a tiny detector; `randomised` is for comparing numbers."""

    def make(randomised=True, arch="DeformableDETR", **detr):
        model = build_model(tiny_config(arch, **detr))
        return randomise(model) if randomised else model

    return make


def example(height, width, boxes, classes=7, seed=0):
    """One entry of a batch in Detectron2's form, with `boxes` random objects."""
    generator = torch.Generator().manual_seed(seed + height * 1000 + width)
    instances = Instances((height, width))
    scale = torch.tensor([width, height, width, height])
    low = torch.rand(boxes, 2, generator=generator) * 0.6
    size = torch.rand(boxes, 2, generator=generator) * 0.35 + 0.03
    instances.gt_boxes = Boxes(torch.cat([low, low + size], dim=1) * scale)
    instances.gt_classes = torch.randint(0, classes, (boxes,), generator=generator)
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)
    return {"image": image, "instances": instances, "height": height, "width": width}


@pytest.fixture
def batch():
    """Three images of odd and different sizes, one of them without objects."""
    return [example(97, 130, 4), example(128, 75, 0), example(61, 90, 6)]


@pytest.fixture(scope="session")
def hugging_face():
    """The module `benchmarks/hugging_face.py`."""
    pytest.importorskip("transformers")
    path = Path(__file__).parents[2] / "benchmarks" / "hugging_face.py"
    spec = importlib.util.spec_from_file_location("hugging_face", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
