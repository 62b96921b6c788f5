"""Distillation losses against cases worked by hand."""

import dataclasses
import math

import pytest
import torch

from cldetr.errors import InputError
from cldetr.methods.distill import (
    DistillRule,
    StudentTeacherOutputs,
    erd_loss,
    lwf_loss,
    rank_loss,
    response_loss,
    topology_loss,
)
from cldetr.modeling.structures import DetrOutput

BOX = [0.5, 0.5, 0.2, 0.2]


def logit(p):
    return math.log(p / (1 - p))


def outputs(
    student, teacher, old, softmax=False, student_boxes=None, teacher_boxes=None, num_boxes=None
):
    student, teacher = torch.tensor([student]), torch.tensor([teacher])
    plain = torch.tensor([[BOX] * student.shape[1]])
    return StudentTeacherOutputs(
        student_logits=student.requires_grad_(),
        student_boxes=plain if student_boxes is None else torch.tensor([student_boxes]),
        teacher_logits=teacher,
        teacher_boxes=plain if teacher_boxes is None else torch.tensor([teacher_boxes]),
        old=torch.tensor(old),
        softmax=softmax,
        num_boxes=num_boxes,
    )


def test_lwf_on_a_sigmoid_head_is_binary_cross_entropy_of_old_classes():
    made = outputs([[logit(0.3), 5.0]], [[logit(0.8), -1.0]], [True, False])
    expected = -(0.8 * math.log(0.3) + 0.2 * math.log(0.7))
    losses = lwf_loss(made, DistillRule())
    assert losses["loss_kd_cls"].item() == pytest.approx(expected, rel=1e-5)
    assert losses["loss_kd_box"].item() == pytest.approx(0, abs=1e-6)


def test_lwf_on_a_softmax_head_leaves_new_classes_out():
    # Outputs: old, new, no-object. Over {old, no-object} the teacher says 0.75, 0.25.
    made = outputs([[0.0, 9.0, 0.0]], [[math.log(3.0), 9.0, 0.0]], [True, False], softmax=True)
    losses = lwf_loss(made, DistillRule())
    assert losses["loss_kd_cls"].item() == pytest.approx(math.log(2), rel=1e-5)


def test_lwf_boxes_are_compared_query_by_query():
    moved = [[0.5, 0.5, 0.2, 0.2], [0.6, 0.5, 0.2, 0.2]]
    made = outputs([[0.0], [0.0]], [[0.0], [0.0]], [True], student_boxes=moved)
    iou = 0.1 / 0.3  # boxes of width 0.2, half overlapping; their hull is their union
    expected = (5 * 0.1 + 2 * (1 - iou)) / 2
    assert lwf_loss(made, DistillRule())["loss_kd_box"].item() == pytest.approx(expected, rel=1e-5)


def test_the_normalisers_of_lwf_are_queries_images_and_boxes():
    # One image, three queries, of which one is not as the teacher has it: BCE(0.3; 0.8) = 1.0346.
    student, teacher = [[logit(0.3)], [60.0], [-60.0]], [[logit(0.8)], [60.0], [-60.0]]
    summed = -(0.8 * math.log(0.3) + 0.2 * math.log(0.7))
    moved = [[0.6, 0.5, 0.2, 0.2], BOX, BOX]
    distance = 5 * 0.1 + 2 * (1 - 0.1 / 0.3)
    made = outputs(student, teacher, [True], student_boxes=moved, num_boxes=torch.tensor(4.0))
    for normaliser, count in (("queries", 3), ("images", 1), ("boxes", 4)):
        losses = lwf_loss(made, DistillRule(normaliser=normaliser))
        assert losses["loss_kd_cls"].item() == pytest.approx(summed / count, rel=1e-5)
        assert losses["loss_kd_box"].item() == pytest.approx(distance / count, rel=1e-5)


def test_erd_compares_only_responses_that_stand_out():
    teacher = [[logit(0.9), 0.0]] + [[logit(0.1), 0.0]] * 9
    student = [[logit(0.9) - 2.0, 7.0]] + [[5.0, 7.0]] * 9
    losses = erd_loss(outputs(student, teacher, [True, False]), DistillRule())
    assert losses["loss_kd_cls"].item() == pytest.approx(4.0, rel=1e-5)  # (−2)², of one query


def test_erd_suppresses_the_teachers_overlapping_boxes():
    teacher = [[logit(0.9)], [logit(0.8)]] + [[logit(0.01)]] * 18
    boxes = [BOX] * 20
    moved = [BOX, [0.9, 0.9, 0.1, 0.1]] + [BOX] * 18
    made = outputs([[0.0]] * 20, teacher, [True], student_boxes=moved, teacher_boxes=boxes)
    # Query 1 lies on query 0 in the teacher, so its box is not compared: no distance is left.
    losses = erd_loss(made, DistillRule(deviations=1.0))
    assert losses["loss_kd_box"].item() == pytest.approx(0, abs=1e-6)


def test_erd_without_any_response_is_zero_and_still_differentiable():
    losses = erd_loss(outputs([[1.0]] * 4, [[0.0]] * 4, [True]), DistillRule())
    total = sum(losses.values())
    assert total.item() == 0
    total.backward()


def test_unknown_words_list_the_choices():
    with pytest.raises(InputError, match="lwf, erd"):
        DistillRule(loss="kd")
    with pytest.raises(InputError, match="queries, images, boxes"):
        DistillRule(normaliser="objects")


def test_erd_on_a_softmax_head_takes_no_object_neither_for_a_response_nor_for_a_class():
    # Outputs: old, no-object. One query responds; all others are sure of no-object.
    teacher = [[3.0, 0.0]] + [[0.0, 8.0]] * 9
    student = [[1.0, 50.0]] + [[7.0, 8.0]] * 9
    losses = erd_loss(outputs(student, teacher, [True], softmax=True), DistillRule())
    assert losses["loss_kd_cls"].item() == pytest.approx(4.0, rel=1e-5)  # (1 − 3)², one query


def random_outputs(softmax, seed=0, classes=4, old=(0, 1, 3), absent=None):
    """Both models on two images of seven queries, with linear heads.

    `absent` is the model that finds no object of class 1: 0 the student, 1 the teacher.
    """
    torch.manual_seed(seed)
    width = classes + softmax
    heads = [torch.nn.Linear(6, width) for _ in range(2)]
    if absent is not None:
        with torch.no_grad():
            heads[absent].bias[1] -= 9.0
    made = []
    for head in heads:
        states = torch.randn(3, 2, 7, 6) * 2  # three layers
        made.append(DetrOutput(head(states), torch.rand(3, 2, 7, 4), features=states[-1]))
    student, teacher = made
    mask = torch.zeros(classes, dtype=torch.bool)
    mask[list(old)] = True
    return StudentTeacherOutputs(
        student.logits[-1],
        student.boxes[-1],
        teacher.logits[-1].detach(),
        teacher.boxes[-1],
        mask,
        bool(softmax),
        student=student,
        teacher=dataclasses.replace(teacher, logits=teacher.logits.detach()),
        student_head=heads[0],
        teacher_head=heads[1],
    )


def old_probabilities(row, old, softmax):
    """Of one query, worked out number by number."""
    if not softmax:
        return [1 / (1 + math.exp(-row[c])) for c in old]
    powers = [math.exp(row[c]) for c in old]
    return [x / (sum(powers) + math.exp(row[-1])) for x in powers]


def class_prototypes(logits, states, old, softmax, min_score=0.0):
    """Prototypes of the classes that have a query, and the classes, by loops."""
    sums, weights = {}, {}
    for row, state in zip(
        logits.flatten(0, 1).tolist(), states.flatten(0, 1).tolist(), strict=True
    ):
        scores = old_probabilities(row, old, softmax)
        best = max(scores)
        if best < min_score:
            continue
        c = scores.index(best)
        weights[c] = weights.get(c, 0.0) + best
        sums[c] = [a + best * b for a, b in zip(sums.get(c, [0.0] * 6), state, strict=True)]
    return {c: [x / weights[c] for x in sums[c]] for c in sums}


@pytest.mark.parametrize("softmax", [False, True], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("absent", [None, 0, 1], ids=["all", "new lacks one", "old lacks one"])
@pytest.mark.parametrize(
    "rule",
    [
        DistillRule("rank", weight=6.0),
        DistillRule("rank", normalise=False, temperature=0.3, by_present=True),
    ],
    ids=["published", "options"],
)
def test_the_rank_loss_against_loops(softmax, seed, absent, rule):
    made = random_outputs(softmax, seed, absent=absent)
    old = [0, 1, 3]
    ranks = []
    for logits, model, head in (
        (made.student_logits, made.student, made.student_head),
        (made.teacher_logits, made.teacher, made.teacher_head),
    ):
        found = {}
        for c, prototype in class_prototypes(logits, model.features, old, softmax).items():
            if rule.normalise:
                length = math.sqrt(sum(x * x for x in prototype))
                prototype = [x / length for x in prototype]
            scores = old_probabilities(head(torch.tensor(prototype)).tolist(), old, softmax)
            scores = [x / max(scores) for x in scores]
            found[c] = [
                sum(1 / (1 + math.exp((a - b) / rule.temperature)) for b in scores) for a in scores
            ]
        ranks.append(found)
    both = ranks[0].keys() & ranks[1].keys()
    assert len(both) == (3 if absent is None else 2)
    total = sum(abs(a - b) for c in both for a, b in zip(ranks[0][c], ranks[1][c], strict=True))
    rows = len(both) if rule.by_present else 3
    (loss,) = rank_loss(made, rule).values()
    assert loss.item() == pytest.approx(rule.weight * total / (rows * 3), rel=1e-4)
    loss.backward()
    assert made.student_head.weight.grad.abs().sum() > 0
    assert made.teacher_head.weight.grad is None or made.teacher_head.weight.grad.abs().sum() == 0


def test_equal_models_have_no_rank_and_no_topology_loss():
    made = random_outputs(False)
    same = dataclasses.replace(
        made,
        student_logits=made.teacher_logits,
        student=made.teacher,
        student_head=made.teacher_head,
    )
    assert rank_loss(same, DistillRule("rank"))["loss_kd_rank"].item() == 0
    rule = DistillRule("topology", min_score=0.0)
    assert topology_loss(same, rule)["loss_kd_topology"].item() == 0


@pytest.mark.parametrize(
    ("softmax", "seed", "min_score"),
    [(False, 14, 0.72), (True, 0, 0.62)],
    ids=["sigmoid", "softmax"],
)
def test_the_topology_loss_against_loops(softmax, seed, min_score):
    """The teacher is sure of three of four classes, and not in all of their queries."""
    old = [0, 1, 3, 4]
    made = random_outputs(softmax, seed, classes=5, old=old)
    rule = DistillRule("topology", weight=3.0, min_score=min_score)
    relative = []
    for model in (made.student, made.teacher):  # the teacher's weights for both
        unsure, found = (
            class_prototypes(made.teacher_logits, model.features, old, softmax, floor)
            for floor in (0.0, min_score)
        )
        assert (len(unsure), len(found)) == (4, 3)
        assert any(found[c] != unsure[c] for c in found)
        squared = {
            (a, b): sum((x - y) ** 2 for x, y in zip(found[a], found[b], strict=True))
            for a in found
            for b in found
            if a != b
        }
        mean = sum(squared.values()) / len(squared)
        relative.append({pair: value / mean for pair, value in squared.items()})
    expected = sum((relative[0][p] - relative[1][p]) ** 2 for p in relative[0]) / 6
    loss = topology_loss(made, rule)["loss_kd_topology"]
    assert loss.item() == pytest.approx(3 * expected, rel=1e-3)


def test_two_classes_have_no_topology():
    made = random_outputs(False, old=(0, 1))
    loss = topology_loss(made, DistillRule("topology", min_score=0.0))["loss_kd_topology"]
    assert loss.item() == 0


@pytest.mark.parametrize("softmax", [False, True], ids=["sigmoid", "softmax"])
def test_the_response_loss_against_loops(softmax):
    made = random_outputs(softmax, seed=2)
    old, t = [0, 1, 3], 20.0
    columns = old + [4] * softmax
    total = weight = 0.0
    for image in range(2):
        for query in range(7):
            row = made.teacher_logits[image, query].tolist()
            sure = max(old_probabilities(row, old, softmax))
            weight += sure
            for layer in range(3):
                p, q = (
                    torch.softmax(x.logits[layer, image, query, columns] / t, 0).tolist()
                    for x in (made.teacher, made.student)
                )
                kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
                total += sure * t * t * kl / len(columns)
    (loss,) = response_loss(made, DistillRule("response", temperature=t)).values()
    assert loss.item() == pytest.approx(total / weight, rel=1e-3)


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(InputError, match=r"METHOD\.DISTILL\.TEMPERATURE is above 0"):
        DistillRule("rank", temperature=0.0)
