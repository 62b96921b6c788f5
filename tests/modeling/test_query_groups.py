"""Groups of queries: each predicts, attends to and is matched with its own alone."""

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from scipy.optimize import linear_sum_assignment
from torch import nn

from cldetr.layers.boxes import box_cxcywh_to_xyxy, paired_overlap
from cldetr.methods.distill import DistillRule
from cldetr.methods.method import Method
from cldetr.modeling.classification import SigmoidFocal
from cldetr.modeling.criterion import SetCriterion
from cldetr.modeling.deformable_transformer import DecoderLayer
from cldetr.modeling.matcher import Matcher
from cldetr.modeling.structures import DetrOutput, Target

GROUPS = [0, 0, 1, 0, 1, 2, 2]  # of seven classes


@pytest.fixture(params=[False, True], ids=["plain", "refined"])
def detector(build, request):
    return build(QUERY_GROUPS=GROUPS, NUM_QUERIES=6, WITH_BOX_REFINE=request.param).eval()


def test_a_group_predicts_as_a_detector_of_its_queries_alone(detector, build, batch):
    images = detector.preprocess(batch)
    output = detector.predict(images)
    assert output.logits.shape[2:] == (18, 7)
    for group in range(3):
        rows = slice(6 * group, 6 * group + 6)
        alone = build(NUM_QUERIES=6, WITH_BOX_REFINE=detector.box_refine).eval()
        state = detector.state_dict()
        state["query_embed.weight"] = state["query_embed.weight"][rows]
        alone.load_state_dict(state)
        expected = alone.predict(images)
        torch.testing.assert_close(output.boxes[:, :, rows], expected.boxes)
        torch.testing.assert_close(output.features[:, rows], expected.features)
        own = torch.tensor(GROUPS) == group
        torch.testing.assert_close(output.logits[:, :, rows][..., own], expected.logits[..., own])
        assert detector.scores(output.logits[:, :, rows])[..., ~own].max() < 1e-20


def test_self_attention_is_block_diagonal():
    layer = DecoderLayer(
        32, heads=4, levels=1, points=2, ffn_dim=16, dropout=0.0, query_groups=3
    ).eval()
    query, states = torch.randn(2, 2, 12, 32)
    mask = torch.block_diag(*[torch.ones(4, 4)] * 3) == 0
    expected = nn.MultiheadAttention.forward(
        layer.self_attn, query, query, states, need_weights=False, attn_mask=mask
    )[0]
    torch.testing.assert_close(layer._attend_in_groups(query, states), expected)


def random_output(queries=6, classes=4, layers=2, images=3):
    """Predictions in two groups: the first half of the queries has the even classes."""
    groups = torch.arange(classes) % 2
    allowed = (torch.arange(queries) >= queries // 2)[:, None] == groups
    boxes = torch.rand(layers, images, queries, 4) * 0.4 + 0.2
    logits = torch.randn(layers, images, queries, classes).masked_fill(~allowed, -50.0)
    return DetrOutput(logits, boxes, query_classes=allowed)


def random_target(labels, classes=4, soft=False):
    count = len(labels)
    probs = torch.rand(count, classes) if soft else None
    boxes = torch.rand(count, 4) * 0.4 + 0.2
    return Target(torch.tensor(labels, dtype=torch.int64), boxes, probs)


@pytest.mark.parametrize("labels", [[0, 1, 2], [1, 1, 1, 0], [3], [0, 2, 0, 2, 1]])
def test_each_group_is_matched_as_if_it_were_alone(labels):
    output, target = random_output(images=1), random_target(labels)
    matches = Matcher(SigmoidFocal())(output, [target])
    for layer in range(2):
        found = {tuple(pair) for pair in torch.stack(matches.pairs(layer), dim=1).tolist()}
        expected = set()
        for group in range(2):
            queries = np.arange(3) + 3 * group
            rows = np.flatnonzero(target.labels.numpy() % 2 == group)
            prob = output.logits[layer, 0].double().sigmoid()[queries][:, target.labels[rows]]
            focal = 0.25 * (1 - prob) ** 2 * -(prob + 1e-8).log()
            focal -= 0.75 * prob**2 * -(1 - prob + 1e-8).log()
            ours, theirs = output.boxes[layer, 0, queries, None], target.boxes[rows]
            corners = box_cxcywh_to_xyxy(ours), box_cxcywh_to_xyxy(theirs)
            _, giou = paired_overlap(*torch.broadcast_tensors(*corners))
            cost = 2 * focal + 5 * (ours - theirs).abs().sum(-1) - 2 * giou
            pairs = zip(*linear_sum_assignment(cost), strict=True)
            expected |= {(int(queries[i]), int(rows[j])) for i, j in pairs}
        assert found == expected


def test_labels_of_a_group_teach_its_queries_alone():
    criterion = SetCriterion(matcher=Matcher(SigmoidFocal()))
    output = random_output()
    output.boxes.requires_grad_()
    output.logits.requires_grad_()
    targets = [random_target([0, 2], soft=True), random_target([]), random_target([2], soft=True)]
    targets[1].probs = torch.zeros(0, 4)
    sum(criterion(output, targets).values()).backward()
    assert output.boxes.grad[:, :, :3].abs().sum() > 0
    assert (output.boxes.grad[:, :, 3:] == 0).all()
    forbidden = ~output.query_classes.expand_as(output.logits)
    assert (output.logits.grad[forbidden] == 0).all()
    # A distribution's mass on classes of the other group is no loss: it is not this group's.
    apart = [
        Target(x.labels, x.boxes, x.probs * torch.tensor([1.0, 0.0, 1.0, 0.0])) for x in targets
    ]
    assert criterion(output, apart)["loss_cls"] == criterion(output, targets)["loss_cls"]


def test_unseen_classes_stay_out_of_the_loss():
    criterion = SetCriterion(matcher=Matcher(SigmoidFocal()))
    output = random_output()
    output.logits.requires_grad_()
    seen = torch.tensor([True, False, True, False])
    targets = [random_target([0]), random_target([2, 0]), random_target([])]
    sum(criterion(output, targets, class_mask=seen).values()).backward()
    assert (output.logits.grad[:, :, 3:] == 0).all()


def test_queries_of_new_classes_start_as_copies_of_the_group_before(build):
    detector = build(QUERY_GROUPS=GROUPS, NUM_QUERIES=6)
    before = detector.query_embed.weight.detach().clone()
    detector.start_classes([0, 1, 3])  # the first group has nothing to copy
    assert torch.equal(detector.query_embed.weight, before)
    detector.start_classes([2])  # class 4 of its group is known
    assert torch.equal(detector.query_embed.weight, before)
    detector.start_classes([2, 4])
    now = detector.query_embed.weight
    assert torch.equal(now[6:12], before[:6])
    assert torch.equal(now[12:], before[12:])
    assert torch.equal(now[:6], before[:6])


def test_what_groups_of_queries_do_not_go_with_is_refused(build, tiny_config):
    detector = build(QUERY_GROUPS=GROUPS)
    with pytest.raises(ValueError, match="each phase queries of its own: distil by pseudo-labels"):
        Method("lwf", distill=DistillRule("lwf")).check(detector)
    with pytest.raises(ValueError, match="from the image: one group"):
        build(QUERY_GROUPS=GROUPS, TWO_STAGE=True, WITH_BOX_REFINE=True)
    with pytest.raises(ValueError, match="has 2 entries, one for each of the 7 classes"):
        build_model(tiny_config(QUERY_GROUPS=[0, 1]))
