"""Settings as dataclasses, and the config keys that follow from them.

A settings dataclass is the one declaration of its keys: `add_keys` turns an instance into yacs keys
with its values as defaults, `read_keys` turns the keys into an instance again. A field `budget` of
`MemoryRule`, which is the field `memory` of `Method`, is the key METHOD.MEMORY.BUDGET; a field that
may be None has a key ENABLED beside its own.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import yaml
from detectron2.config import CfgNode

from cldetr.errors import InputError
from cldetr.published import check_published, is_published

S = TypeVar("S")
_TYPE_NAMES = {
    **{"array": "a list", "object": "a mapping", "str": "a text", "null": "nothing"},
    **{"int": "a whole number", "float": "a number", "bool": "True or False"},
}


@dataclass(frozen=True)
class ScenarioSettings:
    """Which classes and images each phase gets (`cldetr.scenario.make_scenario`).

    Attributes:
        name: class counts of the phases, as A+B, A+XxY or A+B+C…, or a published scenario, such as
            voc/19+1 (docs/scenarios.md).
        protocol: "strict", the paper's, "traditional" (supplement A), "loco", LoCo-COCO's,
            "extend": add the categories of DATASETS.TRAIN to MODEL.DETECTOR, without its data, or
            "domains": the same categories in each data set of DATASETS.TRAIN, images of another
            kind in each phase.
        order: of the classes: "id", "seed", "released" or "psedet".
        class_seed: of the class order "seed".
        data_seed: of the division of the images.
        phases: category names of each phase, instead of NAME.
        partial: allow categories that no phase learns, such as the stray one of an export. Their
            objects stay unannotated.
        hold_out: share of the training images, drawn by DATA_SEED, that no phase sees. They are
            the data set "hold_out" of DATASETS.TEST, to choose settings by.
        known: of the protocol "extend": categories that the detector knows and the new data
            annotate are kept as they are, "keep", or trained on these annotations, too, "refresh".
    """

    name: str = "70+10"
    protocol: Literal["strict", "traditional", "loco", "extend", "domains"] = "strict"
    order: str = "seed"
    class_seed: int = 0
    data_seed: int = 0
    phases: tuple[tuple[str, ...], ...] = ()
    partial: bool = False
    hold_out: float = 0.0
    known: Literal["keep", "refresh"] = "keep"

    def __post_init__(self) -> None:
        if not 0.0 <= self.hold_out < 1.0:
            raise InputError(
                f"SCENARIO.HOLD_OUT is a share of the images from 0 to below 1, not {self.hold_out}"
            )
        if self.published:
            check_published(self.name, self.protocol, self.order)
            if self.phases:
                raise InputError(
                    f"scenario {self.name} has its own phases: remove SCENARIO.PHASES, or set "
                    "SCENARIO.NAME to class counts"
                )

    @property
    def published(self) -> bool:
        """Whether the name is that of a published scenario."""
        return is_published(self.name)


@dataclass(frozen=True)
class StageSchedule:
    """How long a stage trains and at what learning rate.

    Attributes:
        epochs: passes over the stage's images.
        drops: epochs after which the learning rate is multiplied by SOLVER.GAMMA.
        lr_scale: factor on SOLVER.BASE_LR in this stage.
        min_steps: train for this many steps at least, with more epochs and later drops where the
            images are few.
        max_steps: stop after this many steps; 0 means no limit.
    """

    epochs: float
    drops: tuple[float, ...] = ()
    lr_scale: float = 1.0
    min_steps: int = 0
    max_steps: int = 0

    def steps(self, per_epoch: int) -> int:
        """Optimizer steps of the stage, at least one."""
        steps = max(round(self.epochs * per_epoch), self.min_steps, 1)
        return min(steps, self.max_steps) if self.max_steps else steps

    def milestones(self, per_epoch: int) -> tuple[int, ...]:
        """Steps at which the learning rate drops, those before the end of the stage."""
        steps = self.steps(per_epoch)
        stretch = max(self.min_steps / (self.epochs * per_epoch), 1.0) if self.epochs else 1.0
        drops = (round(drop * per_epoch * stretch) for drop in self.drops)
        return tuple(drop for drop in drops if drop < steps)


@dataclass(frozen=True)
class EarlyStop:
    """Ends the training step of a phase where its AP on held-out images improves no more.

    Attributes:
        hold_out: share of each phase's images, drawn by SCENARIO.DATA_SEED, that is held out: no
            stage trains on them, and none of them is an exemplar.
        period: epochs between two evaluations on them.
        patience: evaluations without a better AP until the stage goes on at its next learning rate
            drop or, after the last drop, ends.
    """

    hold_out: float = 0.1
    period: float = 1.0
    patience: int = 5

    def __post_init__(self) -> None:
        key = "SCHEDULE.EARLY_STOP"
        if not 0.0 < self.hold_out < 1.0:
            raise InputError(
                f"{key}.HOLD_OUT is a share of the images between 0 and 1, not {self.hold_out}"
            )
        if self.period <= 0:
            raise InputError(f"{key}.PERIOD is a number of epochs above 0, not {self.period}")
        if self.patience < 1:
            raise InputError(f"{key}.PATIENCE is at least 1, not {self.patience}")

    def period_steps(self, per_epoch: int) -> int:
        """Steps between two evaluations."""
        return max(round(self.period * per_epoch), 1)


@dataclass(frozen=True)
class Schedule:
    """The stages' schedules: the first phase, the training step and the calibration step.

    The defaults are the paper's 50 epochs, and 40 + 10 from the second phase on. The paper does not
    say at which learning rate it calibrates; the standard 50-epoch schedule drops at epoch 40, so
    calibration runs at the dropped rate.
    """

    first: StageSchedule = StageSchedule(50.0, drops=(40.0,))
    train: StageSchedule = StageSchedule(40.0)
    calibrate: StageSchedule = StageSchedule(10.0, lr_scale=0.1)
    early_stop: EarlyStop | None = None


def add_keys(node: CfgNode, settings: Any) -> None:
    """Sets a key of `node` for every field of a settings dataclass, to the field's value."""
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, key = getattr(settings, field.name), field.name.upper()
        kind = _dataclass_in(hints[field.name])
        if kind is None:
            node[key] = _plain(value)
            continue
        node[key] = CfgNode()
        if type(None) in typing.get_args(hints[field.name]):
            node[key].ENABLED = value is not None
        add_keys(node[key], value or field.metadata.get("enabled", kind)())


def read_keys(cls: type[S], node: Mapping[str, Any], path: str) -> S:
    """Builds a settings dataclass from the keys that `add_keys` made of it."""
    return build_settings(cls, _without_disabled(node), path)


def build_settings(cls: type[S], values: Mapping[str, Any], path: str) -> S:
    """Builds a settings dataclass from nested plain data, as `msgspec.convert` does.

    Args:
        cls: the dataclass.
        values: field name → value; nested dataclasses as mappings, None for an absent one.
        path: what messages call this part of the configuration.
    """
    try:
        return msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InputError):  # a check of the dataclass itself
            raise error.__cause__ from None
        problem, _, where = str(error).partition(" - at `$")
        hint: Any = cls
        for name in re.findall(r"\.(\w+)", where):
            hint = typing.get_type_hints(_dataclass_in(hint))[name]
        if typing.get_origin(hint) is Literal:
            problem = f"must be one of {', '.join(map(repr, typing.get_args(hint)))}"
        for name, word in _TYPE_NAMES.items():
            problem = problem.replace(f"`{name}`", word)
        key = path + where.rstrip("`").upper()
        raise InputError(f"{key}: {problem[0].lower()}{problem[1:]}") from None


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key with dots, value) for every value of a nested config."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def parse_value(text: str) -> Any:
    """The value that a text on the command line means: YAML, with 4e-4 as a number.

    Detectron2's form of a tuple, "('a',)", is a list as well.
    """
    if text.startswith("("):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return list(ast.literal_eval(text))
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def suggest(word: str, known: Sequence[str]) -> str:
    """Says which known words look like an unknown one."""
    near = difflib.get_close_matches(word, dict.fromkeys(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _without_disabled(node: Mapping[str, Any]) -> dict[str, Any]:
    """The keys in lower case; sections that are not enabled become None."""
    values: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            value = _without_disabled(value) if value.get("ENABLED", True) else None
        if key != "ENABLED":
            values[key.lower()] = value
    return values


def _dataclass_in(hint: Any) -> Any:
    """The dataclass that a type hint means, through Optional; None for another type."""
    options = typing.get_args(hint) or (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
