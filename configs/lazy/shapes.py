"""The twin of configs/shapes.yaml."""

from detectron2.config import LazyCall as L

from cldetr.modeling.small_resnet import make_small_resnet

from .coco import method, model

__all__ = [
    "augmentation",
    "data",
    "method",
    "model",
    "optimizer",
    "runtime",
    "scenario",
    "schedule",
]

model.transformer.update(
    dim=64, heads=4, encoder_layers=2, decoder_layers=3, ffn_dim=128, dropout=0.0, levels=3
)
model.num_queries = 20
model.box_refine = True
model.backbone = L(make_small_resnet)(out_features=["res3", "res4", "res5"])
model.pixel_mean = [127.5, 127.5, 127.5]
model.pixel_std = [64.0, 64.0, 64.0]
data = dict(
    train=["datasets/shapes/annotations/instances_train.json:datasets/shapes/images/train"],
    test=["datasets/shapes/annotations/instances_val.json:datasets/shapes/images/val"],
)
scenario = dict(name="7+3", order="id")
optimizer = dict(lr=8e-4, backbone_factor=1.0, slow_factor=0.5, clip=0.5, batch=12)
augmentation = dict(short_sides=[], crop=0.0, test_short_side=0)
schedule = dict(
    first=dict(epochs=14, drops=[11]),
    train=dict(epochs=10, drops=[8]),
    calibrate=dict(epochs=8, lr_scale=0.1),
)
runtime = dict(output_dir="output/shapes", workers=0)
