"""Distillation losses against cases worked by hand."""

import math

import pytest
import torch

from cldetr.errors import InputError
from cldetr.methods.distill import DistillRule, StudentTeacherOutputs, erd_loss, lwf_loss

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
