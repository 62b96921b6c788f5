import math

import numpy as np
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyCall as L
from detectron2.config import instantiate
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import DefaultPredictor
from detectron2.evaluation import COCOEvaluator
from detectron2.modeling import build_model
from detectron2.structures import BoxMode

from cldetr.modeling import DeformableDETR, make_small_resnet
from cldetr.modeling.classification import SigmoidFocal
from cldetr.modeling.criterion import SetCriterion
from cldetr.modeling.deformable_transformer import DeformableTransformer
from cldetr.modeling.matcher import Matcher

STRUCTURES = [
    {},
    {"WITH_BOX_REFINE": True},
    {"WITH_BOX_REFINE": True, "TWO_STAGE": True},
    {"IN_FEATURES": ["res5"], "LEVELS": 1},
    {"LEVELS": 5},
]


@pytest.fixture(scope="module")
def full_size(config_file):
    cfg = config_file("detector/deformable_detr_r50.yaml")
    cfg.MODEL.DETR.NUM_CLASSES = 91
    return build_model(cfg)


def test_published_configuration_has_the_published_parameters(full_size):
    assert sum(p.numel() for p in full_size.parameters()) == 40_069_665
    assert len(full_size.state_dict()) == 561 + 1  # visible_classes
    groups = {"backbone": [], "slow": [], "rest": []}
    for name, parameter in full_size.named_parameters():
        slow = "sampling_offsets" in name or "reference_points" in name
        group = "backbone" if name.startswith("backbone") else "slow" if slow else "rest"
        if parameter.requires_grad:
            groups[group].append(parameter.numel())
    assert (sum(groups["rest"]), len(groups["rest"])) == (15_824_735, 230)
    assert (sum(groups["backbone"]), len(groups["backbone"])) == (23_232_512, 42)
    assert (sum(groups["slow"]), len(groups["slow"])) == (790_018, 26)


def test_eighty_classes_have_2827_parameters_fewer(full_size, config_file):
    eighty = build_model(config_file("detector/deformable_detr_r50.yaml"))
    fewer = sum(p.numel() for p in full_size.parameters()) - sum(
        p.numel() for p in eighty.parameters()
    )
    assert fewer == 2_827


def test_initial_values(full_size):
    assert torch.allclose(full_size.class_embed[0].bias, torch.tensor(-math.log(99)))
    last = full_size.bbox_embed[0].layers[-1]
    assert last.bias.tolist() == [0, 0, -2, -2]
    assert not last.weight.any()
    assert not full_size.transformer.reference_points.bias.any()
    assert full_size.transformer.level_embed.std().item() == pytest.approx(1.0, abs=0.1)
    bound = math.sqrt(6 / (256 + 1024))  # Xavier's, for a feed-forward matrix
    weight = full_size.transformer.encoder.layers[0].linear1.weight
    assert bound * 0.99 < weight.abs().max().item() <= bound
    assert full_size.class_embed[0] is full_size.class_embed[5]
    assert full_size.bbox_embed[0] is full_size.bbox_embed[5]


def test_refinement_has_heads_of_its_own_per_layer_and_sizes_from_the_first(build):
    model = build(randomised=False, WITH_BOX_REFINE=True)
    assert model.class_embed[0] is not model.class_embed[1]
    assert model.bbox_embed[0].layers[-1].bias.tolist() == [0, 0, -2, -2]
    assert not model.bbox_embed[1].layers[-1].bias.any()
    two_stage = build(randomised=False, WITH_BOX_REFINE=True, TWO_STAGE=True)
    assert len(two_stage.class_embed) == len(model.class_embed) + 1
    assert not any(head.layers[-1].bias.any() for head in two_stage.bbox_embed)


def test_two_stages_without_refinement_are_refused(tiny_config):
    with pytest.raises(ValueError, match="refine"):
        build_model(tiny_config(TWO_STAGE=True))


def test_fewer_levels_than_features_are_refused(tiny_config):
    with pytest.raises(ValueError, match="res3, res4, res5"):
        build_model(tiny_config(LEVELS=2))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_image_alone_and_in_a_padded_batch_are_predicted_alike(structure, build, batch):
    model = build(**structure).eval()
    with torch.no_grad():
        together = model.predict(model.preprocess(batch))
        for index, entry in enumerate(batch):
            alone = model.predict(model.preprocess([entry]))
            part = slice(index, index + 1)
            for found, wanted, atol in (
                (together.logits[:, part], alone.logits, 2e-5),
                (together.boxes[:, part], alone.boxes, 2e-6),
                (together.features[part], alone.features, 2e-5),
            ):
                torch.testing.assert_close(found, wanted, atol=atol, rtol=1e-5)


def test_padding_as_in_the_official_code_leaks_over_borders(build, batch):
    """What EXACT_PADDING is for: without it the same image is predicted otherwise in a batch."""
    model = build(EXACT_PADDING=False).eval()
    with torch.no_grad():
        together = model.predict(model.preprocess(batch))
        alone = model.predict(model.preprocess(batch[2:]))
    assert (together.logits[:, 2:] - alone.logits).abs().max() > 1e-2


def test_padding_rule_does_not_matter_where_nothing_is_padded(build, example):
    batch = [example(64, 96, 2, seed=1), example(64, 96, 2, seed=2)]
    model = build().eval()
    with torch.no_grad():
        exact = model.predict(model.preprocess(batch))
        model.exact_padding = False
        official = model.predict(model.preprocess(batch))
    assert torch.equal(exact.logits, official.logits)
    assert torch.equal(exact.boxes, official.boxes)


def test_order_of_images_is_kept_when_sizes_repeat(build, example):
    batch = [example(64, 96, 2, seed=1), example(80, 64, 2), example(64, 96, 2, seed=2)]
    model = build().eval()
    with torch.no_grad():
        together = model.predict(model.preprocess(batch))
        last = model.predict(model.preprocess(batch[2:]))
    torch.testing.assert_close(together.logits[:, 2:], last.logits, atol=2e-5, rtol=1e-5)


def test_preprocess_normalises_then_pads_with_zeros(build, example):
    model = build()
    images = model.preprocess([example(40, 60, 0), example(50, 30, 0)])
    assert images.tensor.shape == (2, 3, 50, 60)
    assert images.sizes == [(40, 60), (50, 30)]
    assert not images.tensor[0, :, 40:].any()
    assert not images.tensor[1, :, :, 30:].any()
    assert images.mask[0].sum() == 10 * 60
    assert images.mask[1].sum() == 50 * 30
    pixel = example(40, 60, 0)["image"][:, 3, 4]
    wanted = (pixel / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    torch.testing.assert_close(images.tensor[0, :, 3, 4], wanted, atol=1e-5, rtol=1e-5)


def test_targets_are_relative_to_the_unpadded_image(build, example):
    entry = example(40, 80, 1)
    entry["instances"].gt_boxes.tensor = torch.tensor([[8.0, 10.0, 24.0, 30.0]])
    target = build().targets([entry])[0]
    torch.testing.assert_close(target.boxes, torch.tensor([[0.2, 0.5, 0.2, 0.5]]))


def test_labels_beyond_the_head_are_refused(build, example):
    entry = example(40, 80, 1)
    entry["instances"].gt_classes[:] = 7
    with pytest.raises(ValueError, match="7 classes"):
        build().targets([entry])


def test_batch_without_images(build):
    model = build()
    assert model.eval()([]) == []
    with pytest.raises(ValueError, match="without images"):
        model.train()([])


@pytest.mark.parametrize("structure", STRUCTURES[:3])
def test_training_reaches_every_trainable_parameter_even_without_labels(structure, build, example):
    model = build(**structure).train()
    losses = model([example(70, 90, 0), example(64, 64, 0)])
    assert all(torch.isfinite(value) for value in losses.values())
    sum(losses.values()).backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without


def test_checkpointing_gives_the_same_gradients(build, batch):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        model = build(CHECKPOINTING=checkpointing, DROPOUT=0.1).train()
        sum(model(batch).values()).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize("structure", STRUCTURES[:3])
def test_autocast_keeps_boxes_and_losses_in_float32(structure, build, batch):
    model = build(DROPOUT=0.1, **structure).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model.predict(model.preprocess(batch))
        losses = model.criterion(output, model.targets(batch))
    assert output.logits.dtype == torch.bfloat16
    assert output.boxes.dtype == torch.float32
    assert all(v.dtype == torch.float32 and torch.isfinite(v) for v in losses.values())
    sum(losses.values()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_dropout_acts_in_training_only(build, batch):
    model = build(DROPOUT=0.5)
    images = model.preprocess(batch)
    with torch.no_grad():
        model.train()
        assert not torch.equal(model.predict(images).logits, model.predict(images).logits)
        model.eval()
        assert torch.equal(model.predict(images).logits, model.predict(images).logits)


def test_results_are_the_best_pairs_scaled_to_the_size_asked_for(build, example):
    model = build().eval()
    entry = example(60, 80, 0) | {"height": 120, "width": 240}
    result = model([entry])[0]["instances"]
    assert result.image_size == (120, 240)
    with torch.no_grad():
        output = model.predict(model.preprocess([entry]))
    scores, pairs = output.logits[-1, 0].sigmoid().flatten().sort(descending=True)
    torch.testing.assert_close(result.scores, scores[:100])
    assert torch.equal(result.pred_classes, pairs[:100] % 7)
    cx, cy, w, h = output.boxes[-1, 0, pairs[0] // 7].tolist()
    corners = [(cx - w / 2) * 240, (cy - h / 2) * 120, (cx + w / 2) * 240, (cy + h / 2) * 120]
    corners = [min(max(x, 0), size) for x, size in zip(corners, (240, 120, 240, 120), strict=True)]
    torch.testing.assert_close(result.pred_boxes.tensor[0], torch.tensor(corners))


def test_one_class_per_query_returns_each_query_once(build, example):
    model = build(ONE_CLASS_PER_QUERY=True).eval()
    result = model([example(60, 80, 0)])[0]["instances"]
    with torch.no_grad():
        output = model.predict(model.preprocess([example(60, 80, 0)]))
    best = output.logits[-1, 0].sigmoid().amax(1).sort(descending=True).values
    torch.testing.assert_close(result.scores, best)


def test_classes_that_are_not_visible_are_never_returned(build, example):
    model = build().eval()
    model.visible_classes = torch.tensor([False, True, False, False, True, False, False])
    result = model([example(60, 80, 0)])[0]["instances"]
    assert set(result.pred_classes.tolist()) == {1, 4}
    assert len(result) == 40  # 20 queries × 2 classes are fewer than 100
    other = build().eval()
    other.load_state_dict(model.state_dict())  # whoever loads the weights gets them as well
    assert torch.equal(other.visible_classes, model.visible_classes)
    scores = model.scores(torch.zeros(2, 7))
    assert scores[0].tolist() == [0, 0.5, 0, 0, 0.5, 0, 0]
    assert model.background(torch.zeros(2, 7)) is None


def test_single_class_detector(build, example):
    model = build(NUM_CLASSES=1)
    losses = model.train()([example(60, 80, 3, classes=1)])
    assert all(torch.isfinite(value) for value in losses.values())
    assert set(model.eval()([example(60, 80, 0)])[0]["instances"].pred_classes.tolist()) == {0}


def test_default_predictor_runs_from_a_checkpoint(tmp_path, build, tiny_config):
    model = build()
    DetectionCheckpointer(model, str(tmp_path)).save("model")
    cfg = tiny_config()
    cfg.MODEL.WEIGHTS = str(tmp_path / "model.pth")
    cfg.INPUT.MIN_SIZE_TEST = 64
    predictor = DefaultPredictor(cfg)
    image = np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    result = predictor(image)["instances"]
    assert result.image_size == (50, 70)
    assert len(result) == 100
    for name, tensor in model.state_dict().items():
        assert torch.equal(predictor.model.state_dict()[name], tensor), name


def test_output_suits_the_coco_evaluator(tmp_path, build, example):
    entry = example(60, 80, 2) | {"image_id": 5, "file_name": "5.jpg"}
    boxes = entry["instances"].gt_boxes.tensor.tolist()
    records = [
        {
            "file_name": "5.jpg",
            "image_id": 5,
            "height": 60,
            "width": 80,
            "annotations": [
                {"bbox": box, "bbox_mode": BoxMode.XYXY_ABS, "category_id": 1, "iscrowd": 0}
                for box in boxes
            ],
        }
    ]
    name = "detector_test"
    DatasetCatalog.register(name, lambda: records)
    MetadataCatalog.get(name).set(thing_classes=[f"class {i}" for i in range(7)])
    try:
        evaluator = COCOEvaluator(name, output_dir=str(tmp_path))
        evaluator.reset()
        evaluator.process([entry], build().eval()([entry]))
        result = evaluator.evaluate()
    finally:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
    assert 0 <= result["bbox"]["AP"] <= 100


def test_whole_detector_stands_in_one_lazy_config(batch):
    config = L(DeformableDETR)(
        backbone=L(make_small_resnet)(channels=[32, 40, 48, 56]),
        in_features=["res3", "res4", "res5"],
        transformer=L(DeformableTransformer)(
            dim=32, heads=4, encoder_layers=1, decoder_layers=2, ffn_dim=32, levels=3
        ),
        criterion=L(SetCriterion)(matcher=L(Matcher)(classification=L(SigmoidFocal)())),
        num_classes=7,
        num_queries=10,
        pixel_mean=[127.5] * 3,
        pixel_std=[64.0] * 3,
    )
    model = instantiate(config).train()
    losses = model(batch)
    assert len(losses) == 6
    assert all(torch.isfinite(value) for value in losses.values())


def test_small_configuration_trains_on_an_example(example, config_file):
    torch.manual_seed(0)
    model = build_model(config_file("detector/deformable_detr_small.yaml")).train()
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    batch = [example(80, 80, 3, seed=i) for i in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for _ in range(15):
        loss = sum(model(batch).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.8 * history[0]
