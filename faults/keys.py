"""Each key of the configuration changed in turn on resume.

The keys are those of the full configuration, found by walking it, so that a new key has to take its
place here. A key that decides the numbers of a run must be refused with a message that shows both
values; one that does not must pass. What decides the numbers is found by watching: every key that
is read to make the recipe or to build the model, and is not listed as harmless below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from cldetr.engine.from_yaml import recipe_from_cfg
from cldetr.engine.recipe import check_identity
from detectron2.config import CfgNode

from cldetr.config import leaves, load_config
from cldetr.errors import InputError
from faults import tiny
from faults.tally import Options, Tally

# What a run may be resumed with, changed: where, on what, how often it looks and tells.
HARMLESS = {
    *("OUTPUT_DIR", "MODEL.DEVICE", "DATALOADER.NUM_WORKERS", "LOG_PERIOD"),
    *("SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD", "TEST.JOINT_RESULTS"),
    *("LOG_IMAGES", "REPORT"),
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
}


def run(options: Options) -> Tally:
    """Changes every key once."""
    tally = Tally("keys")
    base = load_config(str(tiny.CONFIG), [*EVERYTHING_ON, "OUTPUT_DIR", str(options.work)])
    keys = dict(leaves(base))
    with _watching(base) as read:
        stored = recipe_from_cfg(base).identity()
        recipe_from_cfg(base).model.build(4)
    for key, value in keys.items():
        cfg = base.clone()
        *parents, leaf = key.split(".")
        node = cfg
        for parent in parents:
            node = node[parent]
        node[leaf] = _other(key, value)
        try:
            check_identity(stored, recipe_from_cfg(cfg))
            said = ""
        except InputError as error:
            said = str(error)
        if key in HARMLESS:
            tally.check("harmless keys pass", not said, f"{key}: {said}")
        elif key in read:
            if said and "this directory holds another run" not in said:
                tally.check("keys whose other value contradicts the rest are refused", True)
                continue
            shown = "was" in said and "now" in said
            tally.check("keys of a run's identity are refused with a diff", shown, f"{key}: {said}")
        else:
            tally.check("keys that nothing reads", True)
    return tally


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


@contextlib.contextmanager
def _watching(cfg: CfgNode) -> Iterator[set[str]]:
    """Collects the keys that are read from a config and its clones, one by one or all at once."""
    read: set[str] = set()
    _name(cfg, "")
    usual = CfgNode.__getattr__, CfgNode.items
    clone = CfgNode.clone
    copying: list[bool] = []

    def one(self: CfgNode, name: str) -> Any:
        value = usual[0](self, name)
        if not isinstance(value, CfgNode) and "_path" in self.__dict__:
            read.add(f"{self.__dict__['_path']}{name}")
        return value

    def every(self: CfgNode) -> Any:
        if "_path" in self.__dict__ and not copying:
            path = self.__dict__["_path"]
            read.update(f"{path}{key}" for key in self if not isinstance(self[key], CfgNode))
        return usual[1](self)

    def copied(self: CfgNode) -> CfgNode:
        copying.append(True)  # a copy looks at everything
        try:
            return clone(self)
        finally:
            copying.pop()

    CfgNode.__getattr__, CfgNode.items, CfgNode.clone = one, every, copied
    try:
        yield read
    finally:
        CfgNode.__getattr__, CfgNode.clone = usual[0], clone
        del CfgNode.items


def _name(node: CfgNode, path: str) -> None:
    """Notes on every node where it is; copies of it know it too."""
    node.__dict__["_path"] = path
    for key, value in node.items():
        if isinstance(value, CfgNode):
            _name(value, f"{path}{key}.")
