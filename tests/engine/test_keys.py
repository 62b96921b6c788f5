"""No key of the configuration is ignored: each is obeyed, or refused with what to use instead.

Small runs note which keys they read: those of the config, and the fields of the settings that
SCENARIO, METHOD and SCHEDULE become. Every key of Detectron2's `get_cfg()` and of this project must
be among them, or be refused when it is set.
"""

import dataclasses
import sys
import typing
from collections import defaultdict
from pathlib import Path

import pytest
from detectron2.modeling import build_model

import cldetr
from cldetr import train
from cldetr.config import (
    RUNTIME_KEYS,
    check_keys,
    check_model_keys,
    default_config,
    identity,
    leaves,
    watch_keys,
)
from cldetr.engine import default_argument_parser, trainer
from cldetr.errors import InputError
from cldetr.methods.method import Method
from cldetr.settings import ScenarioSettings, Schedule

from ..modeling.tiny_huggingface import save as save_hugging_face

PACKAGE = str(Path(cldetr.__file__).parent)
SETTINGS = {"SCENARIO": ScenarioSettings, "METHOD": Method, "SCHEDULE": Schedule}
SET_BY_TRAINER = {"SOLVER.MAX_ITER", "SOLVER.STEPS", "STAGE.PHASE", "STAGE.NAME"}

# Runs that together read all keys that any run reads.
PLAIN = ("METHOD.PSEUDO.ENABLED", "False", "METHOD.CALIBRATE.ENABLED", "False")
VARIANTS = {
    "plain": (
        *("TEST.EVAL_PERIOD", "1", "SCHEDULE.EARLY_STOP.ENABLED", "True"),
        *("WANDB.ENABLED", "True", "LOG_IMAGES", "1"),
    ),
    "crop, mixed precision": (
        *("INPUT.CROP.ENABLED", "True", "SOLVER.AMP.ENABLED", "True"),
        *("SOLVER.CLIP_GRADIENTS.FULL_MODEL", "False"),
        *("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR"),
        *("METHOD.CALIBRATE.COMPLETE.ENABLED", "True", "METHOD.PSEUDO.SELECT", "curriculum"),
        *("METHOD.MATCHER.ENABLED", "True", "METHOD.MATCHER.RAMP", "0.5"),
    ),
    "per class": (
        *("METHOD.PSEUDO.SELECT", "per_class", "METHOD.PSEUDO.SCORE", "0.4"),
        *("METHOD.PSEUDO.SOFT", "False", "METHOD.PSEUDO.CALIBRATED", "True"),
        *("METHOD.AVERAGE.ENABLED", "True"),
    ),
    "rank": (*PLAIN, "METHOD.DISTILL.ENABLED", "True", "METHOD.DISTILL.LOSS", "rank"),
    "topology": (*PLAIN, "METHOD.DISTILL.ENABLED", "True", "METHOD.DISTILL.LOSS", "topology"),
    "ERD": (*PLAIN, "METHOD.DISTILL.ENABLED", "True", "METHOD.DISTILL.LOSS", "erd"),
    "LwF": (*PLAIN, "METHOD.DISTILL.ENABLED", "True", "METHOD.DISTILL.LOSS", "lwf"),
}
SHORT = "SCHEDULE.FIRST.MAX_STEPS 2 SCHEDULE.TRAIN.MAX_STEPS 2 SCHEDULE.CALIBRATE.MAX_STEPS 2"
MODELS = {  # built, not trained
    "DETR": ("MODEL.META_ARCHITECTURE", "DETR", "MODEL.DETR.IN_FEATURES", "[res5]"),
    "two stages": ("MODEL.DETR.TWO_STAGE", "True"),
    "Hugging Face": (
        *("MODEL.META_ARCHITECTURE", "HuggingFaceDetector", "INPUT.MIN_SIZE_TRAIN", "[0]"),
        *("MODEL.HUGGINGFACE.NAME", "{hugging_face}"),
    ),
}


@pytest.fixture(scope="module")
def read(tiny_config, tmp_path_factory):
    """Every key that the variants read."""
    found = set()
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        watch_fields(patch, found)
        for name, more in VARIANTS.items():
            cfg = tiny_config(folder / name, *SHORT.split(), *more)
            found |= keys_of_run(cfg, eval_only=False)
        found |= keys_of_run(cfg, eval_only=True)
        detector = ("MODEL.DETECTOR", str(folder / "plain" / "phase1/train/model.pth"))
        more = (*detector, "SCENARIO.PROTOCOL", "extend")
        cfg = tiny_config(folder / "extended", *SHORT.split(), *more)
        found |= keys_of_run(cfg, eval_only=False)
    save_hugging_face("deformable_detr", folder / "hugging_face")
    for more in MODELS.values():
        more = [word.format(hugging_face=folder / "hugging_face") for word in more]
        cfg = tiny_config(folder / "none", "MODEL.DETR.NUM_CLASSES", "4", *more)
        watched, keys = watch_keys(cfg)
        build_model(watched)
        found |= keys
    return found


def keys_of_run(cfg, eval_only):
    """Runs what `train_net.py` runs; returns the keys that were read from the config."""
    watched, found = watch_keys(cfg)
    args = default_argument_parser().parse_args(["--eval-only"] if eval_only else [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load_config", lambda *_: watched)
        # Checks look at all keys; only what uses them counts.
        patch.setattr(trainer, "check_keys", lambda *_, **__: None)
        patch.setattr(trainer, "check_wandb", lambda _: None)  # without it, nothing is sent
        patch.setattr(trainer, "check_model_keys", lambda _, keys: found.update(keys))
        train.main(args)
    return found


def keys_by_field(cls, path):
    """Yields (dataclass, field, key) for a settings dataclass and those in it."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = f"{path}.{field.name.upper()}", hints[field.name]
        inner = [*filter(dataclasses.is_dataclass, typing.get_args(hint) or [hint])]
        yield cls, field.name, f"{key}.ENABLED" if inner else key
        for each in inner:
            yield from keys_by_field(each, key)


def watch_fields(patch, found):
    """Notes as keys which fields of the settings the package reads, other than to check them."""
    keys = defaultdict(lambda: defaultdict(set))
    for section, top in SETTINGS.items():
        for cls, name, key in keys_by_field(top, section):
            keys[cls][name].add(key)
    for cls, names in keys.items():

        def watching(self, name, names=names):
            code = sys._getframe(1).f_code
            used = code.co_name not in ("__post_init__", "add_keys")
            if used and name in names and code.co_filename.startswith(PACKAGE):
                found.update(names[name])
            return object.__getattribute__(self, name)

        patch.setattr(cls, "__getattribute__", watching, raising=False)


def changed(key):
    """The defaults with another value of one key."""
    cfg = default_config()
    *parents, leaf = key.split(".")
    node = cfg
    for parent in parents:
        node = node[parent]
    node[leaf] = other_value(key, node[leaf])
    return cfg


def other_value(key, value):
    """Another value of the same type."""
    words = {"METHOD.UNSEEN": "negative", "SCENARIO.PROTOCOL": "traditional"}
    words |= {"METHOD.PSEUDO.SELECT": "all", "METHOD.CALIBRATE.COMPLETE.SELECT": "all"}
    words |= {"METHOD.DISTILL.LOSS": "erd", "METHOD.DISTILL.NORMALISER": "images"}
    words |= {"SOLVER.AMP.DTYPE": "float16", "SCENARIO.PHASES": [["a"], ["b"]]}
    words |= {"SCENARIO.KNOWN": "refresh"}
    words |= {"SCHEDULE.TRAIN.DROPS": [1.0], "SCHEDULE.CALIBRATE.DROPS": [1.0]}
    if key in words:
        return words[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value / 2 if isinstance(value, float) and value else value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, (list, tuple)):
        return type(value)([*value, *value] or [1])
    return 1


def refusal(check, *inputs):
    """What a check says; empty where it lets a config pass."""
    try:
        check(*inputs)
    except InputError as error:
        return str(error)
    return ""


def ignored_keys(keys, read):
    """Keys that are neither read nor refused."""
    found = []
    for key in keys:
        cfg = changed(key)
        said = refusal(check_keys, cfg) + refusal(check_model_keys, cfg, read)
        if key not in read and f"{key} is " not in said and f"{key} takes " not in said:
            found.append(key)
    return found


KEYS = [key for key, _ in leaves(default_config())]


def test_every_key_is_obeyed_or_refused(read):
    assert ignored_keys(KEYS, read) == ["VERSION"]  # the format of the file


def test_a_key_that_nobody_reads_is_found(read):
    obeyed = {"SOLVER.BASE_LR", "METHOD.PSEUDO.IOU", "LOG_PERIOD"}
    assert obeyed <= read
    assert ignored_keys(sorted(obeyed), read - obeyed) == sorted(obeyed)


OWN = ("MODEL.DETR.", "MODEL.HUGGINGFACE.", "MODEL.SMALL_RESNET.")


def test_every_model_key_of_this_project_is_read_by_some_model(read):
    own = [key for key in KEYS if key.startswith(OWN)]
    assert len(own) > 20
    assert [key for key in own if key not in read] == []


def test_no_key_is_refused_and_read(read):
    refused = [key for key in KEYS if f"{key} is not used: " in refusal(check_keys, changed(key))]
    assert len(refused) > 20
    assert {*refused} & read == SET_BY_TRAINER


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_of_the_identity_unless_it_may_change(key):
    before, after = identity(default_config()), identity(changed(key))
    of_stage = key.startswith("STAGE.")
    assert (before == after) == (key in RUNTIME_KEYS or of_stage)
