"""A method is a row: which pseudo-labels, which distillation, which memory, calibrate or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cldetr.errors import InputError
from cldetr.methods.distill import DistillRule
from cldetr.methods.matching import MatcherRule
from cldetr.methods.pseudo import PseudoRule
from cldetr.modeling.detector import Detector


@dataclass(frozen=True)
class MemoryRule:
    """Which exemplars are kept and whether the training step replays them.

    Attributes:
        strategy: a word of `cldetr.data.exemplars.STRATEGIES`.
        budget: up to 1 a share of the data set, divided among the phases by their sizes; above 1
            R_i, a number of images of each phase.
        replay: train on D_i ∪ E_1:i−1 rather than on D_i alone.
    """

    strategy: str = "kl"
    budget: float = 0.1
    replay: bool = True


@dataclass(frozen=True)
class CalibrationRule:
    """The second step of a phase: fine-tuning on the exemplars alone (Alg. 1, lines 15-20).

    Attributes:
        complete: the paper's exemplars carry the labels of their own phase only, so that objects of
            other phases are taught as background. With a rule here they get pseudo-labels from the
            model as it was when calibration began. None is the paper, read literally.
        reveal: show the true labels of all classes seen so far instead: what completion could
            reach at best.
    """

    complete: PseudoRule | None = field(
        default=None,
        # Hard labels: a soft one is the model's own score, from which there is nothing to learn.
        metadata={"enabled": lambda: PseudoRule(foreground=0.2, skip_annotated=True, soft=False)},
    )
    reveal: bool = False

    def __post_init__(self) -> None:
        if self.reveal and self.complete is not None:
            raise InputError("exemplars with all true labels have none to complete: choose one")


@dataclass(frozen=True)
class AverageRule:
    """An exponential moving average of the weights, in every training stage from phase 2 on.

    Attributes:
        decay: what is kept of the average in a step; in the first steps t of a stage less,
            (1 + t) / (10 + t), so that the weights that the stage starts from are soon forgotten.
        final: the averaged weights are the model of the phase, which the next one starts from and
            asks for labels; else the raw weights are. The others are saved and evaluated beside.
    """

    decay: float = 0.999
    final: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise InputError(f"METHOD.AVERAGE.DECAY must lie in [0, 1), not {self.decay}")


@dataclass(frozen=True)
class Method:
    """What is done against forgetting from the second phase on; nothing at all is fine-tuning.

    Attributes:
        name: what tables call it.
        pseudo: labels from the old model (DKD), or None.
        distill: a loss against the old model's predictions, query by query (LwF, ERD), or None.
        matcher: minimum IoUs for matching predictions with labels, or None.
        average: a moving average of the weights, or None.
        memory: exemplars, or None.
        calibrate: the calibration step, or None. It needs a memory.
        unseen: classes of later phases have rows in the head from the start. "mask" leaves those
            rows out of the loss until their phase; "negative" trains them as negatives, as the
            released code does.
        unlabelled: classes that are neither annotated on an image nor labelled by the old model,
            such as new classes on exemplars, which may well show them. "background" trains them as
            background there, as the paper does; "ignore" leaves them out of that image's loss.
        joint: train every phase on all data seen so far with all labels: the upper bound.
        reveal_old: show the true boxes of old classes on the phase's images in place of
            pseudo-labels: the supplement's KD-oracle.
    """

    name: str = "finetune"
    pseudo: PseudoRule | None = None
    distill: DistillRule | None = None
    matcher: MatcherRule | None = None
    average: AverageRule | None = None
    memory: MemoryRule | None = None
    calibrate: CalibrationRule | None = None
    unseen: Literal["mask", "negative"] = "mask"
    unlabelled: Literal["background", "ignore"] = "background"
    joint: bool = False
    reveal_old: bool = False

    def __post_init__(self) -> None:
        if self.calibrate is not None and self.memory is None:
            raise InputError("calibration needs exemplars: give the method a memory")
        if self.unseen not in ("mask", "negative"):
            raise InputError(f"unseen classes are 'mask' or 'negative', not {self.unseen!r}")
        if self.unlabelled not in ("background", "ignore"):
            raise InputError(
                f"unlabelled classes are 'background' or 'ignore', not {self.unlabelled!r}"
            )
        if self.distill is not None and self.pseudo is not None and self.pseudo.cache:
            raise InputError(
                "a distillation loss compares query by query on the same augmented image, so the "
                "old model must run in every step: set METHOD.PSEUDO.CACHE to False"
            )
        if self.distill is not None and self.pseudo is not None and self.pseudo.any_class:
            raise InputError(
                "METHOD.PSEUDO.ANY_CLASS lets the old model answer for new classes, too, and a "
                "distillation loss would keep their untrained scores: set it to False"
            )
        if self.joint and (self.needs_teacher or self.memory or self.calibrate):
            raise InputError("joint training sees all data: it takes no old model and no memory")
        if self.reveal_old and (self.needs_teacher or self.joint):
            raise InputError("true old labels take the place of the old model's: choose one")

    def check(self, detector: Detector) -> None:
        """Refuses, before anything is trained, what a detector cannot do."""
        architecture, problems = type(detector).__name__, []
        distill = self.distill
        if distill is not None and distill.compares_queries and not detector.fixed_queries:
            problems.append(
                f"METHOD.DISTILL.LOSS {distill.loss} compares query j of the old model with query "
                f"j of the new one, but the queries of this {architecture} depend on the image, so "
                "that they have nothing to do with each other: distil by pseudo-labels, "
                "METHOD.PSEUDO (configs/method/dkd.yaml)"
            )
        if distill is not None and distill.needs_head and not detector.has_classify:
            problems.append(
                f"METHOD.DISTILL.LOSS {distill.loss} asks the class head about prototypes: define "
                f"`classify` in {architecture}"
            )
        if self.distill is not None and detector.query_groups > 1:
            problems.append(
                "METHOD.DISTILL compares all queries of the old model with those of the new one, "
                "but MODEL.DETR.QUERY_GROUPS gives each phase queries of its own: distil by "
                "pseudo-labels, METHOD.PSEUDO (configs/method/dyq.yaml)"
            )
        complete = self.calibrate.complete if self.calibrate is not None else None
        rules = {"METHOD.PSEUDO": self.pseudo, "METHOD.CALIBRATE.COMPLETE": complete}
        ours = "or MODEL.HUGGINGFACE.LOSS to ours"
        for key, rule in rules.items():
            if rule is None or not detector.plain_labels_only:
                continue
            refused = {
                "SOFT": (
                    "False",
                    "labels with distributions over the classes",
                    "one class per box",
                ),
                "CALIBRATED": ("False", "lowers the scores of labels", "one class per box"),
                "WEIGHTED": ("False", "weights labels", "no weights"),
                "BALANCE": ("0", "weights labels", "no weights"),
            }
            for option, (off, does, takes) in refused.items():
                if getattr(rule, option.lower()):
                    problems.append(
                        f"{key}.{option} {does}, but the model's own loss takes {takes}: "
                        f"set {key}.{option} to {off}, {ours}"
                    )
        if self.matcher is not None and detector.plain_labels_only:
            problems.append(
                "METHOD.MATCHER asks for least IoUs, but the model's own loss has its own matcher: "
                f"set METHOD.MATCHER.ENABLED to False, {ours}"
            )
        if self.unseen == "mask" and not detector.takes_class_mask:
            problems.append(
                "METHOD.UNSEEN mask excludes classes of later phases from the loss, which the "
                f"model's own loss cannot: set METHOD.UNSEEN to negative, {ours}"
            )
        if self.unlabelled == "ignore" and not detector.takes_class_mask:
            problems.append(
                "METHOD.UNLABELLED ignore excludes classes from the loss of an image, which the "
                f"model's own loss cannot: set METHOD.UNLABELLED to background, {ours}"
            )
        if problems:
            heading = f"{architecture} cannot be trained with this method:"
            raise InputError.listing(heading, problems)

    @property
    def needs_teacher(self) -> bool:
        """Whether the training step asks the old model."""
        return self.pseudo is not None or self.distill is not None

    @property
    def view(self) -> str:
        """The images and annotations of a phase that it trains on (`cldetr.data.datasets`)."""
        return "joint" if self.joint else "revealed" if self.reveal_old else "phase"


# CL-DETR as the paper has it.
CLDETR = Method("cldetr", pseudo=PseudoRule(), memory=MemoryRule(), calibrate=CalibrationRule())
