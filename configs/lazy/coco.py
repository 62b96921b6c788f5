"""What the runs on COCO share: the data, the detector and the paper's method."""

from .deformable_detr_r50 import model

__all__ = ["dataloader", "method", "model", "train"]

dataloader = dict(
    train=dict(dataset=dict(names=["coco_2017_train"]), total_batch_size=32),
    test=dict(dataset=dict(names=["coco_2017_val"])),
)
method = dict(
    name="cldetr",
    pseudo=dict(select="topk", k=10, iou=0.7, soft=True),
    memory=dict(strategy="kl", budget=0.1, replay=True),
    calibrate=dict(complete=None),
)
train = dict(init_checkpoint="detectron2://ImageNetPretrained/torchvision/R-50.pkl")
