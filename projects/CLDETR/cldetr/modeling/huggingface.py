"""Detectors of Hugging Face transformers behind the seam of `Detector`.

One adapter serves all set predictors of `AutoModelForObjectDetection`: whatever the architecture,
its forward pass ends in a call of the model's loss function, which gets the predictions of all
layers. The adapter takes them there.

Shape shorthand: L layers, B images, Q queries, G groups of queries, K classes, C head outputs.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils.events import get_event_storage, has_event_storage
from torch import Tensor, nn

from cldetr.errors import InputError
from cldetr.modeling.classification import Classification, SigmoidFocal, SoftmaxCE, mask_logits
from cldetr.modeling.criterion import SetCriterion
from cldetr.modeling.detector import Detector, is_finite, make_criterion, nan_losses
from cldetr.modeling.huggingface_files import (
    SET_PREDICTORS,
    build_from_config,
    describe_source,
    read_description,
    read_weights,
    with_labels,
)
from cldetr.modeling.huggingface_operator import use_our_operator
from cldetr.modeling.structures import DetrOutput, ImageBatch, Target

_CLASS_ROWS = re.compile(
    r"\b(class_embed|enc_score_head|enc_out_class_embed|denoising_class_embed|"
    r"class_labels_classifier(\.layers\.2)?)(\.\d+)?\.(weight|bias)$"
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
_LOSSES = ("ours", "native")


@META_ARCH_REGISTRY.register()
class HuggingFaceDetector(Detector):
    """A detector of `AutoModelForObjectDetection` with its image processor."""

    model: Any
    backbone_prefix = "model.model.backbone."

    @configurable
    def __init__(
        self,
        *,
        model: Any,
        processor: Any,
        criterion: SetCriterion,
        native_loss: bool = False,
        resize: bool = True,
        freeze_batch_norm: bool = False,
        source: str = "",
        allow_pickle: bool = False,
        detections_per_image: int = 100,
    ) -> None:
        """Sets up the detector.

        Args:
            model: of transformers, with K labels.
            processor: its image processor.
            criterion: our losses.
            native_loss: train with the model's own loss and not with `criterion`.
            resize: images come as they are, and the processor resizes them. Else they come in the
                size that the model shall see.
            freeze_batch_norm: keep statistics, weights and biases of batch normalisation.
            source: folder or name of the pretrained weights; empty for none.
            allow_pickle: load them from a pickle where there are no safetensors.
            detections_per_image: at most this many results per image.
        """
        config = model.config
        softmax, self.fixed_queries = SET_PREDICTORS[config.model_type]
        mean, std = _normalisation(processor)
        super().__init__(
            backbone=nn.Identity(),  # the model has its own
            in_features=(),
            criterion=criterion,
            num_classes=config.num_labels,
            pixel_mean=mean,
            pixel_std=std,
            detections_per_image=detections_per_image,
            one_class_per_query=softmax,
        )
        self.model, self.processor = model, processor
        self.softmax = softmax
        self.two_stage = bool(getattr(config, "two_stage", False))  # Deformable DETR's
        self.fixed_queries = self.fixed_queries and not self.two_stage
        self.native_loss = native_loss
        self.takes_class_mask, self.plain_labels_only = not native_loss, native_loss
        self.resizes = resize
        self.freeze_batch_norm = freeze_batch_norm
        self.source, self.allow_pickle = source, allow_pickle
        self.num_queries = _num_queries(config)
        self._takes_mask = "pixel_mask" in inspect.signature(model.forward).parameters
        # What no loss reaches. Without the model's own, no label reaches their embedding either.
        idle = ("mask_token",) if native_loss else ("mask_token", "denoising_class_embed")
        for name, parameter in model.named_parameters():
            if any(word in name for word in idle):
                parameter.requires_grad_(False)
        if freeze_batch_norm:
            for layer in self._batch_norms():
                layer.requires_grad_(False)
        for name, module in model.named_modules():
            if re.search(r"\b(enc_score_head|enc_out_class_embed\.\d+)$", name):
                module.register_forward_hook(self._hide_unseen)
        use_our_operator(model)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Reads MODEL.HUGGINGFACE, and of MODEL.DETR the classes, losses and costs."""
        keys = cfg.MODEL.HUGGINGFACE
        if keys.LOSS not in _LOSSES:
            raise InputError(f"MODEL.HUGGINGFACE.LOSS is {' or '.join(_LOSSES)}, not {keys.LOSS!r}")
        if cfg.INPUT.FORMAT != "RGB":
            raise InputError(
                f"INPUT.FORMAT is {cfg.INPUT.FORMAT}, image processors take RGB: set it to RGB"
            )
        resize = not cfg.INPUT.MIN_SIZE_TEST
        if any(cfg.INPUT.MIN_SIZE_TRAIN) is resize:
            raise InputError(
                "INPUT.MIN_SIZE_TRAIN and MIN_SIZE_TEST must both be 0, for the sizes of the image "
                "processor, or both give sizes"
            )
        text = keys.CONFIG or describe_source(keys.NAME)
        config, processor, tied = read_description(text)
        config = with_labels(
            config, [f"class {label}" for label in range(cfg.MODEL.DETR.NUM_CLASSES)]
        )
        softmax, _ = SET_PREDICTORS[config.model_type]
        loss = cfg.MODEL.DETR.LOSS
        heads: tuple[Classification, Classification] = (
            SigmoidFocal(loss.FOCAL_ALPHA, loss.FOCAL_GAMMA),
            SoftmaxCE(loss.NO_OBJECT_WEIGHT),
        )
        return {
            "model": build_from_config(config, tied),
            "processor": processor,
            "criterion": make_criterion(cfg, heads[softmax]),
            "native_loss": keys.LOSS == "native",
            "resize": resize,
            "freeze_batch_norm": keys.FREEZE_BATCH_NORM,
            "source": keys.NAME if keys.PRETRAINED else "",
            "allow_pickle": keys.ALLOW_PICKLE,
            "detections_per_image": cfg.TEST.DETECTIONS_PER_IMAGE,
        }

    def train(self, mode: bool = True) -> HuggingFaceDetector:
        """Sets the mode; frozen batch normalisation stays in evaluation mode."""
        super().train(mode)
        if self.freeze_batch_norm:
            for layer in self._batch_norms():
                layer.eval()
        return self

    def load_pretrained(self) -> None:
        """Loads the weights of `source` but for the rows of its classes, which start at random."""
        if not self.source:
            return
        found, labels = read_weights(self.source, self.allow_pickle)
        state = self.state_dict()
        classes = set(self.class_parameters())
        with torch.no_grad():
            for name, value in found.items():
                own, value = state[name], value.to(state[name])
                if name in classes:  # what comes after the classes is no-object
                    own[self.num_classes :] = value[len(labels) :]
                else:
                    own.copy_(value)

    def preprocess(self, batched_inputs: Sequence[dict[str, Any]]) -> ImageBatch:
        """Lets the image processor resize, normalise and pad each image, then pads to one size."""
        tensors, sizes = [], []
        for entry in batched_inputs:
            image = entry["image"].to(self.device, non_blocking=True)
            found = self.processor(
                images=image,
                do_resize=self.resizes and self.processor.do_resize,
                input_data_format="channels_first",
                return_tensors="pt",
            )
            tensor = found["pixel_values"][0].to(self.device)
            tensors.append(tensor)
            size = tuple(tensor.shape[-2:])
            if "pixel_mask" in found:
                mask = found["pixel_mask"][0]
                size = int(mask[:, 0].sum()), int(mask[0].sum())
            sizes.append(size)
        height, width = (max(x.shape[axis] for x in tensors) for axis in (-2, -1))
        batch = tensors[0].new_zeros(len(tensors), tensors[0].shape[0], height, width)
        for tensor, padded in zip(tensors, batch, strict=True):
            padded[:, : tensor.shape[-2], : tensor.shape[-1]] = tensor
        return ImageBatch(batch, sizes)

    def targets(self, batched_inputs: Sequence[dict[str, Any]]) -> list[Target]:
        """Makes labels of `instances`; refuses more of them than there are queries."""
        targets = super().targets(batched_inputs)
        for entry, target in zip(batched_inputs, targets, strict=True):
            if len(target) > self.num_queries:
                raise InputError(
                    f"{entry.get('file_name', 'an image')} has {len(target)} labels, "
                    f"{self.model.config.model_type} has {self.num_queries} queries and can match "
                    "no more: split the image, or take a model with more queries"
                )
        return targets

    def predict(self, images: ImageBatch) -> DetrOutput:
        """Predicts logits and boxes with all decoder layers."""
        return self._first_group(self._forward(images).output)

    def losses(
        self, images: ImageBatch, targets: Sequence[Target], class_mask: Tensor | None = None
    ) -> tuple[dict[str, Tensor], DetrOutput | None]:
        """Computes the losses of a batch: ours, or the model's own (`MODEL.HUGGINGFACE.LOSS`)."""
        if self.native_loss:
            return self._native_losses(images, targets, class_mask)
        found = self._forward(images)
        output = found.output
        if not is_finite(output):
            self.criterion.normaliser(targets, output.logits.device)  # other processes wait in it
            return nan_losses(output), None
        groups = output.logits.shape[2] // self.num_queries
        folded = DetrOutput(
            output.logits.unflatten(2, (groups, -1)).flatten(1, 2),  # (L, B·G, Q, C)
            output.boxes.unflatten(2, (groups, -1)).flatten(1, 2).clamp(0, 1),
            output.proposals,
        )
        repeated = [target for target in targets for _ in range(groups)]
        num_boxes = self.criterion.normaliser(targets, output.logits.device)
        if class_mask is not None and class_mask.ndim > 1:  # of each image
            class_mask = class_mask.repeat_interleave(groups, dim=0)
        with self.criterion.normalised_by(num_boxes * groups):
            if not found.encoder_layer:
                return self.criterion(folded, repeated, class_mask), self._first_group(output)
            losses = self.criterion(folded.from_layer(1), repeated, class_mask)
            if self.criterion.aux_loss:
                # The encoder's choice of queries is coarse: any IoU will do, as for proposals.
                first = DetrOutput(folded.logits[:1], folded.boxes[:1])
                free = [dataclasses.replace(target, min_iou=None) for target in repeated]
                encoder = self.criterion(first, free, class_mask)
                losses |= {f"{name}_enc": value for name, value in encoder.items()}
        return losses, self._first_group(output)

    def scores(self, logits: Tensor) -> Tensor:
        """Class probabilities of logits, (…, K), zero for classes that are not visible."""
        if self.softmax:
            return torch.softmax(mask_logits(logits, self.visible_classes), dim=-1)[..., :-1]
        scores = logits.sigmoid()
        return scores * self.visible_classes.to(scores)

    def background(self, logits: Tensor) -> Tensor | None:
        """p(φ) of logits, (…), or None for a sigmoid head."""
        if not self.softmax:
            return None
        return torch.softmax(mask_logits(logits, self.visible_classes), dim=-1)[..., -1]

    def class_parameters(self) -> list[str]:
        """Names, in `state_dict`, of the parameters with a row for each class."""
        return [name for name in self.state_dict() if _CLASS_ROWS.search(name)]

    def proposal_parameters(self) -> list[str]:
        """Those of them that belong to the first of two stages, whose row 0 means any object."""
        last = f"class_embed.{getattr(self.model.config, 'decoder_layers', 0)}."
        return [name for name in self.class_parameters() if self.two_stage and last in name]

    def _forward(
        self, images: ImageBatch, labels: Sequence[Target] | None = None
    ) -> _ForwardResult:
        """Runs the model; with labels, which may bring queries of their own, also its loss."""
        model = self.model
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        given = labels or [Target(none, none.new_zeros(0, 4).float())] * len(images)
        arguments = {
            "pixel_values": images.tensor,
            "labels": [{"class_labels": x.labels, "boxes": x.boxes} for x in given],
        }
        if self._takes_mask:
            arguments["pixel_mask"] = (~images.mask).long()
        caught: list[_LossArguments] = []
        native = model.loss_function

        def catch(*args: Any, **kwargs: Any) -> Any:
            caught.append(_LossArguments.read(args, kwargs))
            if labels is None:
                return torch.zeros(()), {}, None
            if not is_finite(caught[0].output):  # the model's matcher would raise
                args = tuple(_finite(value) for value in args)
                kwargs = {name: _finite(value) for name, value in kwargs.items()}
            return native(*args, **kwargs)

        model.loss_function = catch
        try:
            found = model(**arguments)
        finally:
            del model._loss_function
        output = caught[0].output
        if self.two_stage:
            boxes = found.enc_outputs_coord_logits.sigmoid()
            output.proposals = DetrOutput(found.enc_outputs_class[None], boxes[None])
        if self.fixed_queries or not self.training:  # others train with more queries than these
            output.features = found.last_hidden_state[:, -self.num_queries :]
        return _ForwardResult(
            output, caught[0].encoder_layer, caught[0].denoising, found.loss, found.loss_dict or {}
        )

    def _native_losses(
        self, images: ImageBatch, targets: Sequence[Target], class_mask: Tensor | None
    ) -> tuple[dict[str, Tensor], DetrOutput | None]:
        if class_mask is not None and not bool(class_mask.all()):
            raise InputError(
                "the model's own loss cannot exclude unseen classes: set METHOD.UNSEEN to negative"
            )
        if any(target.probs is not None for target in targets):
            raise InputError(
                "the model's own loss takes hard labels: set METHOD.PSEUDO.SOFT and "
                "METHOD.PSEUDO.CALIBRATED to False"
            )
        found = self._forward(images, targets)
        output = found.output
        if not is_finite(output):
            return nan_losses(output), None
        if has_event_storage():
            terms = {f"native/{name}": float(value.detach()) for name, value in found.terms.items()}
            get_event_storage().put_scalars(smoothing_hint=False, **terms)
        first = output.logits.shape[2] - self.num_queries if found.denoising else 0
        return {"loss_native": found.loss}, self._first_group(output, first)

    def _first_group(self, output: DetrOutput, first: int = 0) -> DetrOutput:
        """Q queries of those that training has: its first group, or those without noise."""
        queries = slice(first, first + self.num_queries)
        return DetrOutput(
            output.logits[:, :, queries],
            output.boxes[:, :, queries],
            output.proposals,
            output.features,
        )

    def _hide_unseen(self, module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        """Lets visible classes alone choose the queries, as they alone are predicted."""
        if self.training:
            return logits
        return logits.masked_fill(~self.visible_classes, torch.finfo(logits.dtype).min)

    def _batch_norms(self) -> Iterator[nn.Module]:
        return (layer for layer in self.model.modules() if isinstance(layer, _BATCH_NORMS))


@dataclass
class _ForwardResult:
    output: DetrOutput  # with all queries that training has
    encoder_layer: bool  # whether its first layer is the encoder's choice of queries
    denoising: bool  # whether the first of them are labels with noise
    loss: Tensor
    terms: dict[str, Tensor]


@dataclass
class _LossArguments:
    """What the models hand to their loss functions, in one form."""

    output: DetrOutput
    encoder_layer: bool
    denoising: bool

    @classmethod
    def read(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> _LossArguments:
        logits, _, _, boxes, _, classes, coordinates, *encoder = args
        if classes is None:  # without auxiliary losses the last layer comes alone
            classes, coordinates = logits[None], boxes[None]
        first: tuple[Tensor | None, ...] = tuple(encoder[:2]) or (None, None)
        if "enc_topk_logits" in kwargs:  # RT-DETR and what came of it: images before layers
            classes, coordinates = classes.transpose(0, 1), coordinates.transpose(0, 1)
            first = kwargs["enc_topk_logits"], kwargs["enc_topk_bboxes"]
        denoising = kwargs.get("denoising_meta_values") is not None
        if first[0] is None or first[1] is None or denoising:
            return cls(DetrOutput(classes, coordinates), False, denoising)
        # The encoder's choice of queries, with classes of its own, is taught as a layer.
        classes = torch.cat([first[0][None], classes])
        coordinates = torch.cat([first[1][None], coordinates])
        return cls(DetrOutput(classes, coordinates), True, denoising)


def _finite(value: Any) -> Any:
    """A tensor of halves in place of one that holds NaN or infinity; anything else as it is."""
    if isinstance(value, Tensor) and not value.isfinite().all():
        return torch.full_like(value, 0.5)
    return value


def _num_queries(config: Any) -> int:
    if getattr(config, "two_stage", False):
        return config.two_stage_num_proposals
    return getattr(config, "num_queries", None) or config.num_detection_tokens


def _normalisation(processor: Any) -> tuple[list[float], list[float]]:
    """Mean and deviation per channel, for pixels in 0-255, that a processor normalises by."""
    scale = 1 / processor.rescale_factor if processor.do_rescale else 1.0
    if not processor.do_normalize:
        return [0.0] * 3, [scale] * 3
    return [scale * x for x in processor.image_mean], [scale * x for x in processor.image_std]
