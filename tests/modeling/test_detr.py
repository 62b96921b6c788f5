import pytest
import torch
from detectron2.modeling import build_model
from torch import nn

from cldetr.modeling.detr_transformer import DecoderLayer, EncoderLayer


@pytest.fixture
def build_detr(build):
    def make(**settings):
        model = build(arch="DETR", IN_FEATURES=["res5"], **settings)
        with torch.no_grad():  # untrained features are far too large
            model.input_proj.weight *= 0.01
        return model

    return make


def test_up_detr_has_the_published_parameters(config_file):
    cfg = config_file("detector/up_detr_r50.yaml")
    cfg.MODEL.DETR.NUM_CLASSES = 91
    model = build_model(cfg)
    assert sum(p.numel() for p in model.parameters()) == 41_525_280
    assert len(model.state_dict()) == 460 + 1  # visible_classes


@pytest.mark.parametrize("pre_norm", [False, True])
def test_layers_without_positions_equal_pytorchs(pre_norm):
    settings = {"dropout": 0.0, "batch_first": True, "norm_first": pre_norm}
    ours = EncoderLayer(16, heads=4, ffn_dim=24, dropout=0.0, pre_norm=pre_norm)
    theirs = nn.TransformerEncoderLayer(16, 4, 24, **settings)
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randn(2, 7, 16)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    found = ours(tokens, torch.zeros(2, 7, 16), padding)
    wanted = theirs(tokens, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], wanted[~padding], atol=1e-5, rtol=1e-5)

    ours = DecoderLayer(16, heads=4, ffn_dim=24, dropout=0.0, pre_norm=pre_norm)
    theirs = nn.TransformerDecoderLayer(16, 4, 24, **settings)
    theirs.load_state_dict(ours.state_dict())
    states = torch.randn(2, 5, 16)
    found = ours(states, torch.zeros(2, 5, 16), tokens, torch.zeros(2, 7, 16), padding)
    wanted = theirs(states, tokens, memory_key_padding_mask=padding)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_image_alone_and_in_a_padded_batch_are_predicted_alike(pre_norm, build_detr, batch):
    model = build_detr(PRE_NORM=pre_norm).eval()
    with torch.no_grad():
        together = model.predict(model.preprocess(batch))
        for index, entry in enumerate(batch):
            alone = model.predict(model.preprocess([entry]))
            part = slice(index, index + 1)
            torch.testing.assert_close(together.logits[:, part], alone.logits, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(together.boxes[:, part], alone.boxes, atol=2e-6, rtol=1e-5)


def test_encoder_is_normalised_at_its_end_only_with_pre_norm(build_detr):
    assert build_detr(PRE_NORM=True).transformer.encoder.norm is not None
    assert build_detr().transformer.encoder.norm is None


def test_scores_and_background_are_one_distribution(build_detr):
    model = build_detr()
    logits = torch.randn(3, 8)
    total = model.scores(logits).sum(-1) + model.background(logits)
    torch.testing.assert_close(total, torch.ones(3))
    torch.testing.assert_close(model.scores(logits), logits.softmax(-1)[:, :7])


def test_invisible_classes_take_no_probability(build_detr):
    model = build_detr(ONE_CLASS_PER_QUERY=True).eval()
    visible = torch.tensor([True, False, True, False, False, False, False])
    model.visible_classes = visible
    logits = torch.randn(3, 8)
    kept = torch.cat([logits[:, [0, 2]], logits[:, 7:]], dim=1).softmax(-1)
    torch.testing.assert_close(model.scores(logits)[:, [0, 2]], kept[:, :2])
    torch.testing.assert_close(model.background(logits), kept[:, 2])
    assert not model.scores(logits)[:, ~visible].any()


def test_results_are_each_querys_best_class(build_detr, example):
    model = build_detr(ONE_CLASS_PER_QUERY=True).eval()
    entry = example(60, 80, 0)
    result = model([entry])[0]["instances"]
    with torch.no_grad():
        output = model.predict(model.preprocess([entry]))
    best = output.logits[-1, 0].softmax(-1)[:, :7].amax(1).sort(descending=True).values
    assert len(result) == 20
    torch.testing.assert_close(result.scores, best)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_reaches_every_trainable_parameter(checkpointing, build_detr, batch):
    model = build_detr(PRE_NORM=True, CHECKPOINTING=checkpointing).train()
    losses = model(batch)
    assert len(losses) == 9
    sum(losses.values()).backward()
    assert not [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]


def test_autocast_keeps_boxes_and_losses_in_float32(build_detr, batch):
    model = build_detr().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model.predict(model.preprocess(batch))
        losses = model.criterion(output, model.targets(batch))
    assert output.boxes.dtype == torch.float32
    assert all(v.dtype == torch.float32 and torch.isfinite(v) for v in losses.values())


def test_several_features_are_refused(tiny_config):
    with pytest.raises(ValueError, match="one feature"):
        build_model(tiny_config("DETR"))
