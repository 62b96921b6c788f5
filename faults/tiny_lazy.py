"""A LazyConfig of the tiny run's detector."""

from detectron2.config import LazyCall as L

from cldetr.modeling.classification import SigmoidFocal
from cldetr.modeling.criterion import SetCriterion
from cldetr.modeling.deformable_detr import DeformableDETR
from cldetr.modeling.deformable_transformer import DeformableTransformer
from cldetr.modeling.matcher import Matcher
from cldetr.modeling.small_resnet import make_small_resnet

model = L(DeformableDETR)(
    transformer=L(DeformableTransformer)(
        dim=32, heads=2, encoder_layers=1, decoder_layers=2, ffn_dim=32, levels=3
    ),
    num_queries=8,
    box_refine=True,
    backbone=L(make_small_resnet)(out_features=["res3", "res4", "res5"]),
    in_features=["res3", "res4", "res5"],
    criterion=L(SetCriterion)(matcher=L(Matcher)(classification=L(SigmoidFocal)())),
    num_classes=80,
    pixel_mean=[127.5, 127.5, 127.5],
    pixel_std=[64.0, 64.0, 64.0],
)
train = {"device": "cpu", "seed": 0}
