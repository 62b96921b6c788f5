"""The detector equals an independent implementation: outputs, losses and gradients."""

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model

STRUCTURES = {
    "plain": {},
    "refine": {"WITH_BOX_REFINE": True},
    "two-stage": {"WITH_BOX_REFINE": True, "TWO_STAGE": True},
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_padded_batch_gives_the_same_outputs_losses_and_gradients(
    structure, build, batch, hugging_face
):
    model = build(EXACT_PADDING=False, **STRUCTURES[structure])
    if model.transformer.two_stage:
        make_padding_unattractive(model)
    compare(model, batch, hugging_face)


@pytest.mark.parametrize("structure", ["plain", "refine"])
def test_exactly_padded_batch_equals_their_predictions_of_each_image_alone(
    structure, build, batch, hugging_face
):
    model = build(**STRUCTURES[structure]).eval()
    theirs = hugging_face.twin(model).eval()
    with torch.no_grad():
        ours = model.predict(model.preprocess(batch))
        for index, entry in enumerate(batch):
            alone = model.preprocess([entry])
            expected = theirs(**hugging_face.inputs(alone.tensor, alone.mask))
            assert_close(ours.logits[-1, index], expected.logits[0], atol=2e-5)
            assert_close(ours.boxes[-1, index], expected.pred_boxes[0], atol=2e-6)


def build_detr(build):
    model = build(
        arch="DETR",
        EXACT_PADDING=False,
        IN_FEATURES=["res5"],
        LOSS=CfgNode({"CLASS_WEIGHT": 1.0, "AUX": False}),
        COST=CfgNode({"CLASS": 1.0}),
    )
    with torch.no_grad():  # its features are not normalised: untrained ones are far too large
        model.input_proj.weight *= 0.01
    return model


def test_detr_gives_the_same_outputs_losses_and_gradients(build, batch, hugging_face):
    compare(build_detr(build), batch, hugging_face)


def test_earlier_layers_of_detr_equal_a_shorter_detr(build, batch, hugging_face):
    model = build_detr(build).eval()
    images = model.preprocess(batch)
    ours = model.predict(images)
    theirs = hugging_face.twin(model).eval()
    decoder = theirs.model.decoder
    for layer in (1, 0):
        decoder.layers = decoder.layers[: layer + 1]
        expected = theirs(**hugging_face.inputs(images.tensor, images.mask))
        assert_close(ours.logits[layer], expected.logits, atol=1e-5)
        assert_close(ours.boxes[layer], expected.pred_boxes, atol=1e-6)


def test_published_size_gives_the_same_outputs_losses_and_gradients(
    config_file, example, hugging_face
):
    cfg = config_file("detector/deformable_detr_r50.yaml")
    cfg.MODEL.DETR.DROPOUT = 0.0
    cfg.MODEL.DETR.EXACT_PADDING = False
    model = build_model(cfg)
    # New models sample exactly at cell centres, where bilinear sampling has a kink and the gradient
    # is a matter of rounding.
    for name, parameter in model.named_parameters():
        if name.endswith("sampling_offsets.bias"):
            parameter.data += torch.rand_like(parameter) * 0.6 + 0.2
    compare(model, [example(96, 128, 5), example(75, 101, 3)], hugging_face)


def compare(model, batch, hugging_face):
    """Compares a detector with its twin on one training batch."""
    model.train()
    theirs = hugging_face.twin(model).train()
    images = model.preprocess(batch)
    targets = model.targets(batch)
    labels = [{"class_labels": t.labels, "boxes": t.boxes} for t in targets]

    ours = model.predict(images)
    losses = model.criterion(ours, targets)
    # Their loss leaves the proposals of two-stage models out.
    losses = {name: value for name, value in losses.items() if not name.endswith("_enc")}
    sum(losses.values()).backward()
    expected = theirs(**hugging_face.inputs(images.tensor, images.mask), labels=labels)
    their_losses = hugging_face.weighted_losses(model, expected.loss_dict)
    sum(their_losses.values()).backward()

    last = {"logits": expected.logits, "pred_boxes": expected.pred_boxes}
    wanted_layers = [*(expected.auxiliary_outputs or []), last]
    first = len(ours.logits) - len(wanted_layers)
    for layer, wanted in enumerate(wanted_layers, start=first):
        assert_close(ours.logits[layer], wanted["logits"], atol=1e-5)
        assert_close(ours.boxes[layer], wanted["pred_boxes"], atol=1e-6)
    if ours.proposals is not None:
        assert_close(ours.proposals.logits[0], expected.enc_outputs_class, atol=1e-5)
        boxes = expected.enc_outputs_coord_logits.sigmoid()
        assert_close(ours.proposals.boxes[0], boxes, atol=1e-6)
    assert losses.keys() == their_losses.keys()
    for name, value in losses.items():
        assert_close(value, their_losses[name], atol=1e-5)
    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    compare_gradients(hugging_face.translate(model, gradients), theirs)


def assert_close(found, wanted, atol):
    torch.testing.assert_close(found, wanted, atol=atol, rtol=1e-5)


def make_padding_unattractive(model):
    """Lowers the objectness of masked cells: they let padding become a query, we do not."""
    transformer, head = model.transformer, model.class_embed[-1]
    with torch.no_grad():
        masked = transformer.enc_output_norm(transformer.enc_output(torch.zeros(transformer.dim)))
        row = head.weight[0]
        row -= (row @ masked + 3.0) / (masked @ masked) * masked


def compare_gradients(ours, theirs):
    compared = 0
    for name, parameter in theirs.named_parameters():
        if not parameter.requires_grad:
            continue
        name = name.replace("model.decoder.bbox_embed", "bbox_embed")
        name = name.replace("model.decoder.class_embed", "class_embed")
        wanted, found = parameter.grad, ours[name]
        if wanted is None:
            assert found is None or not found.any(), name
            continue
        error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-3))
        # In a backbone one of many ReLUs may lie within rounding of zero and open on one side only;
        # against double precision either implementation shows such errors now and then, and some of
        # 2e-4 in the transformer.
        assert error < (2e-2 if ".backbone." in name else 2e-4), f"{name}: {error}"
        compared += 1
    assert compared > 50
