import math

import pytest
import torch
import torch.nn.functional as F
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from cldetr.modeling.classification import SigmoidFocal, SoftmaxCE
from cldetr.modeling.criterion import SetCriterion
from cldetr.modeling.matcher import Matcher
from cldetr.modeling.structures import DetrOutput, Target


def criterion(kind=None, **settings):
    return SetCriterion(matcher=Matcher(kind or SigmoidFocal()), **settings)


def one_query(logits, box=(0.5, 0.5, 0.2, 0.2)):
    """A single query of a single layer and image."""
    logits = torch.tensor(logits)[None, None, None].requires_grad_()
    boxes = torch.tensor(box)[None, None, None].requires_grad_()
    return DetrOutput(logits, boxes)


def test_losses_of_one_query_by_hand():
    output = one_query([0.3, -1.2], box=(0.5, 0.5, 0.2, 0.2))
    target = Target(torch.tensor([0]), torch.tensor([[0.6, 0.5, 0.2, 0.2]]))
    losses = criterion()(output, [target])
    p = [1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(1.2))]
    focal = 0.25 * (1 - p[0]) ** 2 * -math.log(p[0]) + 0.75 * p[1] ** 2 * -math.log(1 - p[1])
    overlap = 0.1 * 0.2
    union = 2 * 0.04 - overlap
    giou = overlap / union - (0.06 - union) / 0.06
    assert losses["loss_cls"].item() == pytest.approx(2 * focal, rel=1e-5)
    assert losses["loss_bbox"].item() == pytest.approx(5 * 0.1, rel=1e-5)
    assert losses["loss_giou"].item() == pytest.approx(2 * (1 - giou), rel=1e-5)


def test_soft_focal_loss_is_least_at_the_label():
    label = torch.tensor([[[[0.3]]]])
    logits = torch.linspace(-6, 6, 2001)
    loss = [SigmoidFocal().loss(x.view(1, 1, 1, 1), label, torch.tensor(1.0), None) for x in logits]
    assert logits[torch.stack(loss).argmin()].sigmoid().item() == pytest.approx(0.3, abs=2e-3)


def test_soft_focal_loss_by_hand():
    label, logit = torch.tensor([[[[0.3]]]]), torch.tensor([[[[1.1]]]])
    p = torch.sigmoid(logit)
    entropy = -(0.3 * p.log() + 0.7 * (1 - p).log())
    wanted = entropy * (p - 0.3) ** 2 * (0.25 * 0.3 + 0.75 * 0.7)
    found = SigmoidFocal().loss(logit, label, torch.tensor(1.0), None)
    torch.testing.assert_close(found, wanted.flatten())


def test_softmax_loss_equals_weighted_cross_entropy():
    torch.manual_seed(3)
    logits = torch.randn(2, 3, 6, 5)
    classes = torch.randint(0, 5, (2, 3, 6))
    labels = F.one_hot(classes, 5).float()
    found = SoftmaxCE(0.1).loss(logits, labels, torch.tensor(7.0), None)
    weight = torch.tensor([1.0, 1, 1, 1, 0.1])
    wanted = [
        F.cross_entropy(x.flatten(0, 1), y.flatten(), weight)
        for x, y in zip(logits, classes, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(wanted))


def test_soft_softmax_labels_by_hand():
    logits = torch.tensor([[[[1.0, 0.0, -1.0]]]])
    label = torch.tensor([[[[0.6, 0.3, 0.1]]]])
    log_p = logits.log_softmax(-1)[0, 0, 0]
    weights = torch.tensor([0.6, 0.3, 0.1 * 0.1])
    wanted = -(weights * log_p).sum() / weights.sum()
    found = SoftmaxCE(0.1).loss(logits, label, torch.tensor(1.0), None)
    torch.testing.assert_close(found[0], wanted)


def random_problem(classes=4, counts=(3, 0), layers=3):
    torch.manual_seed(5)
    output = DetrOutput(
        torch.randn(layers, len(counts), 8, classes, requires_grad=True),
        (torch.rand(layers, len(counts), 8, 4) * 0.5 + 0.2).requires_grad_(),
    )
    targets = [
        Target(torch.randint(0, classes, (n,)), torch.rand(n, 4) * 0.4 + 0.2) for n in counts
    ]
    return output, targets


def test_every_layer_has_its_losses_and_the_last_no_number():
    output, targets = random_problem()
    names = {
        f"loss_{kind}{suffix}" for kind in ("cls", "bbox", "giou") for suffix in ("", "_0", "_1")
    }
    losses = criterion()(output, targets)
    assert losses.keys() == names
    last = criterion(aux_loss=False)(output, targets)
    assert last.keys() == {"loss_cls", "loss_bbox", "loss_giou"}
    for name, value in last.items():
        torch.testing.assert_close(value, losses[name])


def test_images_without_labels_give_zero_box_losses_that_reach_the_predictions():
    output, targets = random_problem(counts=(0, 0))
    losses = criterion()(output, targets)
    assert losses["loss_bbox"] == 0
    assert losses["loss_giou"] == 0
    assert losses["loss_cls"] > 0
    sum(losses.values()).backward()
    assert output.boxes.grad is not None
    assert not output.boxes.grad.any()
    assert output.logits.grad.abs().sum() > 0


def test_losses_are_divided_by_the_boxes_of_the_batch():
    output, targets = random_problem(counts=(3, 2))
    both = criterion()(output, targets)
    alone = [
        criterion()(
            DetrOutput(output.logits[:, i : i + 1], output.boxes[:, i : i + 1]), [targets[i]]
        )
        for i in range(2)
    ]
    for name, value in both.items():
        torch.testing.assert_close(value, (alone[0][name] * 3 + alone[1][name] * 2) / 5)


@pytest.mark.parametrize("kind", [SigmoidFocal(), SoftmaxCE()])
def test_masked_classes_get_no_gradient_and_change_nothing(kind):
    output, targets = random_problem(classes=5)
    for target in targets:
        target.labels.clamp_(max=1)
    # The softmax head's last output is no-object, which always takes part.
    mask = torch.tensor([True, True, False, True, True])
    mask = mask[:4] if isinstance(kind, SoftmaxCE) else mask
    losses = criterion(kind)(output, targets, class_mask=mask)
    sum(losses.values()).backward()
    assert not output.logits.grad[..., 2].any()
    assert output.logits.grad[..., 3].any()
    moved = output.logits.detach().clone()
    moved[..., 2] += 3.0
    again = criterion(kind)(DetrOutput(moved, output.boxes), targets, class_mask=mask)
    for name, value in losses.items():
        torch.testing.assert_close(again[name], value)


def test_unmasked_classes_are_taught_as_in_a_head_without_the_masked_ones():
    output, targets = random_problem(classes=5)
    for target in targets:
        target.labels.clamp_(max=2)
    mask = torch.tensor([True, True, True, False, False])
    found = criterion()(output, targets, class_mask=mask)
    smaller = DetrOutput(output.logits[..., :3], output.boxes)
    for name, value in criterion()(smaller, targets).items():
        torch.testing.assert_close(found[name], value)


def test_single_class_head():
    output, targets = random_problem(classes=1, counts=(2,))
    losses = criterion()(output, targets)
    sum(losses.values()).backward()
    assert torch.isfinite(output.logits.grad).all()


def test_proposals_are_taught_as_objects_of_no_class():
    output, targets = random_problem(counts=(2, 1))
    output.proposals = DetrOutput(output.logits[-1:].clone(), output.boxes[-1:].clone())
    found = criterion()(output, targets, class_mask=torch.tensor([False, True, True, True]))
    anything = [Target(torch.zeros_like(t.labels), t.boxes) for t in targets]
    wanted = criterion()(DetrOutput(output.logits[-1:], output.boxes[-1:]), anything)
    for name, value in wanted.items():
        torch.testing.assert_close(found[f"{name}_enc"], value)


def test_soft_labels_of_another_width_are_refused():
    output, targets = random_problem(counts=(2,))
    targets[0].probs = torch.rand(2, 9)
    with pytest.raises(ValueError, match="9 columns, the class head has 4"):
        criterion()(output, targets)


def test_wrong_number_of_targets_is_refused():
    output, targets = random_problem()
    with pytest.raises(ValueError, match="1 targets for 2 images"):
        criterion()(output, targets[:1])


def count_of_one_process(rank, folder):
    """Runs in a process of its own: the loss of one image, rank + 1 boxes on it."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    output, targets = random_problem(counts=(rank + 1,))
    loss = criterion()(output, targets)["loss_bbox"]
    torch.save(float(loss), f"{folder}/{rank}.pth")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_boxes_are_counted_over_all_processes(tmp_path):
    torch.multiprocessing.start_processes(
        count_of_one_process, (str(tmp_path),), nprocs=2, start_method="fork"
    )
    for rank in range(2):
        alone = criterion()(*random_problem(counts=(rank + 1,)))["loss_bbox"]
        found = torch.load(tmp_path / f"{rank}.pth")
        assert found == pytest.approx(float(alone.detach()) * (rank + 1) / 1.5, rel=1e-5)


@pytest.mark.parametrize(
    ("world", "elsewhere", "normaliser"),
    [(1, None, 3.0), (2, 1, 2.0), (2, 0, 1.5), (4, 0, 1.0), (4, 7, 2.5)],
)
def test_losses_are_divided_by_the_mean_number_of_boxes_per_process(
    monkeypatch, world, elsewhere, normaliser
):
    def all_reduce(total):
        total += elsewhere  # in a single process, where there is none, it must not be called

    torch.manual_seed(1)
    output = DetrOutput(torch.randn(1, 1, 5, 2), torch.rand(1, 1, 5, 4) * 0.4 + 0.2)
    target = Target(torch.tensor([0, 1, 0]), torch.rand(3, 4) * 0.4 + 0.2)
    alone = criterion()(output, [target])  # three boxes
    monkeypatch.setattr(comm, "get_world_size", lambda: world)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert criterion().normaliser([target], torch.device("cpu")).item() == normaliser
    for name, loss in criterion()(output, [target]).items():
        torch.testing.assert_close(loss, alone[name] * 3 / normaliser)


@pytest.mark.parametrize("kind", [SigmoidFocal(), SoftmaxCE()], ids=["sigmoid", "softmax"])
def test_a_label_that_nothing_overlaps_enough_teaches_background(kind):
    """Its query learns what it would without the label; the normaliser still counts the label."""
    torch.manual_seed(5)
    output = DetrOutput(torch.randn(2, 1, 4, 3), torch.rand(2, 1, 4, 4) * 0.2 + 0.1)
    near = output.boxes[-1, 0, :1]
    far = torch.tensor([[0.9, 0.9, 0.1, 0.1]])
    both = Target(torch.tensor([0, 1]), torch.cat([near, far]))
    both.min_iou = torch.tensor([0.0, 0.3])
    one = Target(torch.tensor([0]), near)
    losses, wanted = (criterion(kind)(output, [target]) for target in (both, one))
    for name, loss in losses.items():
        shared = isinstance(kind, SoftmaxCE) and "cls" in name  # divides by weights, not by boxes
        torch.testing.assert_close(loss, wanted[name] / (1 if shared else 2))


def test_the_shares_of_matched_labels_are_logged_by_layer():
    torch.manual_seed(5)
    output = DetrOutput(torch.randn(2, 1, 4, 3), torch.rand(2, 1, 4, 4) * 0.2 + 0.1)
    target = Target(torch.tensor([0, 1]), torch.cat([output.boxes[-1, 0, :1], torch.ones(1, 4)]))
    target.pseudo, target.min_iou = torch.tensor([True, False]), torch.tensor([0.95, 0.5])
    with EventStorage() as storage:
        criterion()(output, [target])
    logged = {name: value for name, (value, _) in storage.latest().items()}
    assert logged == {
        "matched/new_0": 0.0,
        "matched/new": 0.0,
        "matched/pseudo_0": 0.0,
        "matched/pseudo": 1.0,
    }


@pytest.mark.parametrize("kind", [SigmoidFocal(), SoftmaxCE()])
def test_a_weight_multiplies_the_losses_of_the_query_that_its_label_is_matched_to(kind):
    torch.manual_seed(0)
    width = 2 if isinstance(kind, SigmoidFocal) else 3
    logits = torch.randn(1, 1, 3, width)
    boxes = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.8, 0.8, 0.2, 0.2], [0.5, 0.5, 0.9, 0.9]])
    output = DetrOutput(logits, boxes[None, None])
    wanted = boxes[:2] + 0.01
    labels, weights = torch.tensor([0, 1]), torch.tensor([3.0, 1.0])
    plain = criterion(kind)(output, [Target(labels, wanted)])
    single = criterion(kind)(output, [Target(labels[:1], wanted[:1])])
    found = criterion(kind)(output, [Target(labels, wanted, weights=weights)])
    for name in ("loss_bbox", "loss_giou"):  # of weights of 4: both boxes, and the first twice more
        torch.testing.assert_close(found[name], (2 * plain[name] + 2 * single[name]) / 4)
    # The classes by hand: the rows of the three queries, the first three times.
    rows = torch.zeros(3, width)
    rows[0, 0] = rows[1, 1] = 1.0
    if isinstance(kind, SigmoidFocal):
        p = logits[0, 0].sigmoid()
        loss = -torch.where(
            rows > 0, 0.25 * (1 - p) ** 2 * p.log(), 0.75 * p**2 * (1 - p).log()
        ).sum(1)
        expected = (3 * loss[0] + loss[1] + loss[2]) / 4
    else:
        loss = -logits[0, 0].log_softmax(1)
        expected = (3 * loss[0, 0] + loss[1, 1] + 0.1 * loss[2, 2]) / (3 + 1 + 0.1)
    torch.testing.assert_close(found["loss_cls"], 2 * expected)
