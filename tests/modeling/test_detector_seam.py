"""The detector's seam: Detectron2's own trainer, losses of one's own, heads of one's own names."""

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import DefaultPredictor, DefaultTrainer
from detectron2.structures import BoxMode
from PIL import Image
from torch import nn

from cldetr.config import default_config
from cldetr.engine.initial_weights import initialise
from cldetr.methods.learner import Learner, freeze
from cldetr.methods.pseudo import PseudoRule
from cldetr.modeling import make_small_resnet
from cldetr.modeling.classification import SigmoidFocal
from cldetr.modeling.criterion import SetCriterion
from cldetr.modeling.detector import Detector
from cldetr.modeling.matcher import Matcher
from cldetr.modeling.structures import DetrOutput, Target

NAME = "detector_seam_squares"


@pytest.fixture
def squares(tmp_path):
    """A plain registered data set: four pictures of one bright square each, of two categories."""

    def dicts():
        found = []
        for index in range(4):
            image = np.full((64, 64, 3), 30, np.uint8)
            x, y = 8 + 8 * index, 12 + 6 * index
            image[y : y + 20, x : x + 20, index % 2] = 240
            path = str(tmp_path / f"{index}.png")
            Image.fromarray(image).save(path)
            box = {"bbox": [x, y, 20, 20], "bbox_mode": BoxMode.XYWH_ABS, "category_id": index % 2}
            found.append(
                {
                    "file_name": path,
                    "image_id": index,
                    "height": 64,
                    "width": 64,
                    "annotations": [box],
                }
            )
        return found

    DatasetCatalog.register(NAME, dicts)
    MetadataCatalog.get(NAME).thing_classes = ["red", "green"]
    yield NAME
    DatasetCatalog.remove(NAME)
    MetadataCatalog.remove(NAME)


def small(cfg, classes=2):
    """Sets a detector of little width that learns from scratch on a CPU."""
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.META_ARCHITECTURE = "DeformableDETR"
    cfg.MODEL.BACKBONE.NAME = "build_small_resnet_backbone"
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res3", "res4", "res5"]
    cfg.MODEL.SMALL_RESNET.CHANNELS = [16, 32, 48, 64]
    detr = cfg.MODEL.DETR
    detr.NUM_CLASSES, detr.NUM_QUERIES, detr.HIDDEN_DIM, detr.HEADS = classes, 10, 32, 4
    detr.ENC_LAYERS, detr.DEC_LAYERS, detr.FFN_DIM, detr.DROPOUT = 1, 2, 32, 0.0
    return cfg


@pytest.fixture
def cfg(squares, tmp_path):
    cfg = small(default_config())
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (squares,), ()
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = [64], 64
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 64, 64
    cfg.INPUT.CROP.ENABLED = False
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.BASE_LR = 0.1  # of SGD, which is Detectron2's optimizer
    cfg.SOLVER.MAX_ITER = 40
    cfg.SOLVER.CHECKPOINT_PERIOD = 15
    cfg.SOLVER.STEPS = ()
    cfg.OUTPUT_DIR = str(tmp_path / "out")
    return cfg


def test_detectron2s_default_trainer_trains_on_a_registered_data_set(cfg, tmp_path, monkeypatch):
    # It would print on the standard output for all tests that follow.
    monkeypatch.setattr("detectron2.engine.defaults.setup_logger", lambda: None)
    (tmp_path / "out").mkdir()
    torch.manual_seed(0)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=False)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    moved = [key for key, x in trainer.model.named_parameters() if not torch.equal(x, before[key])]
    assert "class_embed.0.weight" in moved
    assert any(key.startswith("backbone.") for key in moved)
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    assert len(losses) == 40
    assert np.isfinite(losses).all()
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])
    # CHECKPOINT_PERIOD counts iterations, as Detectron2 says.
    names = {path.name for path in (tmp_path / "out").glob("*.pth")}
    assert names == {"model_0000014.pth", "model_0000029.pth", "model_final.pth"}

    cfg.MODEL.WEIGHTS = str(tmp_path / "out" / "model_final.pth")
    predictor = DefaultPredictor(cfg)
    for key, value in predictor.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[key]), key


class Denoising(Detector):
    """A detector of a user's own: modules of other names, and a denoising loss beside L_DETR."""

    num_queries = 5

    def __init__(self, classes=3):
        super().__init__(
            backbone=make_small_resnet((16, 32, 48, 64), ("res5",)),
            in_features=["res5"],
            criterion=SetCriterion(matcher=Matcher(SigmoidFocal())),
            num_classes=classes,
            pixel_mean=[120.0] * 3,
            pixel_std=[60.0] * 3,
        )
        self.states = nn.Linear(64, 5 * 16)
        self.labeller = nn.Linear(16, classes)
        self.boxer = nn.Linear(16, 4)
        self.denoiser = nn.Linear(4, 4)
        self.calls = []

    def predict(self, images):
        pooled = self._features(images.tensor)[0].mean((2, 3))
        states = self.states(pooled).view(1, len(images), 5, 16)
        return DetrOutput(self.labeller(states), self.boxer(states).sigmoid())

    def scores(self, logits):
        return logits.sigmoid() * self.visible_classes

    def background(self, logits):
        return None

    def class_parameters(self):
        return ["labeller.weight", "labeller.bias"]

    def losses(self, images, targets, class_mask=None):
        self.calls.append((targets, class_mask))
        losses, output = super().losses(images, targets, class_mask)
        boxes = torch.cat([target.boxes for target in targets])
        losses["loss_denoise"] = (self.denoiser(boxes + 0.1) - boxes).abs().sum()
        return losses, output


def test_a_detectors_own_loss_reaches_the_trainer(example):
    detector = Denoising().train()
    losses = detector([example(64, 64, 3, classes=3), example(48, 64, 0)])
    assert set(losses) == {"loss_cls", "loss_bbox", "loss_giou", "loss_denoise"}
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in detector.parameters())
    assert len(detector.eval()([example(64, 64, 0)])[0]["instances"]) == 5 * 3


def test_a_detectors_own_loss_sees_pseudo_labels_and_the_classes_that_take_part(example):
    torch.manual_seed(0)
    detector = Denoising()
    # Every prediction is foreground, of class 0 or 1: the teacher does not know class 2.
    rule = PseudoRule(k=2, foreground=0.0, iou=1.0)
    learner = Learner(
        detector,
        seen=[0, 1, 2],
        teacher=freeze(detector, [0, 1]),
        teacher_classes=[0, 1],
        rule=rule,
    ).train()
    inputs = [example(64, 64, 1, classes=1), example(64, 64, 0)]
    losses = learner(inputs)
    ((targets, class_mask),) = detector.calls
    assert [len(target) for target in targets] == [1 + 2, 2]
    assert set(targets[1].labels.tolist()) <= {0, 1}
    assert class_mask.tolist() == [True, True, True]
    assert losses["loss_denoise"].item() > 0
    Learner(detector, seen=[1]).train()(inputs)
    assert detector.calls[-1][1].tolist() == [False, True, False]


def test_predictions_that_are_not_finite_make_losses_that_are_not(example):
    detector = Denoising().train()
    with torch.no_grad():
        detector.labeller.weight[0, 0] = torch.nan
    images = detector.preprocess([example(64, 64, 0)])
    target = Target(torch.tensor([0]), torch.rand(1, 4))
    losses, output = detector.losses(images, [target])
    assert output is None
    assert losses["loss_cls"].isnan()
    losses["loss_cls"].backward()  # reaches the weights, so that every process sees it
    assert detector.boxer.weight.grad.isnan().all()


@pytest.mark.parametrize("head", [True, False], ids=["whole", "without a class head"])
def test_initial_weights_find_the_class_head_by_the_detectors_word(tmp_path, head):
    source, target = Denoising(), Denoising()
    state = source.state_dict()
    if not head:
        for name in source.class_parameters():
            del state[name]
    torch.save({"model": state}, tmp_path / "weights.pth")
    own = target.labeller.weight.clone()
    initialise(target, str(tmp_path / "weights.pth"))
    assert torch.equal(target.boxer.weight, source.boxer.weight)
    assert torch.equal(target.labeller.weight, source.labeller.weight if head else own)
    assert torch.equal(target.backbone.stem.conv1.weight, source.backbone.stem.conv1.weight)


def test_initial_weights_may_be_a_backbones_alone(tmp_path):
    source, target = Denoising(), Denoising()
    torch.save({"model": source.backbone.state_dict()}, tmp_path / "backbone.pth")
    own = target.boxer.weight.clone()
    initialise(target, str(tmp_path / "backbone.pth"))
    assert torch.equal(target.backbone.stem.conv1.weight, source.backbone.stem.conv1.weight)
    assert torch.equal(target.boxer.weight, own)
