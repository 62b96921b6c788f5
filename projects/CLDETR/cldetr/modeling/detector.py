"""What Deformable DETR and DETR share: images in, labels in, detections out.

These are the seams that incremental learning uses. A detector of your own subclasses `Detector` and
defines `predict`, `scores` and `background`; one with losses of its own overrides `losses`.

Shape shorthand: B images, Q queries, K classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import NaiveSyncBatchNorm
from detectron2.modeling import Backbone, build_backbone, detector_postprocess
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn

from cldetr.errors import InputError
from cldetr.layers.boxes import box_cxcywh_to_xyxy, box_xyxy_to_cxcywh
from cldetr.layers.cpu import can_fold, fold_norms, fold_norms_, folded_features
from cldetr.modeling.classification import Classification
from cldetr.modeling.criterion import SetCriterion
from cldetr.modeling.levels import (
    Extractor,
    Levels,
    extract_levels,
    extract_levels_with_padding,
)
from cldetr.modeling.matcher import Matcher, Matches
from cldetr.modeling.structures import DetrOutput, ImageBatch, Target

_SYNC_NORMS = (nn.SyncBatchNorm, NaiveSyncBatchNorm)
# From the backbone's features to one map per level.
Projector = Callable[[list[Tensor]], list[Tensor]]


class Detector(nn.Module):
    """A detector that predicts a fixed set of Q boxes per image, each with class scores."""

    pixel_mean: Tensor
    pixel_std: Tensor
    visible_classes: Tensor  # (K,) bool, the classes learnt so far; others are never predicted
    num_queries: int  # Q
    # What a weights file may lack: files of detectors that were not trained in phases do.
    optional_keys = ("visible_classes",)
    _folds = False  # whether the backbone's frozen norms are computed with its convolutions
    resizes = False  # `preprocess` gives images the size that the model sees
    backbone_prefix = "backbone."  # how the names of the backbone's parameters begin
    # What a method may need; `Method.check` refuses one that needs what a detector does not have.
    fixed_queries = True  # query j means the same on every image
    query_groups = 1  # groups of queries, each of which predicts classes of its own
    takes_class_mask = True  # `losses` can exclude classes
    plain_labels_only = False  # `losses` takes one class per box, no weights, no least IoUs

    def __init__(
        self,
        *,
        backbone: Backbone,
        in_features: Sequence[str],
        criterion: SetCriterion,
        num_classes: int,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
        input_format: str = "RGB",
        detections_per_image: int = 100,
        one_class_per_query: bool = False,
        exact_padding: bool = True,
    ) -> None:
        """Sets up what all detectors share.

        Args:
            backbone: any of Detectron2's.
            in_features: names of its outputs that are used, finest first.
            criterion: computes the losses.
            num_classes: K, all classes of all phases.
            pixel_mean: per channel, in the order of `input_format`, for pixels in 0-255.
            pixel_std: likewise.
            input_format: the order of channels; `DefaultPredictor` and mappers read it from the
                config, here it is information.
            detections_per_image: at most this many results per image.
            one_class_per_query: results are each query's best class, not the best (query, class)
                pairs.
            exact_padding: see `levels.extract_levels`; False does as the official implementations.
        """
        super().__init__()
        if num_classes < 1:
            raise ValueError("the detector has no classes: set MODEL.DETR.NUM_CLASSES")
        self.backbone = backbone
        self.in_features = tuple(in_features)
        self.criterion = criterion
        self.num_classes = num_classes
        self.input_format = input_format
        self.detections_per_image = detections_per_image
        self.one_class_per_query = one_class_per_query
        self.exact_padding = exact_padding
        self._folds = can_fold(backbone)
        if exact_padding and any(isinstance(module, _SYNC_NORMS) for module in backbone.modules()):
            raise InputError(
                "synchronised batch normalisation (SyncBN) needs as many passes through the "
                "backbone on every process, and images of different sizes pass one by one: set "
                "MODEL.DETR.EXACT_PADDING False, or MODEL.RESNETS.NORM FrozenBN or GN"
            )
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(-1, 1, 1), False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(-1, 1, 1), False)
        # Saved with the weights: whoever loads them predicts the classes that they know.
        self.register_buffer("visible_classes", torch.ones(num_classes, dtype=torch.bool))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.pixel_mean.device

    def forward(
        self, batched_inputs: list[dict[str, Any]]
    ) -> dict[str, Tensor] | list[dict[str, Instances]]:
        """Computes losses in training mode, detections in evaluation mode.

        Args:
            batched_inputs: one dictionary per image in Detectron2's standard form: `image` (3, H,
                W), for training `instances`, for evaluation `height` and `width` of the output.
        """
        if not batched_inputs:
            if self.training:
                raise ValueError("a training batch without images")
            return []
        images = self.preprocess(batched_inputs)
        if self.training:
            return self.losses(images, self.targets(batched_inputs))[0]
        return self.inference(self.predict(images), images, batched_inputs)

    def preprocess(self, batched_inputs: Sequence[dict[str, Any]]) -> ImageBatch:
        """Normalises images, then pads them with zeros to one size."""
        images = [x["image"].to(self.device, non_blocking=True) for x in batched_inputs]
        sizes = [(int(x.shape[-2]), int(x.shape[-1])) for x in images]
        multiple = max(self.backbone.size_divisibility, 1)
        height, width = (-(-max(side) // multiple) * multiple for side in zip(*sizes, strict=True))
        tensor = self.pixel_mean.new_zeros(len(images), len(self.pixel_mean), height, width)
        for image, (h, w), padded in zip(images, sizes, tensor, strict=True):
            padded[:, :h, :w] = (image - self.pixel_mean) / self.pixel_std
        return ImageBatch(tensor, sizes)

    def targets(self, batched_inputs: Sequence[dict[str, Any]]) -> list[Target]:
        """Makes labels of `instances`: boxes become cxcywh relative to the image's own size."""
        targets = []
        for index, entry in enumerate(batched_inputs):
            if "instances" not in entry:
                raise ValueError(f"image {index} of a training batch has no instances")
            instances = entry["instances"]
            height, width = instances.image_size
            if (height, width) != tuple(entry["image"].shape[-2:]):
                raise ValueError(
                    f"image {index} of the batch is {tuple(entry['image'].shape[-2:])}, its "
                    f"instances say {(height, width)}"
                )
            labels = instances.gt_classes
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
                raise ValueError(
                    f"labels of image {index} reach from {int(labels.min())} to "
                    f"{int(labels.max())}, the detector has {self.num_classes} classes"
                )
            boxes = instances.gt_boxes.tensor.float()
            boxes = box_xyxy_to_cxcywh(boxes / boxes.new_tensor([width, height, width, height]))
            targets.append(Target(labels, boxes).to(self.device))
        return targets

    def losses(
        self, images: ImageBatch, targets: Sequence[Target], class_mask: Tensor | None = None
    ) -> tuple[dict[str, Tensor], DetrOutput | None]:
        """Computes the losses of a batch, weighted and by name, and the predictions they are of.

        A detector with losses of its own (denoising, an extra head) overrides this:

            def losses(self, images, targets, class_mask=None):
                losses, output = super().losses(images, targets, class_mask)
                losses["loss_mine"] = ...
                return losses, output

        Every process must reach the collective calls in here in every step.

        Args:
            images: the batch.
            targets: labels of each image, pseudo-labels among them.
            class_mask: (K,) bool, the classes that take part in the classification loss, or
                (B, 1, K), those of each image; None for all.

        Returns:
            the losses, and the predictions, None where they are not finite.
        """
        output = self.predict(images)
        if not is_finite(output):
            self.criterion.normaliser(targets, output.logits.device)  # other processes wait in it
            return nan_losses(output), None
        return self.criterion(output, targets, class_mask=class_mask), output

    def match(
        self, output: DetrOutput, targets: Sequence[Target], class_mask: Tensor | None = None
    ) -> Matches:
        """Matches predictions and labels one to one, as in training."""
        return self.criterion.matcher(output, targets, class_mask)

    def class_parameters(self) -> list[str]:
        """Names, in `state_dict`, of the parameters with a row for each class.

        Rows beyond the K classes (a background row) come last. These rows are what moves when the
        head of a trained detector is fitted to the classes of a scenario.
        """
        return [name for name in self.state_dict() if name.startswith("class_embed.")]

    def proposal_parameters(self) -> list[str]:
        """Those of a two-stage detector's proposals, whose row 0 means any object."""
        return []

    def query_group(self, label: int) -> int:
        """The group of queries that predicts a class."""
        return 0

    def start_classes(self, classes: Sequence[int]) -> None:
        """Prepares for the phase in which these classes are learnt for the first time."""

    def load_pretrained(self) -> None:
        """Loads the weights that a detector brings with it, where MODEL.WEIGHTS names none."""

    def predict(self, images: ImageBatch) -> DetrOutput:
        """Predicts logits and boxes with all decoder layers."""
        raise NotImplementedError

    def classify(self, states: Tensor) -> Tensor:
        """Class logits of states (…, D) of the last decoder layer, (…, C).

        Optional: a distillation loss that asks the head about prototypes of classes needs it.
        """
        raise NotImplementedError

    @property
    def has_classify(self) -> bool:
        """Whether the detector defines `classify`."""
        return type(self).classify is not Detector.classify

    def scores(self, logits: Tensor) -> Tensor:
        """Class probabilities of logits, (…, K); zero for classes that are not visible."""
        raise NotImplementedError

    def background(self, logits: Tensor) -> Tensor | None:
        """p(φ) of logits, (…), or None for a head without a background class."""
        raise NotImplementedError

    @torch.no_grad()
    def inference(
        self,
        output: DetrOutput,
        images: ImageBatch,
        batched_inputs: Sequence[dict[str, Any]],
    ) -> list[dict[str, Instances]]:
        """Turns the last layer's predictions into detections in the size that is asked for."""
        scores = self.scores(output.logits[-1].float())  # (B, Q, K)
        boxes = box_cxcywh_to_xyxy(output.boxes[-1].float())
        classes = self.visible_classes.nonzero().flatten()
        scores = scores[..., classes]
        results = []
        for image, (height, width) in enumerate(images.sizes):
            score, query, index = self._best(scores[image])
            corners = boxes[image, query] * boxes.new_tensor([width, height, width, height])
            result = Instances(
                (height, width),
                pred_boxes=Boxes(corners),
                scores=score,
                pred_classes=classes[index],
            )
            entry = batched_inputs[image]
            size = entry.get("height", height), entry.get("width", width)
            results.append({"instances": detector_postprocess(result, *size)})
        return results

    def freeze(self) -> None:
        """Prepares a detector that is only asked from now on: evaluation mode, no gradients."""
        self.eval().requires_grad_(False)
        if self._folds:
            fold_norms_(self.backbone)

    def _best(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best scores of one image (Q, k), with the indices of their queries and classes."""
        if self.one_class_per_query and scores.shape[1]:
            scores, best = scores.max(dim=1)
            score, query = scores.topk(min(self.detections_per_image, len(scores)))
            return score, query, best[query]
        width = max(scores.shape[1], 1)
        score, pair = scores.flatten().topk(min(self.detections_per_image, scores.numel()))
        return score, pair // width, pair % width

    def _features(self, tensor: Tensor) -> list[Tensor]:
        """The backbone's features of images (B, 3, H, W)."""
        return self._extractor()(tensor)

    def _extractor(self) -> Extractor:
        """What computes the backbone's features; it folds frozen norms once for all its calls."""
        run = self.backbone
        if self._folds:
            run = functools.partial(folded_features, run, fold_norms(run))

        def extract(tensor: Tensor) -> list[Tensor]:
            features = run(tensor)
            return [features[name] for name in self.in_features]

        return extract

    def _levels(self, images: ImageBatch, project: Projector, strides: Sequence[int]) -> Levels:
        """The feature maps of a batch, each image's the same whatever the others are."""
        features = self._extractor()

        def extract(tensor: Tensor) -> list[Tensor]:
            return project(features(tensor))

        if self.exact_padding:
            return extract_levels(images, extract, strides, self.backbone.size_divisibility)
        return extract_levels_with_padding(images, extract)


def is_finite(output: DetrOutput) -> bool:
    """Whether all predictions are finite numbers."""
    return bool(torch.isfinite(output.logits).all() & torch.isfinite(output.boxes).all())


def nan_losses(output: DetrOutput) -> dict[str, Tensor]:
    """A loss that is not a number and depends on every weight.

    The trainer skips a step whose gradients are not finite. Going through the backward pass lets
    every process see that at the same step, where raising here would leave the others waiting.
    """
    total = output.logits.sum() + output.boxes.sum()
    if output.proposals is not None:
        total = total + output.proposals.logits.sum() + output.proposals.boxes.sum()
    return {"loss_cls": total * float("nan")}


def transformer_arguments(cfg: CfgNode) -> dict[str, Any]:
    """Reads from the config what both kinds of transformer take."""
    detr = cfg.MODEL.DETR
    return {
        "dim": detr.HIDDEN_DIM,
        "heads": detr.HEADS,
        "encoder_layers": detr.ENC_LAYERS,
        "decoder_layers": detr.DEC_LAYERS,
        "ffn_dim": detr.FFN_DIM,
        "dropout": detr.DROPOUT,
        "checkpointing": detr.CHECKPOINTING,
    }


def make_criterion(cfg: CfgNode, classification: Classification) -> SetCriterion:
    """Builds the losses and the matching that MODEL.DETR describes."""
    detr = cfg.MODEL.DETR
    return SetCriterion(
        matcher=Matcher(classification, detr.COST.CLASS, detr.COST.BOX, detr.COST.GIOU),
        class_weight=detr.LOSS.CLASS_WEIGHT,
        box_weight=detr.LOSS.BOX_WEIGHT,
        giou_weight=detr.LOSS.GIOU_WEIGHT,
        aux_loss=detr.LOSS.AUX,
    )


def shared_arguments(cfg: CfgNode, classification: Classification) -> dict[str, Any]:
    """Reads from the config what `Detector` takes, for the `from_config` of its subclasses."""
    detr = cfg.MODEL.DETR
    return {
        "backbone": build_backbone(cfg),
        "in_features": detr.IN_FEATURES,
        "criterion": make_criterion(cfg, classification),
        "num_classes": detr.NUM_CLASSES,
        "pixel_mean": cfg.MODEL.PIXEL_MEAN,
        "pixel_std": cfg.MODEL.PIXEL_STD,
        "input_format": cfg.INPUT.FORMAT,
        "detections_per_image": cfg.TEST.DETECTIONS_PER_IMAGE,
        "one_class_per_query": detr.ONE_CLASS_PER_QUERY,
        "exact_padding": detr.EXACT_PADDING,
    }
