"""The twin of configs/shapes.yaml."""

from detectron2.config import LazyCall as L

from cldetr.modeling.small_resnet import make_small_resnet

from .coco import dataloader, method, model

__all__ = ["dataloader", "input", "method", "model", "optimizer", "scenario", "schedule", "train"]

model.transformer.update(
    dim=64, heads=4, encoder_layers=2, decoder_layers=3, ffn_dim=128, dropout=0.0, levels=3
)
model.num_queries = 20
model.box_refine = True
model.backbone = L(make_small_resnet)(out_features=["res3", "res4", "res5"])
model.pixel_mean = [127.5, 127.5, 127.5]
model.pixel_std = [64.0, 64.0, 64.0]
dataloader.train.dataset.names = [
    "datasets/shapes/annotations/instances_train.json:datasets/shapes/images/train"
]
dataloader.train.total_batch_size = 12
dataloader.train.num_workers = 0
dataloader.test.dataset.names = [
    "datasets/shapes/annotations/instances_val.json:datasets/shapes/images/val"
]
input = dict(min_size_train=[0], min_size_test=0, crop=dict(enabled=False))
scenario = dict(name="7+3", order="id")
optimizer = dict(
    lr=8e-4,
    backbone_multiplier=1.0,
    lr_multipliers=[["sampling_offsets", 0.5], ["reference_points", 0.5]],
)
schedule = dict(
    first=dict(epochs=14, drops=[11]),
    train=dict(epochs=10, drops=[8]),
    calibrate=dict(epochs=8, lr_scale=0.1),
)
train = dict(output_dir="output/shapes", clip_grad=dict(max_norm=0.5))
