"""The detector equals an independent implementation: outputs, losses and gradients."""

import pytest
import torch

STRUCTURES = {
    "plain": {},
    "refine": {"WITH_BOX_REFINE": True},
    "two-stage": {"WITH_BOX_REFINE": True, "TWO_STAGE": True},
}


def labels_of(targets):
    return [{"class_labels": t.labels, "boxes": t.boxes} for t in targets]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_padded_batch_gives_the_same_outputs_losses_and_gradients(
    structure, build, batch, hugging_face
):
    model = build(EXACT_PADDING=False, **STRUCTURES[structure]).train()
    if model.transformer.two_stage:
        make_padding_unattractive(model)
    theirs = hugging_face.twin(model).train()
    images = model.preprocess(batch)
    targets = model.targets(batch)

    ours = model.predict(images)
    losses = model.criterion(ours, targets)
    if ours.proposals is not None:  # their loss leaves the proposals out
        losses = {name: value for name, value in losses.items() if not name.endswith("_enc")}
    sum(losses.values()).backward()

    expected = theirs(**hugging_face.inputs(images.tensor, images.mask), labels=labels_of(targets))
    their_losses = hugging_face.weighted_losses(expected.loss_dict)
    sum(their_losses.values()).backward()

    torch.testing.assert_close(ours.logits[-1], expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.boxes[-1], expected.pred_boxes, atol=1e-6, rtol=1e-5)
    for layer, aux in enumerate(expected.auxiliary_outputs):
        torch.testing.assert_close(ours.logits[layer], aux["logits"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.boxes[layer], aux["pred_boxes"], atol=1e-6, rtol=1e-5)
    assert losses.keys() == their_losses.keys()
    for name, value in losses.items():
        torch.testing.assert_close(value, their_losses[name], atol=1e-5, rtol=1e-5, msg=name)
    if ours.proposals is not None:
        torch.testing.assert_close(
            ours.proposals.logits[0], expected.enc_outputs_class, atol=1e-5, rtol=1e-5
        )
        boxes = expected.enc_outputs_coord_logits.sigmoid()
        torch.testing.assert_close(ours.proposals.boxes[0], boxes, atol=1e-6, rtol=1e-5)

    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    compare_gradients(hugging_face.translate(gradients), theirs)


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
        scale = wanted.abs().max().clamp(min=1e-3)
        error = float((found - wanted).abs().max() / scale)
        assert error < 1e-4, f"{name}: {error}"
        compared += 1
    assert compared > 50
