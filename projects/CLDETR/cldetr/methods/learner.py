"""The learner: a detector, what it is taught in this stage, and the frozen model that helps.

It is what the training loop sees: images in, a dictionary of losses out.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage, get_event_storage
from torch import Tensor, nn

from cldetr.errors import InputError
from cldetr.layers.boxes import box_cxcywh_to_xyxy, box_xyxy_to_cxcywh
from cldetr.layers.ragged import pad_rows, row_indices
from cldetr.methods.distill import LOSSES, DistillRule, StudentTeacherOutputs
from cldetr.methods.matching import MatcherRule, set_min_iou
from cldetr.methods.pseudo import (
    MergeCounts,
    Predictions,
    PseudoRule,
    candidates,
    make_pseudo_labels,
    merge_batch,
)
from cldetr.modeling.detector import Detector, is_finite
from cldetr.modeling.structures import DetrOutput, ImageBatch, Target


@dataclass(frozen=True)
class LabelledBatch:
    """A batch with all that its losses are computed from."""

    images: ImageBatch
    targets: list[Target]  # with pseudo-labels
    teacher_output: DetrOutput | None
    sound: bool  # whether the teacher's predictions are finite
    class_mask: Tensor | None  # classes that take part in the loss, (K,) or (B, 1, K); None: all
    num_boxes: Tensor  # what L_DETR is divided by
    num_truths: Tensor | None  # the same without pseudo-labels, for a distillation that asks for it


class Learner(nn.Module):
    """Trains a detector in one stage, with labels completed by a frozen model where asked."""

    _seen: Tensor
    _teacher_classes: Tensor
    pseudo_counts: Tensor  # (K,) pseudo-labels of each class so far
    thresholds: Tensor | None  # (K,) of each class, for a rule that needs them

    def __init__(
        self,
        detector: Detector,
        *,
        seen: Sequence[int],
        teacher: Detector | None = None,
        teacher_classes: Sequence[int] = (),
        rule: PseudoRule | None = None,
        distill: DistillRule | None = None,
        matcher: MatcherRule | None = None,
        mask_unseen: bool = True,
        ignore_unlabelled: bool = False,
    ) -> None:
        """Sets up one stage.

        Args:
            detector: the model Φ that learns; its weights are this module's only ones.
            seen: labels of all classes up to this phase.
            teacher: the frozen model: Φ^old in the training step, the model at the start of
                calibration when exemplars are completed.
            teacher_classes: labels that the teacher may give.
            rule: how its predictions become pseudo-labels; None for none. Without a teacher, the
                inputs bring its predictions with them (`teacher_candidates` made them).
            distill: the loss that compares its predictions query by query; None for none.
            matcher: the least IoUs at which predictions and labels are matched; None for none.
            mask_unseen: exclude the head's rows of unseen classes from the loss.
            ignore_unlabelled: exclude from an image's loss the classes that are neither annotated
                on it nor labelled by the teacher.
        """
        super().__init__()
        self.detector = detector
        self.rule = rule
        self.distill = distill
        self.matcher = matcher
        self.progress = 0.0  # of the stage, in [0, 1]; the trainer moves it
        self.pseudo_images = 0  # images labelled so far, and those without any pseudo-label
        self.pseudo_empty = 0
        self.pseudo_weight = 1.0  # what a pseudo-label counts, for a rule that balances them
        num_classes = detector.num_classes
        self.register_buffer("_seen", _mask(seen, num_classes), persistent=False)
        self.register_buffer(
            "_teacher_classes", _mask(teacher_classes, num_classes), persistent=False
        )
        self.register_buffer("thresholds", None, persistent=False)
        none = torch.zeros(num_classes, dtype=torch.int64)
        self.register_buffer("pseudo_counts", none, persistent=False)
        self.mask_unseen = mask_unseen
        self.ignore_unlabelled = ignore_unlabelled
        # A tuple hides the teacher from the module tree: no gradient, no checkpoint, no DDP, and
        # .train() does not reach it.
        self._teacher = () if teacher is None else (teacher,)

    def set_thresholds(self, values: Mapping[int, float]) -> None:
        """Sets the score threshold of each class that the teacher may give, by label."""
        thresholds = torch.ones(self.detector.num_classes)
        thresholds[list(values)] = torch.tensor(list(values.values()))
        self.thresholds = thresholds.to(self.detector.device)

    def dismiss_teacher(self) -> None:
        """Lets the teacher go; from here on the inputs must bring its predictions."""
        self._teacher = ()

    @property
    def seen(self) -> Tensor:
        """(K,) bool, the classes up to this phase."""
        return self._seen

    @property
    def teacher(self) -> Detector | None:
        """The frozen old model, where this stage has one."""
        return self._teacher[0] if self._teacher else None

    @property
    def teacher_labels(self) -> list[int]:
        """Labels that the teacher may give, ascending."""
        return self._teacher_classes.nonzero()[:, 0].tolist()

    def forward(self, batched_inputs: list[dict[str, Any]] | LabelledBatch) -> Any:
        """Computes the losses of a batch: L_DKD (Eq. 5) with a teacher, L_DETR (Eq. 1) without.

        In evaluation mode it is the detector: detections, as Detectron2's models return them.
        """
        if isinstance(batched_inputs, LabelledBatch):
            return self._losses(batched_inputs)
        if not self.training:
            return self.detector(batched_inputs)
        (batch,) = self.label([batched_inputs])
        return self._losses(batch)

    def label(self, parts: Sequence[list[dict[str, Any]]]) -> list[LabelledBatch]:
        """Labels the parts of a step's batch, so that their losses sum up to that of the whole.

        Each part is divided by its share of the boxes of the whole step; distillation losses but
        LwF's are means or prototypes of the part alone. Makes collective calls: every process comes
        by here in every step, whatever its predictions are like.
        """
        truths, labelled = [], []
        for batched_inputs in parts:
            images = self.detector.preprocess(batched_inputs)
            targets = self.detector.targets(batched_inputs)
            truths += targets
            teacher_output = None
            if self.teacher is not None:
                # A loss that compares with the teacher's outputs may keep them for the backward
                # pass, which those of the cheaper inference mode do not allow.
                with torch.no_grad() if self.distill else torch.inference_mode():
                    teacher_output = self.teacher.predict(images)
            sound = teacher_output is None or is_finite(teacher_output)
            if self.rule is not None and sound:
                targets = self._merge(teacher_output, targets, batched_inputs)
            targets = self.prepare_matching(targets)
            mask = self.class_mask(batched_inputs)
            labelled.append((images, targets, teacher_output, sound, mask))
        normaliser, device = self.detector.criterion.normaliser, self.detector.device
        num_truths = None
        if self.distill is not None and self.distill.normaliser == "boxes":
            num_truths = normaliser(truths, device)
        num_boxes = normaliser([x for _, targets, *_ in labelled for x in targets], device)
        shares = [len(part) / len(truths) for part in parts]
        return [
            LabelledBatch(
                *part, num_boxes * share, None if num_truths is None else num_truths * share
            )
            for part, share in zip(labelled, shares, strict=True)
        ]

    def _losses(self, batch: LabelledBatch) -> dict[str, Tensor]:
        with self.detector.criterion.normalised_by(batch.num_boxes):
            losses, output = self.detector.losses(
                batch.images, batch.targets, class_mask=batch.class_mask
            )
        if not batch.sound:  # the trainer skips the step, on all processes together
            return {name: loss * float("nan") for name, loss in losses.items()}
        if batch.teacher_output is not None and output is not None and self.distill is not None:
            losses |= self._compare(output, batch.teacher_output, self.distill, batch.num_truths)
        return losses

    @torch.no_grad()
    def teacher_candidates(self, batched_inputs: list[dict[str, Any]]) -> list[Instances]:
        """The teacher's predictions on test inputs that the rule may ever use, to be stored.

        Returns:
            for each image, in pixels of its `height` and `width`: `pred_boxes`, `scores` (N, C) of
            the teacher's classes in ascending order, and `background` (N,) for a softmax head.
        """
        assert self.teacher is not None
        assert self.rule is not None
        output = self.teacher.predict(self.detector.preprocess(batched_inputs))
        if not is_finite(output):
            names = ", ".join(str(entry["file_name"]) for entry in batched_inputs)
            raise InputError(f"the old model's predictions are not finite on {names}")
        scores, boxes, background = self._read(output)
        allowed = scores * self._usable(batched_inputs)[:, None].to(scores.dtype)
        wanted = candidates(Predictions(allowed, boxes, background), self.rule)
        found = []
        for image, entry in enumerate(batched_inputs):
            queries = wanted[image]
            size = (entry["height"], entry["width"])
            scale = boxes.new_tensor([size[1], size[0], size[1], size[0]])
            kept = Instances(size)
            kept.pred_boxes = Boxes(box_cxcywh_to_xyxy(boxes[image, queries]) * scale)
            kept.scores = scores[image, queries][:, self._teacher_classes]
            if background is not None:
                kept.background = background[image, queries]
            found.append(kept)
        return found

    @torch.no_grad()
    def pseudo_labels(
        self, teacher_output: DetrOutput | None, batched_inputs: list[dict[str, Any]]
    ) -> list[Target]:
        """What the rule makes of the teacher's predictions, before they meet the ground truth.

        Args:
            teacher_output: the teacher's predictions; None where the inputs bring them.
            batched_inputs: the batch.
        """
        assert self.rule is not None
        usable = self._usable(batched_inputs)
        if teacher_output is None:
            return self._stored_pseudo_labels(batched_inputs, usable)
        return self._label(*self._read(teacher_output), usable)

    def class_mask(self, batched_inputs: list[dict[str, Any]]) -> Tensor | None:
        """The classes that take part in the loss, (K,) or of each image, (B, 1, K); None: all."""
        seen = self._seen if self.mask_unseen else None
        if not self.ignore_unlabelled:
            return seen
        labelled = torch.stack([_mask(x["classes"], len(self._seen)) for x in batched_inputs])
        labelled = labelled.to(self._seen.device, non_blocking=True)
        if self.rule is not None:
            labelled = labelled | self._teacher_classes
        return (labelled if seen is None else labelled & seen)[:, None]

    def prepare_matching(self, targets: list[Target]) -> list[Target]:
        """Adds to merged labels what this stage's matcher asks of predictions."""
        if self.matcher is None:
            return targets
        return set_min_iou(targets, self.matcher, self.progress)

    @torch.no_grad()
    def _merge(
        self,
        teacher_output: DetrOutput | None,
        truths: list[Target],
        batched_inputs: list[dict[str, Any]],
    ) -> list[Target]:
        """Labels a batch by the teacher's predictions and merges (Alg. 1, lines 5-7)."""
        assert self.rule is not None
        pseudo = self.pseudo_labels(teacher_output, batched_inputs)
        merged, counts = merge_batch(truths, pseudo, self.rule, limit=self.detector.num_queries)
        self.pseudo_counts += self._count(merged) - self._count(truths)
        self._log(counts, truths)
        return merged

    def _stored_pseudo_labels(
        self, batched_inputs: list[dict[str, Any]], usable: Tensor
    ) -> list[Target]:
        """Pseudo-labels of a batch from the predictions that its inputs bring."""
        assert self.rule is not None
        kept = [entry["predictions"] for entry in batched_inputs]
        sizes = torch.tensor(
            [[[width, height] * 2] for height, width in (x.image_size for x in kept)]
        )
        counts = [len(found) for found in kept]
        images, rows = row_indices(counts, torch.device("cpu"))

        def pad(parts: list[Tensor]) -> Tensor:
            return pad_rows(torch.cat(parts), images, rows, counts)

        corners = pad([x.pred_boxes.tensor for x in kept]) / sizes  # (B, N, 4)
        known = pad([x.scores for x in kept]).to(usable.device)
        # Zero where there is no prediction, which no selection takes.
        scores = known.new_zeros(*known.shape[:2], usable.shape[1])
        scores.index_copy_(2, self._teacher_classes.nonzero()[:, 0], known)
        background = None
        if kept[0].has("background"):
            background = pad([x.background for x in kept]).to(usable.device)
        boxes = box_xyxy_to_cxcywh(corners).to(usable.device)
        return self._label(scores, boxes, background, usable)

    def _label(
        self, scores: Tensor, boxes: Tensor, background: Tensor | None, usable: Tensor
    ) -> list[Target]:
        """The rule's pseudo-labels at this point of the stage."""
        assert self.rule is not None
        found = make_pseudo_labels(
            scores, boxes, background, usable, self.rule, self.progress, self.thresholds
        )
        if self.pseudo_weight == 1.0:
            return found
        weights = [
            torch.ones_like(x.boxes[:, 0]) if x.weights is None else x.weights for x in found
        ]
        return [
            dataclasses.replace(target, weights=own * self.pseudo_weight)
            for target, own in zip(found, weights, strict=True)
        ]

    @torch.no_grad()
    def count_labels(self, batched_inputs: list[dict[str, Any]]) -> tuple[int, float]:
        """How many true labels a batch has, and what its pseudo-labels count together."""
        assert self.rule is not None
        output = None
        if self.teacher is not None:
            output = self.teacher.predict(self.detector.preprocess(batched_inputs))
        truths = self.detector.targets(batched_inputs)
        pseudo = self.pseudo_labels(output, batched_inputs)
        merged, _ = merge_batch(truths, pseudo, self.rule, limit=self.detector.num_queries)
        true = sum(map(len, truths))
        together = Target.cat(merged)
        if together.weights is None:
            return true, float(len(together) - true)
        return true, float(together.weights.sum()) - true

    def _usable(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Classes that may be pseudo-labelled on each image, (B, K)."""
        usable = self._teacher_classes.expand(len(batched_inputs), -1)
        if self.rule is not None and self.rule.skip_annotated:
            classes = [_mask(entry["classes"], usable.shape[1]) for entry in batched_inputs]
            usable = usable & ~torch.stack(classes).to(usable.device)
        return usable

    def _read(self, teacher_output: DetrOutput) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scores (B, Q, K), boxes (B, Q, 4) and p(φ) of the teacher's last layer, in float32."""
        assert self.teacher is not None
        logits = teacher_output.logits[-1].float()
        return (
            self.teacher.scores(logits),
            teacher_output.boxes[-1].float(),
            self.teacher.background(logits),
        )

    def _compare(
        self,
        output: DetrOutput,
        teacher_output: DetrOutput,
        rule: DistillRule,
        num_boxes: Tensor | None,
    ) -> dict[str, Tensor]:
        """The distillation loss of the last layer, in float32."""
        assert self.teacher is not None
        outputs = StudentTeacherOutputs(
            student_logits=output.logits[-1].float(),
            student_boxes=output.boxes[-1].float(),
            teacher_logits=teacher_output.logits[-1].float(),
            teacher_boxes=teacher_output.boxes[-1].float(),
            old=self._teacher_classes,
            softmax=output.logits.shape[-1] > self.detector.num_classes,
            num_boxes=num_boxes,
            student=output,
            teacher=teacher_output,
            student_head=self.detector.classify,
            teacher_head=self.teacher.classify,
        )
        with torch.autocast(output.logits.device.type, enabled=False):
            return LOSSES[rule.loss](outputs, rule)

    def _count(self, targets: list[Target]) -> Tensor:
        """Labels of each class, (K,)."""
        labels = torch.cat([target.labels for target in targets])
        # A GPU would make the host wait for `bincount`.
        return torch.zeros_like(self.pseudo_counts).index_add_(0, labels, torch.ones_like(labels))

    def _log(self, counts: MergeCounts, truths: list[Target]) -> None:
        self.pseudo_images += counts.images
        self.pseudo_empty += counts.empty
        storage = _storage()
        if storage is None:
            return
        images = max(counts.images, 1)
        storage.put_scalar("pseudo/per_image", counts.pseudo / images)
        storage.put_scalar("pseudo/truth_per_image", sum(map(len, truths)) / images)
        storage.put_scalar("pseudo/overlapping", counts.overlapping / images)
        storage.put_scalar("pseudo/without", counts.empty / images)
        if counts.overflow:
            storage.put_scalar("pseudo/overflow", counts.overflow)


def freeze(detector: Detector, classes: Sequence[int]) -> Detector:
    """Makes a frozen copy of a detector that knows `classes`: evaluation mode, no gradients."""
    teacher = copy.deepcopy(detector)
    teacher.visible_classes = _mask(classes, detector.num_classes).to(detector.device)
    teacher.freeze()
    return teacher


def _mask(labels: Sequence[int], num_classes: int) -> Tensor:
    mask = torch.zeros(num_classes, dtype=torch.bool)
    mask[list(labels)] = True
    return mask


def _storage() -> EventStorage | None:
    """The current event storage, or None outside a training loop."""
    try:
        return get_event_storage()
    except AssertionError:
        return None
