"""Detectors, matching and losses; knows nothing of data, methods or phases.

Importing this package registers its meta-architectures and backbones with Detectron2.
"""

from cldetr.modeling.deformable_detr import DeformableDETR
from cldetr.modeling.detr import DETR
from cldetr.modeling.huggingface import HuggingFaceDetector
from cldetr.modeling.small_resnet import make_small_resnet
from cldetr.modeling.torchvision_backbone import TorchvisionBackbone

__all__ = [
    "DETR",
    "DeformableDETR",
    "HuggingFaceDetector",
    "TorchvisionBackbone",
    "make_small_resnet",
]
