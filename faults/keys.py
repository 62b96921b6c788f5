"""Each key of the configuration changed in turn on resume.

The keys are those of the full configuration, found by walking it, so that a new key has to take its
place here. A key that decides the numbers of a run must be refused with a message that shows both
values; one that does not, by the list below, must pass; one that nothing obeys must be refused with
what to use instead. That all others are obeyed is tested in tests/engine/test_keys.py.
"""

from __future__ import annotations

from typing import Any

from cldetr.config import check_keys, identity, leaves, load_config
from cldetr.engine.ledger import check_identity
from cldetr.errors import InputError
from faults import tiny
from faults.tally import Options, Tally

# What a run may be resumed with, changed: where, on what, how often it looks and tells.
HARMLESS = {
    *("OUTPUT_DIR", "MODEL.DEVICE", "DATALOADER.NUM_WORKERS", "CUDNN_BENCHMARK", "VERSION"),
    *("LOG_PERIOD", "LOG_IMAGES", "VIS_PERIOD", "REPORT", "SOLVER.CHECKPOINT_PERIOD"),
    *("TEST.EVAL_PERIOD", "TEST.JOINT_RESULTS", "TEST.EXPECTED_RESULTS", "TEST.CONFUSION_SCORE"),
    *("WANDB.ENABLED", "WANDB.PROJECT", "WANDB.NAME"),
}
EVERYTHING_ON = [
    *("METHOD.DISTILL.ENABLED", "True", "METHOD.CALIBRATE.COMPLETE.ENABLED", "True"),
    *("SOLVER.AMP.ENABLED", "True"),
]
OTHER_WORDS = {
    "DATASETS.BAD_BOXES": "drop",
    "INPUT.FORMAT": "BGR",
    "METHOD.CALIBRATE.COMPLETE.SELECT": "all",
    "METHOD.DISTILL.LOSS": "erd",
    "METHOD.DISTILL.NORMALISER": "images",
    "METHOD.MEMORY.STRATEGY": "random",
    "METHOD.PSEUDO.SELECT": "all",
    "METHOD.UNSEEN": "negative",
    "SCENARIO.ORDER": "seed",
    "SCENARIO.PROTOCOL": "traditional",
    "SCENARIO.PHASES": [["a"], ["b"]],
    "SOLVER.AMP.DTYPE": "float16",
    "SOLVER.LR_SCHEDULER_NAME": "WarmupCosineLR",
}


def run(options: Options) -> Tally:
    """Changes every key once."""
    tally = Tally("keys")
    base = load_config(str(tiny.CONFIG), [*EVERYTHING_ON, "OUTPUT_DIR", str(options.work)])
    stored = identity(base)
    for key, value in leaves(base):
        cfg = base.clone()
        *parents, leaf = key.split(".")
        node = cfg
        for parent in parents:
            node = node[parent]
        node[leaf] = _other(key, value)
        said = _said(check_keys, cfg)
        if said:
            told = f"{key} is not used: " in said
            kind = "that nothing obeys" if told else "whose other value contradicts the rest"
            tally.check(f"keys {kind} are refused", True)
            continue
        said = _said(check_identity, stored, identity(cfg))
        if key in HARMLESS:
            tally.check("harmless keys pass", not said, f"{key}: {said}")
        else:
            shown = f"{key}: was" in said and "now" in said
            tally.check("keys of a run's identity are refused with a diff", shown, f"{key}: {said}")
    return tally


def _said(check: Any, *inputs: Any) -> str:
    try:
        check(*inputs)
    except InputError as error:
        return str(error)
    return ""


def _other(key: str, value: Any) -> Any:
    """Another value of the same type."""
    if key in OTHER_WORDS:
        return OTHER_WORDS[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 0.5 + 0.01
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list | tuple):
        changed = [_other("", item) for item in value[:1]] + list(value[1:])
        return type(value)(changed or [1])
    return 1
