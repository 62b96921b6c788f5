"""Tiny, randomly initialised detectors of Hugging Face transformers, saved as a user would."""

import pytest
import torch

hf = pytest.importorskip("transformers")

LABELS = ("circle", "square", "triangle")


def _resnet(kind=hf.ResNetConfig, features=("stage2", "stage3", "stage4")):
    return kind(
        embedding_size=8,
        hidden_sizes=[16, 24, 32, 40],
        depths=[1, 1, 1, 1],
        layer_type="bottleneck",
        out_features=list(features),
    )


_TRANSFORMER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_queries": 12,
}
_HYBRID = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [24, 32, 40],
    "decoder_in_channels": [32, 32, 32],
    "decoder_n_points": 2,
    "num_denoising": 8,
    **_TRANSFORMER,
}


def _detr(kind, **more):
    return kind(backbone_config=_resnet(features=["stage4"]), **_TRANSFORMER, **more)


def _deformable(**more):
    config = hf.DeformableDetrConfig(
        backbone_config=_resnet(), **_TRANSFORMER, num_feature_levels=3, **more
    )
    config.two_stage_num_proposals = 12
    return config


def _dab():
    settings = {key: value for key, value in _TRANSFORMER.items() if key != "d_model"}
    return hf.DabDetrConfig(
        backbone_config=_resnet(features=["stage4"]),
        hidden_size=32,
        auxiliary_loss=True,
        **settings,
    )


def _hgnet():
    return hf.HGNetV2Config(
        hidden_sizes=[16, 24, 32, 40],
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 16, 24, 32],
        stage_mid_channels=[8, 8, 8, 8],
        stage_out_channels=[16, 24, 32, 40],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )


def _rf_detr():
    backbone = hf.models.rf_detr.configuration_rf_detr.RfDetrDinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=8,
        num_windows=2,
        out_features=["stage1", "stage2"],
    )
    return hf.RfDetrConfig(
        backbone_config=backbone,
        d_model=32,
        decoder_layers=2,
        decoder_ffn_dim=32,
        decoder_self_attention_heads=2,
        decoder_cross_attention_heads=2,
        decoder_n_points=2,
        num_queries=12,
        group_detr=3,
        c2f_num_blocks=1,
    )


def _lw_detr():
    backbone = hf.models.lw_detr.configuration_lw_detr.LwDetrViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        pretrain_image_size=64,
        patch_size=8,
        num_windows=4,
        window_block_indices=[0],
        out_features=["stage1", "stage2"],
    )
    return hf.LwDetrConfig(
        backbone_config=backbone,
        projector_scale_factors=[1.0],
        d_model=32,
        decoder_layers=2,
        decoder_ffn_dim=32,
        decoder_self_attention_heads=2,
        decoder_cross_attention_heads=2,
        decoder_n_points=2,
        num_queries=12,
        group_detr=3,
        c2f_num_blocks=1,
    )


def _yolos():
    return hf.YolosConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=[64, 64],
        patch_size=16,
        num_detection_tokens=12,
    )


CONFIGS = {
    "deformable_detr": lambda: _deformable(),
    "deformable_detr_refine": lambda: _deformable(with_box_refine=True),
    "deformable_detr_two_stage": lambda: _deformable(with_box_refine=True, two_stage=True),
    "detr": lambda: _detr(hf.DetrConfig),
    "conditional_detr": lambda: _detr(hf.ConditionalDetrConfig, auxiliary_loss=True),
    "dab_detr": _dab,
    "rt_detr": lambda: hf.RTDetrConfig(
        backbone_config=_resnet(hf.RTDetrResNetConfig), freeze_backbone_batch_norms=False, **_HYBRID
    ),
    "rt_detr_v2": lambda: hf.RTDetrV2Config(
        backbone_config=_resnet(hf.RTDetrResNetConfig), **_HYBRID
    ),
    "d_fine": lambda: hf.DFineConfig(
        backbone_config=_hgnet(), **{**_HYBRID, "decoder_n_points": [2, 3, 2]}
    ),
    "deimv2": lambda: hf.Deimv2Config(backbone_config=_hgnet(), **_HYBRID),
    "rf_detr": _rf_detr,
    "lw_detr": _lw_detr,
    "yolos": _yolos,
}


def make_model(name, labels=LABELS):
    """A tiny model with random weights."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    return hf.AutoModelForObjectDetection.from_config(config).eval()


_PROCESSORS = {
    "deformable": hf.DeformableDetrImageProcessor,
    "detr": hf.DetrImageProcessor,
    "conditional": hf.ConditionalDetrImageProcessor,
    "dab": hf.ConditionalDetrImageProcessor,
    "yolos": hf.YolosImageProcessor,
}


def make_processor(name):
    """The image processor of its kind, for small images."""
    kind = _PROCESSORS.get(name.partition("_")[0])
    if kind is None:  # a fixed size, whatever the image's shape
        return hf.RTDetrImageProcessor(size={"height": 64, "width": 64})
    if name == "yolos":
        return kind(size={"height": 64, "width": 64})
    return kind(size={"shortest_edge": 64, "longest_edge": 96})


def save(name, folder, labels=LABELS):
    """Writes what `from_pretrained` reads."""
    make_model(name, labels).save_pretrained(folder)
    make_processor(name).save_pretrained(folder)
