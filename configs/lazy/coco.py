"""What the COCO runs share: the paper's method and the ImageNet backbone."""

from .deformable_detr_r50 import model

__all__ = ["method", "model", "start"]

start = dict(weights="detectron2://ImageNetPretrained/torchvision/R-50.pkl")
method = dict(
    name="cldetr",
    pseudo=dict(select="topk", k=10, iou=0.7, soft=True),
    memory=dict(strategy="kl", budget=0.1, replay=True),
    calibrate=dict(complete=None),
)
