"""The batched matcher against the straightforward one: a layer at a time, over the whole batch."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torchvision.ops import box_convert, box_iou, generalized_box_iou

from cldetr.modeling.classification import SigmoidFocal, SoftmaxCE
from cldetr.modeling.matcher import Matcher, NonFiniteCostError
from cldetr.modeling.structures import DetrOutput, Target


def random_boxes(*shape):
    return torch.cat([torch.rand(*shape, 2), torch.rand(*shape, 2) * 0.5 + 0.02], dim=-1)


def random_problem(counts, layers=3, queries=9, classes=5, seed=0):
    torch.manual_seed(seed)
    output = DetrOutput(
        torch.randn(layers, len(counts), queries, classes) * 2,
        random_boxes(layers, len(counts), queries),
    )
    targets = [Target(torch.randint(0, classes, (n,)), random_boxes(n)) for n in counts]
    return output, targets


def class_cost(kind, logits, target):
    """Cost of one image's queries (Q) against its labels (T), written down from the papers."""
    width = logits.shape[-1]
    rows = target.probs
    if rows is None:
        rows = torch.nn.functional.one_hot(target.labels, width).float()
    if isinstance(kind, SoftmaxCE):
        return -logits.softmax(-1) @ rows.T
    p = logits.sigmoid()
    cost = 0.25 * (1 - p) ** 2 * -(p + 1e-8).log() - 0.75 * p**2 * -(1 - p + 1e-8).log()
    return cost @ rows.T


def match_layer_by_layer(kind, output, targets):
    found = []
    for logits, boxes in zip(output.logits, output.boxes, strict=True):
        pairs = []
        for image, target in enumerate(targets):
            giou = generalized_box_iou(
                box_convert(boxes[image], "cxcywh", "xyxy"),
                box_convert(target.boxes, "cxcywh", "xyxy"),
            )
            cost = 2 * class_cost(kind, logits[image], target) - 2 * giou
            cost = cost + 5 * torch.cdist(boxes[image], target.boxes, p=1)
            pairs.append({(q, t) for q, t in zip(*linear_sum_assignment(cost), strict=True)})
        found.append(pairs)
    return found


def as_sets(matches, targets):
    starts = torch.tensor([0, *[len(t) for t in targets]]).cumsum(0)
    found = []
    for queries, labels in zip(matches.queries, matches.labels, strict=True):
        pairs = [set() for _ in targets]
        for image, query, label in zip(matches.images, queries, labels, strict=True):
            pairs[image].add((int(query), int(label - starts[image])))
        found.append(pairs)
    return found


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
    kind=st.sampled_from([SigmoidFocal(), SoftmaxCE()]),
    soft=st.booleans(),
)
def test_all_layers_at_once_match_as_one_after_the_other(counts, seed, kind, soft):
    output, targets = random_problem(counts, seed=seed)
    if soft:
        for target in targets[::2]:
            target.probs = torch.rand(len(target), 5)
    matches = Matcher(kind)(output, targets)
    assert as_sets(matches, targets) == match_layer_by_layer(kind, output, targets)


def test_more_labels_than_queries_leave_labels_over():
    output, targets = random_problem([12, 2], queries=5)
    matches = Matcher(SigmoidFocal())(output, targets)
    assert matches.images.tolist() == [0] * 5 + [1] * 2
    for queries in matches.queries:
        assert sorted(queries[:5].tolist()) == [0, 1, 2, 3, 4]


def test_no_label_anywhere_gives_no_match():
    output, targets = random_problem([0, 0])
    matches = Matcher(SigmoidFocal())(output, targets)
    assert matches.queries.shape == (3, 0)
    assert matches.images.shape == (0,)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_predictions_that_are_not_finite_are_refused_by_name(poison):
    output, targets = random_problem([2, 3])
    output.boxes[1, 1, 4, 0] = poison
    with pytest.raises(NonFiniteCostError, match="image 1 of the batch in layer 1"):
        Matcher(SigmoidFocal())(output, targets)


def test_one_hot_soft_labels_match_like_hard_ones():
    output, targets = random_problem([4, 7])
    hard = Matcher(SigmoidFocal())(output, targets)
    for target in targets:
        target.probs = torch.nn.functional.one_hot(target.labels, 5).float()
    soft = Matcher(SigmoidFocal())(output, targets)
    assert as_sets(hard, targets) == as_sets(soft, targets)


def best_partial_matching(cost, allowed):
    """The most pairs, and of those the least cost, by trying all: (number, total)."""
    labels, queries = cost.shape
    best = (0, 0.0)
    for choice in itertools.product([None, *range(queries)], repeat=labels):
        taken = [query for query in choice if query is not None]
        if len(set(taken)) < len(taken):
            continue
        pairs = [(label, query) for label, query in enumerate(choice) if query is not None]
        if all(allowed[pair] for pair in pairs):
            total = sum(float(cost[pair]) for pair in pairs)
            best = min(best, (-len(pairs), total))
    return -best[0], best[1]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    seed=st.integers(0, 10_000),
    floors=st.tuples(st.floats(0, 0.6), st.floats(0, 0.6)),
)
def test_pruned_matching_has_the_most_pairs_at_least_cost(counts, seed, floors):
    output, targets = random_problem(counts, layers=2, queries=3, seed=seed)
    for target in targets:
        target.pseudo = torch.rand(len(target)) < 0.5
        target.min_iou = torch.tensor(floors)[target.pseudo.long()]
    matches = Matcher(SigmoidFocal())(output, targets)
    for layer in range(2):
        queries, rows = matches.pairs(layer)
        start = 0
        for image, target in enumerate(targets):
            boxes = box_convert(output.boxes[layer, image], "cxcywh", "xyxy")
            corners = box_convert(target.boxes, "cxcywh", "xyxy")
            cost = 2 * class_cost(SigmoidFocal(), output.logits[layer, image], target).T
            cost = cost + 5 * torch.cdist(target.boxes, output.boxes[layer, image], p=1)
            cost = cost - 2 * generalized_box_iou(corners, boxes)
            allowed = box_iou(corners, boxes) >= target.min_iou[:, None]
            own = (rows >= start) & (rows < start + len(target))
            pairs = list(zip((rows[own] - start).tolist(), queries[own].tolist(), strict=True))
            assert all(allowed[pair] for pair in pairs)
            assert len({query for _, query in pairs}) == len(pairs)
            number, total = best_partial_matching(cost, allowed)
            assert len(pairs) == number
            assert sum(float(cost[pair]) for pair in pairs) == pytest.approx(total, abs=1e-4)
            start += len(target)


def test_a_floor_of_zero_matches_like_none():
    output, targets = random_problem([4, 7, 0])
    plain = Matcher(SigmoidFocal())(output, targets)
    for target in targets:
        target.min_iou = torch.zeros(len(target))
    floored = Matcher(SigmoidFocal())(output, targets)
    assert floored.kept.all()
    assert as_sets(plain, targets) == as_sets(floored, targets)


def test_shares_of_matched_labels_by_hand():
    """A query on the pseudo-label in both layers, one near the new label in the second alone."""
    near, far = [0.5, 0.5, 0.2, 0.2], [0.1, 0.1, 0.02, 0.02]
    boxes = torch.tensor([[near, far, far], [near, far, [0.8, 0.8, 0.3, 0.3]]])[:, None]
    labels = torch.tensor([near, [0.8, 0.8, 0.3, 0.3], [0.2, 0.8, 0.1, 0.1]])
    target = Target(torch.tensor([0, 1, 1]), labels)
    target.pseudo = torch.tensor([True, False, False])
    target.min_iou = torch.tensor([0.7, 0.5, 0.5])
    matches = Matcher(SigmoidFocal())(DetrOutput(torch.zeros(2, 1, 3, 2), boxes), [target])
    assert matches.shares.pseudo.tolist() == [1.0, 1.0]
    assert matches.shares.truth.tolist() == [0.0, 0.5]
    assert [x.tolist() for x in matches.pairs(1)] == [[0, 2], [0, 1]]
