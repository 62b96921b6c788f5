"""Precision and recall of pseudo-labels: a case worked by hand, all settings by brute force."""

import numpy as np
import pytest
import torch

from cldetr.analysis.pseudo_label_stats import (
    Grid,
    PseudoLabelStats,
    RuleStats,
    match_true_positives,
)
from cldetr.methods.pseudo import (
    Predictions,
    PseudoRule,
    drop_overlapping,
    make_pseudo_labels,
)
from cldetr.modeling.structures import Target

NEW = 2  # classes 0 and 1 are old


def target(*rows):
    """Labels from (class, cx, cy, w, h) rows."""
    table = torch.tensor(rows, dtype=torch.float32).view(-1, 5)
    return Target(table[:, 0].long(), table[:, 1:])


def predictions(*rows):
    """Predictions of a sigmoid head from (class, score, cx, cy, w, h) rows."""
    scores = torch.full((len(rows), 3), 0.01)
    scores[:, NEW] = 0.0
    for query, (label, score, *_) in enumerate(rows):
        scores[query, label] = score
    boxes = torch.tensor([row[2:] for row in rows], dtype=torch.float32)
    return Predictions(scores[None], boxes.view(1, -1, 4), None)


def test_a_case_worked_by_hand():
    # Hidden: two objects of class 0 at the left, one of class 1 at the upper right. Given: one new
    # object below. The teacher finds (most confident first)
    #   A class 0 on the first object       right
    #   B class 0 on the first object again wrong: A has found it
    #   C class 1 on the new object (IoU 0.8) wrong, and dropped unless λ is above 0.8
    #   D class 1 on the object of class 1  right
    #   E class 0 on the object of class 1  wrong: another class
    first, second, other = (0.2, 0.2, 0.2, 0.2), (0.2, 0.6, 0.2, 0.2), (0.8, 0.2, 0.2, 0.2)
    found = predictions(
        (0, 0.9, *first),
        (0, 0.8, *first),
        (1, 0.7, 0.8, 0.8, 0.2, 0.16),
        (1, 0.6, *other),
        (0, 0.3, *other),
    )
    grid = Grid(k=(1, 2, 4, 5), iou=(0.7, 0.9), score=(0.2, 0.5, 0.65))
    stats = PseudoLabelStats(3, grid)
    stats.add(
        found, target((2, 0.8, 0.8, 0.2, 0.2)), target((0, *first), (0, *second), (1, *other))
    )
    counts = stats.count()
    assert counts.images == 1
    assert counts.hidden.tolist() == [2, 1, 0]
    given, right = counts.given.sum(-1), counts.right.sum(-1)
    # K =                               1          2          4          5
    assert given[:, 0, 0].tolist() == [1, 2, 3, 4]  # λ 0.7 drops C
    assert given[:, 1, 0].tolist() == [1, 2, 4, 5]  # λ 0.9 keeps it
    assert right[:, 0, 0].tolist() == [1, 1, 2, 2]
    assert given[3, 1].tolist() == [5, 4, 3]  # score above 0.2, 0.5, 0.65
    assert right[3, 1].tolist() == [2, 2, 1]
    assert counts.given[3, 1, 0].tolist() == [3, 2, 0]  # by class
    assert counts.right[3, 1, 0].tolist() == [1, 1, 0]
    # Best: λ 0.7, K at least 4, score 0.5 or lower but above E's: A, B, D with 2 of 3 right.
    assert counts.rates()["f1"][counts.best()] == pytest.approx(2 * 2 / (3 + 3))
    assert counts.best() == (3, 0, 1)
    assert counts.rates()["precision"][counts.best()] == pytest.approx(2 / 3)
    assert counts.rates()["recall"][counts.best()] == pytest.approx(2 / 3)


def test_nothing_given_has_no_precision():
    stats = PseudoLabelStats(3, Grid(k=(1,), iou=(0.7,), score=(0.5,)))
    stats.add(predictions((0, 0.4, 0.5, 0.5, 0.2, 0.2)), target(), target((0, 0.5, 0.5, 1, 1)))
    counts = stats.count()
    assert np.isnan(counts.rates()["precision"]).all()
    assert counts.rates()["recall"].item() == 0.0


def overlap(first, second):
    """IoU of two boxes (cx, cy, w, h)."""
    shared = 1.0
    for axis in (0, 1):
        low = max(box[axis] - box[axis + 2] / 2 for box in (first, second))
        high = min(box[axis] + box[axis + 2] / 2 for box in (first, second))
        shared *= max(high - low, 0.0)
    return shared / (first[2] * first[3] + second[2] * second[3] - shared)


def slow_count(scores, boxes, background, truths, hiddens, rule, num_classes):
    """Given and right by class of one rule, image by image and label by label."""
    usable = torch.tensor([[True, True, True, False]]).expand(len(scores), -1)
    given, right = np.zeros(num_classes, int), np.zeros(num_classes, int)
    pseudos = make_pseudo_labels(scores, boxes, background, usable, rule)
    for pseudo, truth, hidden in zip(pseudos, truths, hiddens, strict=True):
        kept = drop_overlapping(pseudo, truth, rule)
        left = list(range(len(hidden)))
        for label, box in zip(kept.labels.tolist(), kept.boxes, strict=True):
            given[label] += 1
            options = [
                (overlap(box.tolist(), hidden.boxes[i].tolist()), i)
                for i in left
                if hidden.labels[i] == label
            ]
            if options and max(options)[0] >= 0.5:
                right[label] += 1
                left.remove(max(options)[1])
    return given, right


@pytest.mark.parametrize("softmax", [False, True])
def test_every_setting_equals_the_rule_itself(softmax):
    generator = torch.Generator().manual_seed(3)
    images, queries, classes = 12, 15, 4

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    def objects(count, labels):
        boxes = torch.cat([uniform(count, 2), uniform(count, 2) * 0.3 + 0.1], dim=1)
        return Target(torch.tensor(labels)[(uniform(count) * len(labels)).long()], boxes)

    truths = [objects(int(n), [3]) for n in uniform(images) * 4]
    hiddens = [objects(int(n), [0, 1, 2]) for n in uniform(images) * 6]
    scores = uniform(images, queries, classes) ** 2
    boxes = torch.cat([uniform(images, queries, 2), uniform(images, queries, 2) * 0.3], dim=2)
    for image in range(images):  # some predictions lie on objects, so that some are right
        near = torch.cat([hiddens[image].boxes, truths[image].boxes, hiddens[image].boxes])
        count = min(len(near), queries)
        boxes[image, :count] = near[:count] + 0.02 * (uniform(count, 4) - 0.5)
        for query, label in enumerate(hiddens[image].labels[:queries].tolist()):
            scores[image, query, label] += 0.4
    background = uniform(images, queries) * 0.6 if softmax else None
    grid = Grid(k=(1, 3, 6, 15), iou=(0.3, 0.7, 1.0), score=(0.0, 0.3, 0.6))
    stats = PseudoLabelStats(classes, grid)
    usable = torch.tensor([True, True, True, False])
    for image in range(images):
        p_phi = None if background is None else background[image : image + 1]
        pred = Predictions(scores[image : image + 1] * usable, boxes[image : image + 1], p_phi)
        stats.add(pred, truths[image], hiddens[image])
    counts = stats.count()
    compared = 0
    for (j, k), (v, iou), (s, score) in _settings(grid):
        if softmax and score > 0 and k < queries:
            continue  # not a rule of a softmax head
        rule = PseudoRule(k=k, iou=iou, foreground=score)
        if softmax and score > 0:
            rule = PseudoRule(select="threshold", score=score, iou=iou)
        given, right = slow_count(scores, boxes, background, truths, hiddens, rule, classes)
        assert counts.given[j, v, s].tolist() == given.tolist(), (k, iou, score)
        assert counts.right[j, v, s].tolist() == right.tolist(), (k, iou, score)
        compared += 1
    assert compared == (18 if softmax else 36)
    assert counts.right.sum() > 50


def _settings(grid):
    return [
        (k, iou, score)
        for k in enumerate(grid.k)
        for iou in enumerate(grid.iou)
        for score in enumerate(grid.score)
    ]


def test_each_object_is_found_once_and_by_its_class():
    boxes = torch.tensor([[0, 0, 10, 10], [1, 0, 10, 10], [20, 0, 30, 10]], dtype=torch.float32)
    wanted = torch.tensor([[0, 0, 10, 10], [20, 0, 30, 10]], dtype=torch.float32)
    classes, object_classes = torch.tensor([5, 5, 6]), torch.tensor([5, 7])
    right = match_true_positives(boxes, classes, wanted, object_classes)
    assert right.tolist() == [True, False, False]
    assert len(match_true_positives(boxes[:0], classes[:0], wanted, object_classes)) == 0


def test_rules_are_counted_by_hand():
    """Hidden: one object of class 0; the teacher finds it twice and one more that is not there."""
    found = predictions(
        (0, 0.9, 0.2, 0.2, 0.2, 0.2), (0, 0.6, 0.21, 0.2, 0.2, 0.2), (1, 0.35, 0.8, 0.8, 0.1, 0.1)
    )
    rules = {
        "all": PseudoRule(select="threshold", score=0.3),
        "high": PseudoRule(select="threshold", score=0.5),
        "distinct": PseudoRule(select="threshold", score=0.3, nms_iou=0.7),
        "by class": PseudoRule(select="per_class", score=0.7),  # too few scores: 0.7 for all
        "known": PseudoRule(select="per_class", score=0.7),
    }
    stats = RuleStats(rules, [0, 1], 3, {"known": {0: 0.9, 1: 0.3}})
    stats.add(found, target(), target((0, 0.2, 0.2, 0.2, 0.2)))
    counts = stats.count()
    assert {name: (each.given.tolist(), each.right.tolist()) for name, each in counts.items()} == {
        "all": ([2, 1, 0], [1, 0, 0]),
        "high": ([2, 0, 0], [1, 0, 0]),
        "distinct": ([1, 1, 0], [1, 0, 0]),
        "by class": ([1, 0, 0], [1, 0, 0]),
        "known": ([1, 1, 0], [1, 0, 0]),
    }
    assert counts["all"].hidden.tolist() == [1, 0, 0]
