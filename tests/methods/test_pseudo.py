"""Pseudo-labels: every rule of Sec. 3.3 against cases worked by hand and a brute-force twin."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cldetr.errors import InputError
from cldetr.methods.pseudo import (
    PseudoRule,
    drop_overlapping,
    make_pseudo_labels,
    merge,
    merge_batch,
)
from cldetr.modeling.structures import Target


def target(labels, boxes, probs=None):
    return Target(
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        None if probs is None else torch.tensor(probs),
    )


def label(scores, rule, usable=None, background=None, progress=0.0):
    scores = torch.tensor(scores, dtype=torch.float32)[None]
    boxes = torch.rand(1, scores.shape[1], 4, generator=torch.Generator().manual_seed(0))
    usable = torch.ones(scores.shape[-1], dtype=torch.bool) if usable is None else usable
    if background is not None:
        background = torch.tensor(background)[None]
    found = make_pseudo_labels(scores, boxes, background, usable[None], rule, progress)[0]
    places = [int((boxes[0] == box).all(1).nonzero()[0]) for box in found.boxes]
    return places, found


def test_topk_keeps_the_most_confident_foreground_queries_of_a_sigmoid_head():
    scores = [[0.9, 0.1], [0.2, 0.25], [0.31, 0.6], [0.5, 0.4]]
    places, found = label(scores, PseudoRule(k=2, foreground=0.3))
    assert places == [0, 2]
    assert found.labels.tolist() == [0, 1]


def test_a_query_exactly_at_the_foreground_score_is_background():
    places, _ = label([[0.3, 0.0], [0.300001, 0.0]], PseudoRule(foreground=0.3))
    assert places == [1]


def test_softmax_heads_compare_with_the_background_probability():
    scores = [[0.3, 0.2], [0.2, 0.1], [0.45, 0.05]]
    places, _ = label(scores, PseudoRule(foreground=0.9), background=[0.2, 0.7, 0.5])
    assert places == [0]


def test_equal_scores_keep_the_order_of_the_queries():
    places, _ = label([[0.5, 0.1]] * 4, PseudoRule(k=3))
    assert places == [0, 1, 2]


def test_classes_that_are_not_usable_are_never_given():
    usable = torch.tensor([True, False])
    places, found = label([[0.4, 0.99], [0.1, 0.9]], PseudoRule(), usable=usable)
    assert places == [0]
    assert found.labels.tolist() == [0]
    assert found.probs[0, 1] == 0


def test_threshold_keeps_scores_from_p_on():
    places, _ = label([[0.1, 0.0], [0.09, 0.05], [0.7, 0.2]], PseudoRule("threshold", score=0.1))
    assert places == [2, 0]


@pytest.mark.parametrize(("progress", "kept"), [(0.0, [0]), (0.5, [0, 1]), (1.0, [0, 1, 2])])
def test_curriculum_lowers_p_linearly(progress, kept):
    rule = PseudoRule("curriculum", score_start=0.5, score=0.1)
    places, _ = label([[0.5], [0.3], [0.1], [0.05]], rule, progress=progress)
    assert places == kept


def test_all_takes_every_query():
    places, _ = label([[0.001, 0.0], [0.0, 0.7]], PseudoRule("all"))
    assert sorted(places) == [0, 1]


def test_pairs_may_take_one_query_twice_as_the_released_code_does():
    places, found = label([[0.9, 0.8], [0.1, 0.2]], PseudoRule("pairs", k=2))
    assert places == [0, 0]
    assert found.labels.tolist() == [0, 1]


def test_k_larger_than_the_predictions_is_capped():
    places, _ = label([[0.9, 0.8], [0.6, 0.2]], PseudoRule("pairs", k=500))
    assert len(places) == 4
    assert len(label([[0.9], [0.6]], PseudoRule(k=500))[0]) == 2


def test_soft_labels_are_the_teachers_distribution_over_usable_classes():
    _, found = label([[0.9, 0.3, 0.2]], PseudoRule(), usable=torch.tensor([True, True, False]))
    assert found.probs.tolist() == [[pytest.approx(0.9), pytest.approx(0.3), 0.0]]
    assert label([[0.9, 0.3]], PseudoRule(soft=False))[1].probs is None


def test_soft_labels_of_a_softmax_head_carry_no_object_last_and_sum_to_one():
    usable = torch.tensor([True, False])
    _, found = label([[0.5, 0.3]], PseudoRule(), usable=usable, background=[0.2])
    assert found.probs.tolist() == [[pytest.approx(5 / 7), 0.0, pytest.approx(2 / 7)]]


def test_iou_of_exactly_lambda_is_kept_and_just_above_is_dropped():
    # Boxes of equal height, the second shifted: IoU = (w − s) / (w + s) = 0.5 for s = w / 3.
    truth = target([1], [[0.5, 0.5, 0.375, 0.25]])
    at = target([0], [[0.625, 0.5, 0.375, 0.25]])
    above = target([0], [[0.62, 0.5, 0.375, 0.25]])
    rule = PseudoRule(iou=0.5)
    assert len(drop_overlapping(at, truth, rule)) == 1
    assert len(drop_overlapping(above, truth, rule)) == 0
    assert len(drop_overlapping(at, truth, PseudoRule(iou=0.5, drop_at_iou=True))) == 0


def test_overlap_is_judged_whatever_the_classes():
    truth = target([3], [[0.5, 0.5, 0.2, 0.2]])
    same_box = target([0], [[0.5, 0.5, 0.2, 0.2]])
    assert len(drop_overlapping(same_box, truth, PseudoRule())) == 0


def test_merge_puts_ground_truth_first_and_counts_what_does_not_fit():
    truth = target([5, 6], [[0.1, 0.1, 0.1, 0.1], [0.2, 0.2, 0.1, 0.1]])
    pseudo = target([0, 1], [[0.7, 0.7, 0.1, 0.1], [0.8, 0.8, 0.1, 0.1]])
    merged, dropped = merge(truth, pseudo, limit=3)
    assert merged.labels.tolist() == [5, 6, 0]
    assert merged.pseudo.tolist() == [False, False, True]
    assert dropped == 1
    assert merge(truth, pseudo, limit=1)[0].labels.tolist() == [5, 6]


def test_merge_gives_ground_truth_one_hot_rows_beside_soft_ones():
    truth = target([2], [[0.1, 0.1, 0.1, 0.1]])
    pseudo = target([0], [[0.7, 0.7, 0.1, 0.1]], [[0.8, 0.1, 0.0]])
    merged, _ = merge(truth, pseudo, limit=10)
    assert merged.probs.tolist() == [[0, 0, 1], [pytest.approx(0.8), pytest.approx(0.1), 0]]


def test_a_weighted_pseudo_label_counts_by_its_score_and_ground_truth_by_one():
    rule = PseudoRule(weighted=True)
    _, pseudo = label([[0.9, 0.2], [0.1, 0.4], [0.2, 0.1]], rule)
    truth = target([1], [[0.1, 0.1, 0.01, 0.01]])
    merged, _ = merge(truth, pseudo, limit=10)
    assert merged.weights.tolist() == pytest.approx([1.0, 0.9, 0.4])
    assert label([[0.9, 0.2]], PseudoRule())[1].weights is None


def test_merge_batch_counts():
    truth = target([2], [[0.5, 0.5, 0.2, 0.2]])
    pseudo = target([0, 1], [[0.5, 0.5, 0.2, 0.2], [0.1, 0.1, 0.1, 0.1]])
    nothing = target([], [])
    merged, counts = merge_batch([truth, truth], [pseudo, nothing], PseudoRule(), limit=10)
    assert [len(x) for x in merged] == [2, 1]
    assert [x.pseudo.tolist() for x in merged] == [[False, True], [False]]
    assert (counts.images, counts.empty, counts.pseudo, counts.overlapping) == (2, 1, 1, 1)


def test_an_unknown_selection_lists_the_choices():
    with pytest.raises(InputError, match="topk, threshold, curriculum"):
        PseudoRule("best")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0, 1), st.floats(0.1, 0.9))
def test_selection_and_filter_agree_with_a_brute_force_twin(seed, k, foreground, iou):
    rng = np.random.default_rng(seed)
    scores = rng.random((9, 4)).astype(np.float32)
    boxes = (rng.random((9, 4)) * 0.5 + 0.2).astype(np.float32)
    truth = (rng.random((3, 4)) * 0.5 + 0.2).astype(np.float32)
    usable = rng.random(4) < 0.6
    rule = PseudoRule(k=k, foreground=foreground, iou=iou)

    chosen = []  # the paper's words, one query at a time
    for query in range(9):
        allowed = [(scores[query, c], -c) for c in range(4) if usable[c]]
        if allowed and max(allowed)[0] > np.float32(foreground):
            chosen.append((-max(allowed)[0], query, -max(allowed)[1]))
    expected = []
    for _, query, best in sorted(chosen)[:k]:
        if all(corner_iou(boxes[query], other) <= iou for other in truth):
            expected.append((query, best))

    pseudo = make_pseudo_labels(
        torch.from_numpy(scores)[None],
        torch.from_numpy(boxes)[None],
        None,
        torch.from_numpy(usable)[None],
        rule,
    )[0]
    kept = drop_overlapping(pseudo, target([0] * 3, truth), rule)
    places = [int((torch.from_numpy(boxes) == b).all(1).nonzero()[0]) for b in kept.boxes]
    assert list(zip(places, kept.labels.tolist(), strict=True)) == expected


def corner_iou(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    width = min(a[0] + a[2] / 2, b[0] + b[2] / 2) - max(a[0] - a[2] / 2, b[0] - b[2] / 2)
    height = min(a[1] + a[3] / 2, b[1] + b[3] / 2) - max(a[1] - a[3] / 2, b[1] - b[3] / 2)
    inner = max(width, 0) * max(height, 0)
    return inner / (a[2] * a[3] + b[2] * b[3] - inner)


def overlapping_predictions():
    """Four boxes on two objects, the second of another class, the fourth a near copy."""
    boxes = [
        [0.5, 0.5, 0.2, 0.2],
        [0.5, 0.5, 0.2, 0.2],
        [0.8, 0.8, 0.1, 0.1],
        [0.51, 0.5, 0.2, 0.2],
    ]
    scores = [[0.9, 0.0], [0.0, 0.8], [0.7, 0.1], [0.6, 0.2]]
    return torch.tensor([scores, scores]), torch.tensor([boxes, boxes])


@pytest.mark.parametrize(
    ("iou", "kept"), [(1.0, [0, 1, 2, 3]), (0.95, [0, 1, 2, 3]), (0.7, [0, 1, 2])]
)
def test_of_two_boxes_of_one_class_on_one_object_the_more_confident_stays(iou, kept):
    """The first and the fourth overlap by 0.19 / 0.21 = 0.905."""
    scores, boxes = overlapping_predictions()
    usable = torch.tensor([[True, True], [True, False]])
    rule = PseudoRule(select="threshold", score=0.5, nms_iou=iou, soft=False)
    found = make_pseudo_labels(scores, boxes, None, usable, rule)
    torch.testing.assert_close(found[0].boxes, boxes[0, kept])
    torch.testing.assert_close(found[1].boxes, boxes[1, [x for x in kept if x != 1]])


def test_a_small_box_is_judged_alike_in_any_image_of_a_large_batch():
    """Suppression works on all images at once; what else is in the batch must not matter."""
    torch.manual_seed(0)
    boxes = torch.rand(1, 40, 4) * 0.01 + torch.tensor([0.5, 0.5, 0.01, 0.01])
    scores = torch.rand(1, 40, 80)
    rule = PseudoRule(select="threshold", score=0.1, nms_iou=0.5, soft=False)
    usable = torch.ones(64, 80, dtype=torch.bool)
    (alone,) = make_pseudo_labels(scores, boxes, None, usable[:1], rule)
    many = make_pseudo_labels(
        scores.expand(64, -1, -1), boxes.expand(64, -1, -1), None, usable, rule
    )
    assert 0 < len(alone) < 40
    assert all(torch.equal(each.boxes, alone.boxes) for each in many)


def test_calibrated_scores_by_hand():
    scores, boxes = overlapping_predictions()
    usable = torch.ones(1, 2, dtype=torch.bool)
    rule = PseudoRule(select="threshold", score=0.3, soft=False, calibrated=True)
    (sigmoid,) = make_pseudo_labels(scores[:1], boxes[:1], None, usable, rule)
    worth = [1 / (1 + math.exp(-10 * (s - 0.5))) for s in (0.9, 0.8, 0.7, 0.6)]
    expected = [[worth[0], 0], [0, worth[1]], [worth[2], 0], [worth[3], 0]]
    torch.testing.assert_close(sigmoid.probs, torch.tensor(expected))
    background = torch.full((1, 4), 0.05)
    (softmax,) = make_pseudo_labels(scores[:1], boxes[:1], background, usable, rule)
    torch.testing.assert_close(softmax.probs[:, :2], torch.tensor(expected))
    torch.testing.assert_close(softmax.probs.sum(dim=1), torch.ones(4))


def test_soft_and_calibrated_labels_exclude_each_other():
    with pytest.raises(InputError, match="SOFT or CALIBRATED"):
        PseudoRule(soft=True, calibrated=True)
