"""The learner: labels merged from a frozen teacher that stays out of everything else."""

import copy

import pytest
import torch
from detectron2.structures import Boxes, Instances

from cldetr.engine.stages import calibration_learner, training_learner
from cldetr.errors import InputError
from cldetr.methods.distill import DistillRule
from cldetr.methods.learner import Learner, freeze
from cldetr.methods.matching import MatcherRule
from cldetr.methods.method import CalibrationRule, MemoryRule, Method
from cldetr.methods.pseudo import PseudoRule
from cldetr.modeling.classification import SigmoidFocal, SoftmaxCE
from cldetr.modeling.criterion import SetCriterion
from cldetr.modeling.deformable_detr import DeformableDETR
from cldetr.modeling.deformable_transformer import DeformableTransformer
from cldetr.modeling.detr import DETR
from cldetr.modeling.detr_transformer import DetrTransformer
from cldetr.modeling.matcher import Matcher
from cldetr.modeling.small_resnet import make_small_resnet
from cldetr.modeling.structures import Target
from cldetr.scenario import Phase, Scenario

CLASSES = 5


@pytest.fixture
def detector():
    transformer = DeformableTransformer(
        dim=32, heads=2, encoder_layers=1, decoder_layers=2, ffn_dim=32, dropout=0.0, levels=3
    )
    return DeformableDETR(
        transformer=transformer,
        num_queries=9,
        backbone=make_small_resnet(),
        in_features=["res3", "res4", "res5"],
        criterion=SetCriterion(matcher=Matcher(SigmoidFocal())),
        num_classes=CLASSES,
        pixel_mean=[127.5] * 3,
        pixel_std=[64.0] * 3,
    ).train()


def batch(labels=((3,), ()), classes=((3, 4), (0, 1, 2))):
    made = []
    for own, annotated in zip(labels, classes, strict=True):
        instances = Instances((64, 64))
        instances.gt_boxes = Boxes(torch.tensor([[10.0, 10, 40, 40]] * len(own)).reshape(-1, 4))
        instances.gt_classes = torch.tensor(own, dtype=torch.int64)
        image = torch.randint(0, 255, (3, 64, 64), dtype=torch.uint8)
        made.append(
            {"image": image, "instances": instances, "classes": annotated, "file_name": "x"}
        )
    return made


def test_without_a_teacher_the_loss_is_the_detectors_own(detector):
    inputs = batch()
    learner = Learner(detector, seen=range(CLASSES), mask_unseen=False)
    assert learner(inputs) == detector(inputs)


def test_the_loss_is_that_of_merged_labels_worked_out_apart(detector):
    inputs = batch()
    rule = PseudoRule(k=2, foreground=0.0, soft=False, iou=1.0)
    learner = Learner(
        detector,
        seen=range(CLASSES),
        teacher=freeze(detector, [0, 1, 2]),
        teacher_classes=[0, 1, 2],
        rule=rule,
    )
    images = detector.preprocess(inputs)
    output = detector.predict(images)
    targets = []
    for image, entry in enumerate(inputs):  # top-2 queries by their best old class, by hand
        scores = output.logits[-1, image].sigmoid()[:, :3]
        order = scores.max(1).values.argsort(descending=True)[:2]
        truth = detector.targets([entry])[0]
        labels = torch.cat([truth.labels, scores[order].argmax(1)])
        boxes = torch.cat([truth.boxes, output.boxes[-1, image, order].detach()])
        targets.append(Target(labels, boxes))
    expected = detector.criterion(output, targets)
    found = learner(inputs)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)
    added = torch.cat([target.labels for target in targets])[1:]  # the first image has one truth
    assert learner.pseudo_counts.tolist() == torch.bincount(added, minlength=CLASSES).tolist()
    assert learner.pseudo_images == 2


def test_floors_of_the_matcher_reach_the_loss_from_the_second_phase_on(detector):
    """A floor of 1 leaves every label unmatched: no box loss; the first phase has no floor."""
    phases = (Phase(1, (0, 1, 2), ()), Phase(2, (3, 4), ()))
    scenario = Scenario("3+2", "strict", (), phases, "id", None, None, ())
    method = Method(
        pseudo=PseudoRule(foreground=0.0),
        matcher=MatcherRule(1.0, 1.0),
        memory=MemoryRule(),
        calibrate=CalibrationRule(complete=PseudoRule(foreground=0.0, skip_annotated=True)),
    )
    first = training_learner(detector, method, scenario, 1, detector)
    second = training_learner(detector, method, scenario, 2, detector)
    calibration = calibration_learner(detector, method, scenario, 2)
    assert first(batch())["loss_bbox"] > 0
    assert second(batch())["loss_bbox"] == 0
    assert calibration(batch())["loss_bbox"] == 0
    assert second(batch())["loss_cls"] > 0


def test_the_teacher_is_no_part_of_the_module_and_never_changes(detector):
    teacher = freeze(detector, [0, 1])
    before = copy.deepcopy(teacher.state_dict())
    learner = Learner(
        detector,
        seen=range(CLASSES),
        teacher=teacher,
        teacher_classes=[0, 1],
        rule=PseudoRule(foreground=0.0),
    )
    assert len(list(learner.parameters())) == len(list(detector.parameters()))
    assert all(key.startswith("detector.") for key in learner.state_dict())
    learner.train()
    assert not teacher.training
    optimizer = torch.optim.SGD(learner.parameters(), lr=1.0)
    sum(learner(batch()).values()).backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(torch.equal(value, before[key]) for key, value in teacher.state_dict().items())


def test_rows_of_unseen_classes_get_no_gradient_when_masked(detector):
    losses = Learner(detector, seen=[0, 1, 3], mask_unseen=True)(batch())
    sum(losses.values()).backward()
    gradient = detector.class_embed[0].weight.grad
    assert gradient[[2, 4]].abs().sum() == 0
    assert gradient[[0, 1, 3]].abs().sum() > 0


def test_lwf_by_boxes_divides_by_the_labels_of_the_batch(detector):
    inputs = batch(labels=((3, 3), (3,)))
    losses = {}
    teacher = freeze(detector, [0, 1])
    for normaliser in ("images", "boxes"):
        learner = Learner(
            detector,
            seen=range(CLASSES),
            teacher=teacher,
            teacher_classes=[0, 1],
            distill=DistillRule(normaliser=normaliser),
        )
        losses[normaliser] = learner(inputs)["loss_kd_cls"]
    torch.testing.assert_close(losses["boxes"], losses["images"] * 2 / 3)  # 2 images, 3 boxes


def test_classes_annotated_on_an_image_are_not_completed(detector):
    learner = Learner(
        detector,
        seen=range(CLASSES),
        teacher=freeze(detector, range(CLASSES)),
        teacher_classes=range(CLASSES),
        rule=PseudoRule(foreground=0.0, k=9, iou=1.0, skip_annotated=True),
    )
    inputs = batch()
    teacher_output = learner.teacher.predict(detector.preprocess(inputs))
    merged = learner._merge(teacher_output, detector.targets(inputs), inputs)
    assert set(merged[0].labels[1:].tolist()) <= {0, 1, 2}  # of phase 2: 3 and 4 are annotated
    assert set(merged[1].labels.tolist()) <= {3, 4}  # of phase 1
    assert len(merged[1]) == 9


@pytest.mark.parametrize("sick", ["teacher", "student"])
def test_predictions_that_are_not_finite_make_every_gradient_not_finite(detector, sick):
    teacher = freeze(detector, [0])
    model = teacher if sick == "teacher" else detector
    with torch.no_grad():
        next(iter(model.class_embed[0].parameters())).fill_(float("nan"))
    learner = Learner(
        detector, seen=[0], teacher=teacher, teacher_classes=[0], rule=PseudoRule(foreground=0.0)
    )
    sum(learner(batch()).values()).backward()
    norm = torch.nn.utils.clip_grad_norm_(learner.parameters(), 0.1)
    assert not torch.isfinite(norm)


@pytest.mark.parametrize("select", ["topk", "threshold", "curriculum", "all", "pairs"])
@pytest.mark.parametrize("head", ["sigmoid", "softmax"])
def test_recorded_predictions_label_as_the_live_teacher_does(detector, head, select):
    if head == "softmax":
        transformer = DetrTransformer(
            dim=32, heads=2, encoder_layers=1, decoder_layers=1, ffn_dim=32, dropout=0.0
        )
        detector = DETR(
            transformer=transformer,
            num_queries=9,
            backbone=make_small_resnet(),
            in_features=["res5"],
            criterion=SetCriterion(matcher=Matcher(SoftmaxCE(), 1.0)),
            num_classes=CLASSES,
            pixel_mean=[127.5] * 3,
            pixel_std=[64.0] * 3,
        )
    with torch.no_grad():  # scores that differ, on both sides of the thresholds
        for parameter in detector.class_embed.parameters():
            parameter.add_(torch.randn_like(parameter))
    rule = PseudoRule(
        select, k=3, foreground=0.4, score=0.3, iou=1.0, skip_annotated=True, cache=True
    )
    learner = Learner(
        detector,
        seen=range(CLASSES),
        teacher=freeze(detector, [0, 2, 3]),
        teacher_classes=[0, 2, 3],
        rule=rule,
    )
    inputs = [{**entry, "height": 64, "width": 64} for entry in batch()]
    truths = detector.targets(inputs)
    teacher_output = learner.teacher.predict(detector.preprocess(inputs))
    progresses = (0.0, 0.6, 1.0)
    live = []
    for learner.progress in progresses:
        live.append(learner._merge(teacher_output, truths, inputs))
    kept = learner.teacher_candidates(inputs)
    learner.dismiss_teacher()
    inputs = [{**entry, "predictions": found} for entry, found in zip(inputs, kept, strict=True)]
    for learner.progress, expected in zip(progresses, live, strict=True):
        found = learner._merge(None, truths, inputs)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.labels, other.labels)
            torch.testing.assert_close(one.boxes, other.boxes)
            torch.testing.assert_close(one.probs, other.probs)
    assert any(len(target) > len(truth) for target, truth in zip(live[-1], truths, strict=True))
    sum(learner(inputs).values()).backward()  # a whole step without the teacher


@pytest.mark.parametrize("loss", ["lwf", "rank", "topology", "response"])
def test_a_distillation_loss_cannot_do_with_recorded_predictions(loss):
    with pytest.raises(InputError, match=r"METHOD\.PSEUDO\.CACHE"):
        Method(pseudo=PseudoRule(cache=True), distill=DistillRule(loss))


def test_a_loss_on_prototypes_needs_a_detector_that_classifies_states(detector, monkeypatch):
    method = Method(distill=DistillRule("rank"))
    method.check(detector)
    monkeypatch.delattr(DeformableDETR, "classify")
    with pytest.raises(InputError, match="define `classify` in DeformableDETR"):
        method.check(detector)
    Method(distill=DistillRule("topology")).check(detector)


def test_a_distillation_loss_keeps_no_scores_of_new_classes():
    with pytest.raises(InputError, match=r"METHOD\.PSEUDO\.ANY_CLASS.*set it to False"):
        Method(pseudo=PseudoRule(any_class=True), distill=DistillRule("rank"))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_the_weight_of_a_distillation_loss_is_a_number_from_zero(weight):
    with pytest.raises(InputError, match=r"METHOD\.DISTILL\.WEIGHT"):
        DistillRule(weight=weight)


def test_a_query_is_classified_as_the_detector_does(detector):
    output = detector.predict(detector.preprocess(batch()))
    torch.testing.assert_close(detector.classify(output.features), output.logits[-1])


@pytest.mark.parametrize("rule", [None, PseudoRule(foreground=0.0)], ids=["no teacher", "teacher"])
def test_classes_that_nobody_labelled_on_an_image_are_not_taught_there(detector, rule):
    """Of a new image (classes 3 and 4) and an exemplar (0 to 2) the second may show new objects."""
    teacher = {} if rule is None else {"teacher": freeze(detector, [0, 1, 2]), "rule": rule}
    learner = Learner(
        detector,
        seen=range(CLASSES),
        teacher_classes=[0, 1, 2],
        ignore_unlabelled=True,
        **teacher,
    )
    inputs = batch()
    mask = learner.class_mask(inputs)
    old = rule is not None  # the teacher labels old classes on new images
    assert mask[:, 0].tolist() == [[old] * 3 + [True] * 2, [True] * 3 + [False] * 2]
    (labelled,) = learner.label([inputs])
    output = detector.predict(labelled.images)
    output.logits.retain_grad()
    sum(detector.criterion(output, labelled.targets, labelled.class_mask).values()).backward()
    taught = output.logits.grad.abs().sum(dim=(0, 2)) > 0  # (B, K)
    assert torch.equal(taught, mask[:, 0])
    plain = Learner(detector, seen=range(CLASSES), teacher_classes=[0, 1, 2], **teacher)
    assert plain.class_mask(inputs).all()


def test_a_softmax_compares_with_the_labelled_classes_of_each_image():
    logits = torch.randn(2, 2, 3, 5)  # two layers and images, four classes and no-object
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])[:, None]
    labels = torch.zeros_like(logits)
    labels[..., -1] = 1.0
    found = SoftmaxCE().loss(logits, labels, torch.ones(()), mask)
    kept = logits[:, 0][..., [0, 1, 4]].log_softmax(-1)[..., -1]
    rest = logits[:, 1].log_softmax(-1)[..., -1]
    torch.testing.assert_close(found, -(kept.sum(1) + rest.sum(1)) / 6)
