"""Deformable DETR on a ResNet-50, as the paper trains it: no box refinement, one stage."""

from detectron2.config import LazyCall as L
from detectron2.modeling.backbone.resnet import BasicStem, ResNet

from cldetr.modeling.classification import SigmoidFocal
from cldetr.modeling.criterion import SetCriterion
from cldetr.modeling.deformable_detr import DeformableDETR
from cldetr.modeling.deformable_transformer import DeformableTransformer
from cldetr.modeling.matcher import Matcher

model = L(DeformableDETR)(
    transformer=L(DeformableTransformer)(
        dim=256,
        heads=8,
        encoder_layers=6,
        decoder_layers=6,
        ffn_dim=1024,
        dropout=0.1,
        levels=4,
        encoder_points=4,
        decoder_points=4,
        two_stage=False,
        checkpointing=False,
    ),
    num_queries=300,
    box_refine=False,
    backbone=L(ResNet)(
        stem=L(BasicStem)(in_channels=3, out_channels=64, norm="FrozenBN"),
        stages=L(ResNet.make_default_stages)(depth=50, stride_in_1x1=False, norm="FrozenBN"),
        out_features=["res3", "res4", "res5"],
        freeze_at=2,
    ),
    in_features=["res3", "res4", "res5"],
    criterion=L(SetCriterion)(
        matcher=L(Matcher)(
            classification=L(SigmoidFocal)(alpha=0.25, gamma=2.0),
            class_cost=2.0,
            box_cost=5.0,
            giou_cost=2.0,
        ),
        class_weight=2.0,
        box_weight=5.0,
        giou_weight=2.0,
        aux_loss=True,
    ),
    num_classes=80,
    pixel_mean=[123.675, 116.28, 103.53],
    pixel_std=[58.395, 57.12, 57.375],
    input_format="RGB",
    detections_per_image=100,
)
