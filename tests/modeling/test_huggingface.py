"""Detectors of Hugging Face transformers behind our seam, against our own and against theirs."""

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from PIL import Image

from cldetr.analysis.predict import Predictor
from cldetr.config import default_config
from cldetr.errors import InputError
from cldetr.methods.distill import LOSSES, DistillRule
from cldetr.methods.learner import Learner, freeze
from cldetr.methods.matching import MatcherRule
from cldetr.methods.method import CLDETR, CalibrationRule, Method
from cldetr.methods.pseudo import PseudoRule
from cldetr.modeling.huggingface import HuggingFaceDetector
from cldetr.modeling.huggingface_files import describe_source
from cldetr.modeling.huggingface_operator import use_our_operator
from cldetr.modeling.structures import DetrOutput, Target

from .tiny_huggingface import CONFIGS, LABELS, hf, make_model, make_processor, save

# Those that differ little from others are for `make test-slow`.
RARE = {"deformable_detr_refine", "dab_detr", "lw_detr", "yolos"}
ALL = [pytest.param(x, marks=pytest.mark.slow if x in RARE else ()) for x in CONFIGS]
IMAGE_DEPENDENT = {"rt_detr", "rt_detr_v2", "d_fine", "deimv2", "rf_detr", "lw_detr"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saves a tiny detector once, with its image processor."""
    saved = {}

    def make(name):
        if name not in saved:
            saved[name] = tmp_path_factory.mktemp(name)
            save(name, saved[name])
        return str(saved[name])

    return make


def config_of(name, classes=3, **keys):
    cfg = default_config()
    values = {
        "MODEL.META_ARCHITECTURE": "HuggingFaceDetector",
        "MODEL.HUGGINGFACE.NAME": name,
        "MODEL.DEVICE": "cpu",
        "MODEL.DETR.NUM_CLASSES": classes,
        "INPUT.MIN_SIZE_TRAIN": [0],
        "INPUT.MIN_SIZE_TEST": 0,
    } | {key.replace("__", "."): value for key, value in keys.items()}
    cfg.merge_from_list([word for pair in values.items() for word in pair])
    return cfg


def build(name, classes=3, pretrained=True, **keys):
    torch.manual_seed(0)
    detector = build_model(config_of(name, classes, **keys))
    if pretrained:
        detector.load_pretrained()
    return detector


# Equal to ours.


@pytest.mark.parametrize("structure", ["plain", "refine", "two-stage"])
def test_deformable_detr_equals_our_own(structure, build, batch, example, hugging_face):
    two_stage = structure == "two-stage"
    if two_stage:  # without padding, which they let become a proposal and we do not
        batch = [example(96, 128, 4), example(96, 128, 3, seed=1)]
    ours = build(
        EXACT_PADDING=False, WITH_BOX_REFINE=structure != "plain", TWO_STAGE=two_stage
    ).train()
    model = hugging_face.twin(ours)
    theirs = HuggingFaceDetector(
        model=model, processor=_plain_processor(ours), criterion=ours.criterion, resize=False
    ).train()
    images, expected = theirs.preprocess(batch), ours.preprocess(batch)
    assert images.sizes == expected.sizes
    torch.testing.assert_close(images.tensor, expected.tensor, atol=1e-5, rtol=1e-5)
    targets = ours.targets(batch)
    mask = torch.tensor([True] * 5 + [False] * 2)
    losses, output = ours.losses(expected, targets, mask)
    found, predicted = theirs.losses(expected, targets, mask)
    torch.testing.assert_close(predicted.logits, output.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(predicted.boxes, output.boxes, atol=1e-6, rtol=1e-5)
    assert found.keys() == losses.keys()
    assert two_stage == ("loss_cls_enc" in found)
    for name, value in losses.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
    for each in (losses, found):
        sum(each.values()).backward()
    gradients = {n: p.grad for n, p in ours.named_parameters(remove_duplicate=False)}
    gradients = hugging_face.translate(ours, gradients)
    compared = 0
    for name, parameter in model.named_parameters():
        wanted = gradients[re.sub(r"model\.decoder\.(bbox|class)_embed", r"\1_embed", name)]
        if parameter.grad is not None and wanted is not None:
            error = (parameter.grad - wanted).norm() / wanted.norm().clamp(min=1e-3)
            assert error < (2e-2 if ".backbone." in name else 2e-4), f"{name}: {error}"
            compared += 1
    assert compared > 50
    assert theirs.proposal_parameters() == [
        f"model.{prefix}class_embed.3.{kind}"
        for prefix in ("model.decoder.", "")
        for kind in ("weight", "bias")
        if two_stage
    ]


def _plain_processor(detector):
    return hf.DeformableDetrImageProcessor(
        image_mean=(detector.pixel_mean / 255).flatten().tolist(),
        image_std=(detector.pixel_std / 255).flatten().tolist(),
    )


# Equal to theirs.


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """An image file that is no square and needs resizing."""
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 256, (15, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((120, 90), Image.Resampling.BICUBIC).save(path)
    return path


@pytest.mark.parametrize("name", ALL)
def test_predictions_of_an_image_file_equal_the_pipelines(name, folder, photo):
    expected = hf.pipeline("object-detection", model=folder(name), threshold=0.0)(str(photo))
    expected = sorted(expected, key=lambda found: -found["score"])
    predictor = Predictor.from_checkpoint(folder(name), device="cpu")
    found = predictor(photo, score=0.0)
    assert len(found) >= 10
    if predictor.detector.softmax:
        assert len(expected) == 12
    for ours, theirs in zip(found, expected, strict=False):
        assert ours.score == pytest.approx(theirs["score"], abs=2e-5)
    # Of scores that are equal but for rounding the order may differ: each is looked for.
    for ours in found[:5]:
        low, high = np.clip(ours.box[:2], 0, None), ours.box[2:]
        assert any(
            theirs["label"] == ours.name
            and abs(theirs["score"] - ours.score) < 2e-5
            and np.abs(np.clip([theirs["box"][x] for x in ("xmin", "ymin")], 0, None) - low).max()
            <= 1
            and np.abs(
                np.minimum([theirs["box"][x] for x in ("xmax", "ymax")], [120, 90]) - high
            ).max()
            <= 1
            for theirs in expected  # the pipeline cuts its boxes to whole pixels
        ), ours


@pytest.mark.parametrize("name", ["deformable_detr_refine", "rt_detr_v2", "d_fine"])
def test_heads_that_differ_from_layer_to_layer_stay_different(name, tmp_path, photo):
    """Their configs tie the heads, and their checkpoints have different ones."""
    config = CONFIGS[name]()
    config.tie_word_embeddings = False
    config.id2label = dict(enumerate(LABELS))
    torch.manual_seed(0)
    model = hf.AutoModelForObjectDetection.from_config(config).eval()
    state = model.state_dict()
    for key in state:
        if "model.decoder.class_embed" in key or "model.decoder.bbox_embed" in key:
            state[key].copy_(state[key.removeprefix("model.decoder.")])
    config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    make_processor(name).save_pretrained(tmp_path)
    expected = hf.pipeline("object-detection", model=str(tmp_path), threshold=0.0)(str(photo))
    scores = sorted((found["score"] for found in expected), reverse=True)
    predictor = Predictor.from_checkpoint(tmp_path)
    found = [found.score for found in predictor(photo, score=0.0)]
    np.testing.assert_allclose(found[:12], scores[:12], atol=2e-5)
    heads = predictor.detector.model.class_embed
    assert not torch.equal(heads[0].weight, heads[1].weight)
    decoder = predictor.detector.model.model.decoder
    assert (
        decoder.bbox_embed[1].layers[0].weight
        is predictor.detector.model.bbox_embed[1].layers[0].weight
    )


@pytest.mark.parametrize("name", ALL)
def test_the_class_parameters_are_those_that_grow_with_the_labels(name):
    shapes = [
        {key: tuple(value.shape) for key, value in make_model(name, labels).state_dict().items()}
        for labels in (LABELS, (*LABELS, "star"))
    ]
    grown = {f"model.{key}" for key, shape in shapes[0].items() if shape != shapes[1][key]}
    detector = HuggingFaceDetector(
        model=make_model(name), processor=hf.RTDetrImageProcessor(), criterion=torch.nn.Identity()
    )
    assert set(detector.class_parameters()) == grown
    rows = {detector.state_dict()[key].shape[0] for key in grown}
    assert rows <= ({4} if detector.softmax else {3, 4})  # 4: an embedding of noisy labels


WITHOUT_OPERATOR = {"detr", "conditional_detr", "dab_detr", "yolos"}


@pytest.mark.parametrize("name", [x for x in ALL if x.values[0] not in WITHOUT_OPERATOR])
def test_our_operator_gives_what_theirs_gives(name):
    theirs, ours = make_model(name), make_model(name)
    for parameter, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        with torch.no_grad():  # off the cells' centres, where the gradient is a matter of rounding
            other.copy_(parameter.add_(0.1 * torch.randn_like(parameter)))
    assert use_our_operator(ours) >= 2
    pixels, grads, logits = torch.randn(2, 3, 64, 64), [], []
    for model in (theirs, ours):
        output = model(pixel_values=pixels)
        (output.logits.sum() + output.pred_boxes.sum()).backward()
        logits.append(output.logits)
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)
    assert grads[0].keys() == grads[1].keys()
    offsets = [key for key in grads[0] if "sampling_offsets.weight" in key]
    assert offsets
    for key in offsets:
        scale = grads[0][key].abs().max()
        torch.testing.assert_close(
            grads[1][key], grads[0][key], atol=1e-3 * float(scale), rtol=1e-3
        )
    assert use_our_operator(make_model(name)) == use_our_operator(ours)


TERMS = {
    "rt_detr": "loss_vfl_dn_1",
    "rt_detr_v2": "loss_vfl_dn_1",
    "d_fine": "loss_fgl_dn_1",
    "deimv2": "loss_mal_dn_1",
    "rf_detr": "loss_ce_enc",
    "lw_detr": "loss_ce_enc",
}


@pytest.mark.parametrize("name", ALL)
def test_the_native_loss_is_the_models_own(name, folder, batch_of):
    detector = build(folder(name), MODEL__HUGGINGFACE__LOSS="native").train()
    images, targets = batch_of(detector)
    labels = [{"class_labels": t.labels, "boxes": t.boxes} for t in targets]
    torch.manual_seed(5)
    inputs = {"pixel_values": images.tensor}
    if name != "yolos":
        inputs["pixel_mask"] = (~images.mask).long()
    expected = detector.model(**inputs, labels=labels)
    with EventStorage() as storage:
        torch.manual_seed(5)
        losses, output = detector.losses(images, targets)
        logged = {key.removeprefix("native/") for key in storage.latest()}
    assert losses.keys() == {"loss_native"}
    torch.testing.assert_close(losses["loss_native"], expected.loss)
    assert logged == expected.loss_dict.keys()
    assert TERMS.get(name, "loss_giou") in logged
    assert output.logits.shape[1:3] == (2, 12)
    assert "_loss_function" not in vars(detector.model)


@pytest.fixture
def batch_of(example):
    """Images and targets of a detector: two images, one of them padded where it can be."""

    def make(detector):
        inputs = [example(64, 80, 3, classes=3), example(64, 64, 2, classes=3, seed=1)]
        return detector.preprocess(inputs), detector.targets(inputs)

    return make


# Losses of ours.


@pytest.mark.parametrize("name", ALL)
def test_our_losses_reach_every_weight_that_is_trained(name, folder, batch_of):
    detector = build(folder(name)).train()
    losses, output = detector.losses(*batch_of(detector), torch.tensor([True, True, False]))
    assert {"loss_cls", "loss_bbox", "loss_giou"} <= losses.keys()
    assert output.logits.shape[1:] == (2, 12, 4 if detector.softmax else 3)
    sum(losses.values()).backward()
    none = [n for n, p in detector.named_parameters() if p.requires_grad and p.grad is None]
    assert none == []  # processes that train together would wait for these
    if not detector.softmax:  # no gradient reaches the row that is excluded
        for key in detector.class_parameters():
            grad = detector.get_parameter(key).grad
            if "denoising" not in key and key not in detector.proposal_parameters():
                assert grad[0].any()
                assert not grad[2].any(), key


@pytest.mark.parametrize("name", [x for x in ALL if x.values[0] in ("rf_detr", "lw_detr")])
def test_groups_of_queries_are_matched_each_on_its_own(name, folder, batch_of):
    detector = build(folder(name)).train()
    images, targets = batch_of(detector)
    torch.manual_seed(3)
    losses, output = detector.losses(images, targets)
    torch.manual_seed(3)
    whole = detector._forward(images).output
    assert whole.logits.shape[2] == 3 * 12
    each = []
    for group in range(3):
        queries = slice(12 * group, 12 * group + 12)
        encoder, decoder = (
            detector.criterion(
                DetrOutput(whole.logits[layers, :, queries], whole.boxes[layers, :, queries]),
                targets,
            )
            for layers in (slice(0, 1), slice(1, None))
        )
        each.append(decoder | {f"{key}_enc": value for key, value in encoder.items()})
    assert losses.keys() == each[0].keys()
    for key, value in losses.items():
        torch.testing.assert_close(value, sum(group[key] for group in each) / 3)
    torch.testing.assert_close(output.logits, whole.logits[:, :, :12])
    assert detector.eval().predict(images).logits.shape[2] == 12


@pytest.mark.parametrize("loss", ["ours", "native"])
@pytest.mark.parametrize("name", ["deformable_detr", "rt_detr", "rf_detr"])
def test_predictions_that_are_not_finite_make_losses_that_are_not(name, loss, folder, batch_of):
    detector = build(folder(name), MODEL__HUGGINGFACE__LOSS=loss).train()
    images, targets = batch_of(detector)
    images.tensor[0, 0, 5, 5] = torch.nan
    losses, output = detector.losses(images, targets)
    assert output is None
    assert torch.stack(list(losses.values())).sum().isnan()


@pytest.mark.parametrize("name", ["rt_detr", "d_fine"])
def test_denoising_queries_are_in_training_with_labels_alone(name, folder, batch_of):
    detector = build(folder(name)).train()
    images, _ = batch_of(detector)
    layers = detector.predict(images)
    assert layers.logits.shape[2] == 12
    assert not detector.get_parameter("model.model.denoising_class_embed.weight").requires_grad
    native = build(folder(name), MODEL__HUGGINGFACE__LOSS="native")
    assert native.get_parameter("model.model.denoising_class_embed.weight").requires_grad
    assert native.eval().predict(images).logits.shape[2] == 12


# Batch normalisation and the teacher.


def _statistics(detector):
    return {k: v.clone() for k, v in detector.state_dict().items() if "running_" in k}


def test_batch_statistics_are_trained_or_frozen_and_the_teachers_stay(folder, example):
    inputs = [example(64, 80, 3, classes=3), example(64, 64, 2, classes=3, seed=1)]
    for frozen in (False, True):
        detector = build(folder("rt_detr"), MODEL__HUGGINGFACE__FREEZE_BATCH_NORM=frozen)
        teacher = freeze(detector, [0, 1])
        learner = Learner(
            detector, seen=[0, 1, 2], teacher=teacher, teacher_classes=[0, 1], rule=PseudoRule()
        ).train()
        before, old = _statistics(detector), _statistics(teacher)
        sum(learner(inputs).values()).backward()
        assert len(before) > 20
        moved = [
            key for key, value in _statistics(detector).items() if not before[key].equal(value)
        ]
        assert moved == [] if frozen else len(moved) == len(before)
        assert all(value.equal(old[key]) for key, value in _statistics(teacher).items())
        assert not any(module.training for module in teacher.modules())
        norms = [x for x in detector.modules() if isinstance(x, torch.nn.BatchNorm2d)]
        assert all(x.weight.requires_grad is not frozen for x in norms)
        assert all(x.training is not frozen for x in norms)


def test_a_pretrained_detector_starts_with_new_rows_for_its_classes(folder):
    detector = build(folder("detr"), classes=5)
    source = make_model("detr").state_dict()
    state = detector.state_dict()
    head = "class_labels_classifier.weight"
    assert state[f"model.{head}"].shape == (6, 32)
    assert torch.equal(state[f"model.{head}"][-1], source[head][-1])  # no-object
    assert not torch.equal(state[f"model.{head}"][0], source[head][0])
    key = "bbox_predictor.layers.0.weight"
    assert torch.equal(state[f"model.{key}"], source[key])
    fresh = build(folder("detr"), classes=5, MODEL__HUGGINGFACE__PRETRAINED=False)
    assert not torch.equal(fresh.state_dict()[f"model.{key}"], source[key])


def test_sizes_of_the_config_take_the_place_of_the_processors(folder, example):
    sized = build(folder("detr"), INPUT__MIN_SIZE_TRAIN=[80], INPUT__MIN_SIZE_TEST=80)
    assert sized.preprocess([example(48, 80, 0)]).sizes == [(48, 80)]
    assert build(folder("detr")).preprocess([example(48, 80, 0)]).sizes == [(58, 96)]
    with pytest.raises(InputError, match="must both be 0"):
        build(folder("detr"), INPUT__MIN_SIZE_TEST=80)
    with pytest.raises(InputError, match="set it to RGB"):
        build(folder("detr"), INPUT__FORMAT="BGR")


# What is refused.


@pytest.mark.parametrize("name", ALL)
def test_query_by_query_distillation_needs_queries_that_stay(name, folder):
    detector = build(folder(name), pretrained=False)
    method = Method(distill=DistillRule())
    if name in IMAGE_DEPENDENT or name.endswith("two_stage"):
        with pytest.raises(InputError, match=r"depend on the image.*METHOD.PSEUDO"):
            method.check(detector)
    else:
        method.check(detector)
    CLDETR.check(detector)


def test_native_losses_take_hard_labels_of_all_classes(folder, batch_of):
    detector = build(folder("rt_detr"), MODEL__HUGGINGFACE__LOSS="native").train()
    told = r"^HuggingFaceDetector cannot.*\n.*PSEUDO.SOFT to False.*\n.*UNSEEN to negative"
    with pytest.raises(InputError, match=told):
        CLDETR.check(detector)
    lowered = PseudoRule(soft=False, calibrated=True)
    with pytest.raises(InputError, match=r"PSEUDO.CALIBRATED to False"):
        Method(pseudo=lowered, unseen="negative").check(detector)
    soft = CalibrationRule(complete=PseudoRule(soft=True))
    with pytest.raises(InputError, match=r"CALIBRATE.COMPLETE.SOFT to False"):
        Method(memory=CLDETR.memory, calibrate=soft, unseen="negative").check(detector)
    weighed = Method(
        pseudo=PseudoRule(soft=False, weighted=True), matcher=MatcherRule(), unseen="negative"
    )
    with pytest.raises(InputError, match=r"WEIGHTED to False.*\n.*MATCHER.ENABLED to False"):
        weighed.check(detector)
    balanced = Method(pseudo=PseudoRule(soft=False, balance=0.5), unseen="negative")
    with pytest.raises(InputError, match=r"^HuggingFaceDetector cannot.*\n.*BALANCE to 0"):
        balanced.check(detector)
    Method(pseudo=PseudoRule(soft=False), unseen="negative").check(detector)
    images, targets = batch_of(detector)
    with pytest.raises(InputError, match="UNSEEN to negative"):
        detector.losses(images, targets, torch.tensor([True, False, True]))
    probs = torch.eye(3)[targets[0].labels]
    with pytest.raises(InputError, match=r"PSEUDO.SOFT and METHOD.PSEUDO.CALIBRATED to False"):
        detector.losses(images, [Target(targets[0].labels, targets[0].boxes, probs), targets[1]])


@pytest.mark.parametrize("loss", LOSSES)
def test_a_two_stage_detector_takes_no_loss_that_compares_query_by_query(tiny_config, loss):
    detector = build_model(tiny_config(WITH_BOX_REFINE=True, TWO_STAGE=True))
    method = Method(distill=DistillRule(loss))
    if loss == "rank":  # compares prototypes of classes
        method.check(detector)
    else:
        with pytest.raises(InputError, match="depend on the image"):
            method.check(detector)


@pytest.mark.parametrize("loss", ["topology", "response"])
@pytest.mark.parametrize("name", ["detr", "deformable_detr", "yolos"])
def test_losses_on_states_and_on_all_layers_train(name, loss, folder, example):
    student, teacher = build(folder(name)).train(), build(folder(name))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    learner = Learner(
        student,
        seen=range(3),
        teacher=freeze(teacher, range(3)),
        teacher_classes=range(3),
        distill=DistillRule(loss, min_score=0.0),
    ).train()
    batch = [{**example(64, 64, 3, classes=3), "classes": range(3)} for _ in range(2)]
    found = learner(batch)[f"loss_kd_{loss}"]
    found.backward()
    assert found.isfinite()
    assert loss == "topology" or found > 0  # which takes three classes that the teacher finds


def test_the_encoders_choice_of_queries_is_matched_at_any_iou(folder, batch_of):
    detector = build(folder("rt_detr")).train()
    images, targets = batch_of(detector)
    targets = [
        dataclasses.replace(target, min_iou=torch.ones_like(target.boxes[:, 0]))
        for target in targets
    ]
    losses, _ = detector.losses(images, targets)
    assert losses["loss_bbox"] == 0.0  # no box is met exactly
    assert losses["loss_bbox_0"] == 0.0
    assert losses["loss_bbox_enc"] > 0.0


def test_more_labels_than_queries_are_refused(folder, example):
    detector = build(folder("deformable_detr"))
    entry = {**example(64, 64, 13, classes=3), "file_name": "crowd.jpg"}
    with pytest.raises(InputError, match=r"crowd.jpg has 13 labels.*12 queries"):
        detector.targets([entry])


def test_other_architectures_are_refused(tmp_path):
    backbone = hf.ResNetConfig(hidden_sizes=[8, 8, 8, 8], depths=[1] * 4, embedding_size=8)
    hf.ResNetForImageClassification(backbone).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"is a resnet, which is no detector.*d_fine, dab-detr"):
        build(str(tmp_path))


def test_a_folder_without_a_processor_is_refused(tmp_path):
    make_model("detr").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"no image processor.*AutoImageProcessor.from_pretrained"):
        build(str(tmp_path))


@pytest.mark.parametrize("name", ["missing folder", "someone/some-model"])
def test_what_is_not_there_is_refused(name):
    with pytest.raises(InputError, match="give a folder that save_pretrained wrote"):
        build(name)
    with pytest.raises(InputError, match="there is no checkpoint"):
        Predictor.from_checkpoint(name)
    with pytest.raises(InputError, match=r"set MODEL.HUGGINGFACE.NAME"):
        build("")


def test_labels_that_do_not_fit_the_head_are_refused(tmp_path):
    save("rt_detr", tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["id2label"]["3"] = "star"
    content["label2id"]["star"] = 3
    path.write_text(json.dumps(content))
    with pytest.raises(
        InputError, match=r"set its id2label(.|\n)*class_embed.*\(3, 32\).*4 labels"
    ):
        Predictor.from_checkpoint(tmp_path)
    content["id2label"] = {"0": "circle", "1": "circle", "2": "star"}
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="has 'circle' twice"):
        Predictor.from_checkpoint(tmp_path)


def test_labels_of_no_category_are_no_classes(tmp_path, photo):
    save("deformable_detr", tmp_path, labels=("N/A", "circle", "N/A", "square"))
    predictor = Predictor.from_checkpoint(tmp_path)
    assert {found.name for found in predictor(photo, score=0.0)} == {"circle", "square"}


def test_pickles_are_refused_unless_asked_for(tmp_path):
    model = make_model("deformable_detr")
    make_processor("deformable_detr").save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="holds no weights"):
        build(str(tmp_path))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pickle only.*save_pretrained.*ALLOW_PICKLE"):
        build(str(tmp_path))
    detector = build(str(tmp_path), MODEL__HUGGINGFACE__ALLOW_PICKLE=True)
    key = "bbox_embed.0.layers.0.weight"
    assert torch.equal(detector.state_dict()[f"model.{key}"], model.state_dict()[key])


def test_code_in_a_folder_does_not_run(tmp_path):
    save("detr", tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["auto_map"] = {
        "AutoConfig": "evil.Config",
        "AutoModelForObjectDetection": "evil.Model",
        "AutoImageProcessor": "evil.Processor",
    }
    path.write_text(json.dumps(content))
    build(str(tmp_path))
    content["model_type"] = "evil"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError):
        build(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_without_transformers_the_extra_is_named(folder, monkeypatch):
    name = folder("detr")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'cldetr\[hf\]'"):
        build(name)


def test_a_description_stands_for_the_folder(folder, tmp_path):
    whole = build(folder("rt_detr"), pretrained=False)
    text = describe_source(folder("rt_detr"))
    again = build("", pretrained=False, MODEL__HUGGINGFACE__CONFIG=text)
    for key, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    assert again.processor.to_dict() == whole.processor.to_dict()
    with pytest.raises(InputError, match="CONFIG is damaged"):
        build("", MODEL__HUGGINGFACE__CONFIG="{")
