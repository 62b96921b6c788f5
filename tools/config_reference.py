"""Prints docs/configuration.md: every key, its default and what it does.

    python tools/config_reference.py > docs/configuration.md

Descriptions come from the declarations: the `Attributes` sections of the settings dataclasses and
the comments in `cldetr/config.py` and `cldetr/modeling/config.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from detectron2.config import get_cfg

from cldetr import config, lazy
from cldetr.config import RUNTIME_KEYS, default_config, leaves
from cldetr.data.exemplars import STRATEGIES
from cldetr.methods.distill import LOSSES
from cldetr.methods.method import CLDETR, Method
from cldetr.methods.pseudo import SELECTIONS
from cldetr.modeling.config import add_model_config
from cldetr.settings import EarlyStop, ScenarioSettings, Schedule, StageSchedule

HEAD = """\
# Configuration keys

Printed by `python tools/config_reference.py`; a test compares it with this page.

The keys are Detectron2's `get_cfg()` and those of this project. Set them in a YAML file, or as
`KEY VALUE` at the end of a command line. In a LazyConfig the settings are lower-case fields:
`METHOD.PSEUDO.K` is `method.pseudo.k`. An unknown key, or one that nothing would obey, is an error.
Keys marked ° may change when a run is resumed; all others are part of the run's identity.

## Phases

There are three ways to say which classes and images each phase gets:

1. **By number.** `SCENARIO.NAME 70+10` divides the classes of the one data set in
   `DATASETS.TRAIN`, in the order that `SCENARIO.ORDER` gives. `40+20x2` is 40 classes, then two
   phases of 20. A published scenario, such as `SCENARIO.NAME voc/19+1`, has its own classes in each
   phase and its own protocol ([scenarios.md](scenarios.md)).
2. **By name.** `SCENARIO.PHASES` lists the categories of each phase as the annotation file spells
   them. Every category of the file must be in exactly one phase, unless `SCENARIO.PARTIAL` allows
   some to be in none. `NAME`, `ORDER` and `CLASS_SEED` are then ignored:

   ```yaml
   DATASETS: {TRAIN: ["train.json:images"], TEST: ["test.json:images"]}
   SCENARIO:
     PHASES:
       - [car, bus, truck]
       - [bicycle]
   ```

   On a command line: `SCENARIO.PHASES "[[car, bus, truck], [bicycle]]"`.
3. **By data set.** With several entries in `DATASETS.TRAIN` each is a phase with images of its own.
   Categories are matched by name; each is learnt in the first data set that has an object of it.
   `NAME`, `PHASES`, `ORDER`, `CLASS_SEED` and `PARTIAL` are then ignored.
   `SCENARIO.PROTOCOL domains` makes each data set a domain with the same categories; `extend` adds
   their categories to `MODEL.DETECTOR`.

With the first two, `SCENARIO.PROTOCOL` divides the images. `strict` shuffles them by `DATA_SEED`
and gives each to one phase, in proportion to the phases' class counts. `traditional` gives a phase
all images with an object of its classes. `loco` gives an image to one of the phases that it shows
objects of. `cldetr split` shows the result before training.
"""

# Detectron2's keys have no comment of ours; these say what matters here.
OTHERS = {
    "DATASETS.TEST": "as `TRAIN`; all entries are evaluated together",
    "SOLVER.BASE_LR": "learning rate of AdamW",
    "SOLVER.GAMMA": "factor on the learning rate at each epoch of `SCHEDULE.*.DROPS`",
    "SOLVER.WEIGHT_DECAY": "of AdamW; `WEIGHT_DECAY_NORM`, `WEIGHT_DECAY_BIAS` and "
    "`BIAS_LR_FACTOR` as in Detectron2",
    "SOLVER.WARMUP_ITERS": "steps of warm-up in every stage",
    "SOLVER.LR_SCHEDULER_NAME": "or `WarmupCosineLR`",
    "SOLVER.CLIP_GRADIENTS.ENABLED": "clip gradients",
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": "or `value`, with `FULL_MODEL False`",
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": "the largest norm, or value",
    "SOLVER.AMP.ENABLED": "mixed precision",
    "SOLVER.BACKBONE_MULTIPLIER": "factor on the learning rate of the backbone",
    "SOLVER.LR_MULTIPLIERS": "[text, factor]: on the learning rate of parameters whose names "
    "contain the text",
    "SOLVER.CHECKPOINT_PERIOD": "steps between checkpoints of a stage",
    "INPUT.FORMAT": "channel order of the model's input",
    "INPUT.RANDOM_FLIP": "`horizontal`, `vertical` or `none`",
    "INPUT.MIN_SIZE_TRAIN": "short sides to choose from; `[0]` keeps the size",
    "INPUT.MAX_SIZE_TRAIN": "limit of the long side",
    "INPUT.MIN_SIZE_TEST": "short side at test time; 0 keeps the size",
    "INPUT.MAX_SIZE_TEST": "limit of the long side at test time",
    "INPUT.CROP.ENABLED": "resize, crop and resize again, as DETR does",
    "INPUT.CROP.TYPE": "the only one",
    "INPUT.CROP.SIZE": "smallest and largest side of the crop",
    "INPUT.CROP.PROBABILITY": "how often an image is cropped",
    "TEST.DETECTIONS_PER_IMAGE": "limit of detections",
    "TEST.EVAL_PERIOD": "steps between evaluations within a stage; 0: at the end of a phase only",
    "TEST.EXPECTED_RESULTS": "as in Detectron2, checked by `--eval-only`",
    "DATALOADER.NUM_WORKERS": "processes that load images, for each training process",
    "MODEL.META_ARCHITECTURE": "`DeformableDETR`, `DETR` or one of your own",
    "MODEL.BACKBONE.NAME": "`build_resnet_backbone`, `build_small_resnet_backbone` or any other "
    "in `BACKBONE_REGISTRY`",
    "MODEL.BACKBONE.FREEZE_AT": "stages of the backbone that are not trained",
    "MODEL.WEIGHTS": "initial weights: of a backbone or of a detector",
    "MODEL.DEVICE": "`cuda` or `cpu`",
    "MODEL.DETR.HEADS": "attention heads",
    "MODEL.DETR.ENC_LAYERS": "encoder layers",
    "MODEL.DETR.DEC_LAYERS": "decoder layers",
    "MODEL.DETR.FFN_DIM": "width of the feed-forward layers",
    "MODEL.DETR.DROPOUT": "in the transformer",
    "MODEL.DETR.DEC_POINTS": "sampled points per head and level in the decoder",
    "MODEL.DETR.LOSS.CLASS_WEIGHT": "of the class loss",
    "MODEL.DETR.LOSS.BOX_WEIGHT": "γ_2, of the L1 loss",
    "MODEL.DETR.LOSS.GIOU_WEIGHT": "γ_1, of the IoU loss",
    "MODEL.DETR.LOSS.FOCAL_GAMMA": "exponent of the focal loss",
    "MODEL.DETR.COST.CLASS": "of the class",
    "MODEL.DETR.COST.BOX": "of the L1 distance",
    "MODEL.DETR.COST.GIOU": "of the generalised IoU",
    "MODEL.SMALL_RESNET.CHANNELS": "of each stage, finest first",
    "OUTPUT_DIR": "the run directory",
    "SEED": "of all that is random",
    "LOG_PERIOD": "steps between lines of the log and of `metrics.json`",
    "CUDNN_BENCHMARK": "as in Detectron2",
}
CHOICES: dict[str, Mapping[str, Any]] = {  # keys whose values are words of a table
    "PSEUDO.SELECT": SELECTIONS,
    "DISTILL.LOSS": LOSSES,
    "MEMORY.STRATEGY": STRATEGIES,
}
SECTIONS = {
    "Data": ("DATASETS.", "INPUT.", "DATALOADER."),
    "Training": ("SOLVER.", "FLOAT32_"),
    "Model": ("MODEL.",),
    "Evaluation and run": (
        "TEST.",
        "OUTPUT_DIR",
        "SEED",
        "LOG_",
        "VIS_",
        "WANDB.",
        "REPORT",
        "CUDNN_",
    ),
    "Set by the trainer": ("STAGE", "LAZY"),
}


def comments(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """Yields (key, comment) for the assignments of keys in a function's source."""
    source = textwrap.dedent(inspect.getsource(function))
    lines = source.splitlines()
    names = {"cfg": ""}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.Assign):
            continue
        target, value = ast.unparse(node.targets[0]), ast.unparse(node.value)
        if "." not in target:  # solver = cfg.SOLVER
            names[target] = _full(value, names) + "." if "." in value else ""
            continue
        above = node.lineno - 2
        while lines[above].lstrip().startswith("#"):
            above -= 1
        found = [line.strip().lstrip("# ") for line in lines[above + 1 : node.lineno - 1]]
        _, _, trailing = lines[node.end_lineno - 1].partition("  # ")  # type: ignore[operator]
        if found and found[-1].endswith("."):
            trailing = trailing[:1].upper() + trailing[1:]
        yield _full(target, names), " ".join([*found, trailing]).strip(" …")


def _full(target: str, names: dict[str, str]) -> str:
    first, _, rest = target.partition(".")
    return names[first] + rest


def attributes(cls: type) -> dict[str, str]:
    """The `Attributes` section of a dataclass's docstring: field → description."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(description.split()) for name, description in entries}


def settings_rows(settings: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yields (key, default, description) for a settings dataclass and those in it."""
    hints = typing.get_type_hints(type(settings))
    about = attributes(type(settings))
    for field in dataclasses.fields(settings):
        key, value = f"{path}.{field.name.upper()}", getattr(settings, field.name)
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        kind = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        if kind is None:
            yield key, value, _with_choices(key, about[field.name])
            continue
        if type(None) in kinds:
            description = about[field.name].replace(", or None", "").replace("None is", "False is")
            yield f"{key}.ENABLED", value is not None, description
        inner = value or field.metadata.get("enabled", kind)()
        if path == "METHOD.CALIBRATE":  # the keys of METHOD.PSEUDO again
            changed = [
                f"`{other.name.upper()} {getattr(inner, other.name)}`"
                for other in dataclasses.fields(inner)
                if getattr(inner, other.name) != other.default
            ]
            yield f"{key}.*", None, f"as `METHOD.PSEUDO.*`; defaults: {', '.join(changed)}"
        else:
            yield from settings_rows(inner, key)


def _with_choices(key: str, description: str) -> str:
    for suffix, table in CHOICES.items():
        if key.endswith(suffix):
            return f"one of {', '.join(f'`{word}`' for word in table)} ([more](methods.md))"
    return description


def schedule_rows() -> Iterator[tuple[str, Any, str]]:
    """One row for each key of a stage, with the defaults of all three, and the early stop's."""
    schedule = Schedule()
    stages = {name: getattr(schedule, name) for name in ("first", "train", "calibrate")}
    for name, description in attributes(StageSchedule).items():
        values = ", ".join(f"{k} {_show(getattr(stage, name))}" for k, stage in stages.items())
        yield f"SCHEDULE.*.{name.upper()}", f"({values})", description
    key, summary = (
        "SCHEDULE.EARLY_STOP",
        inspect.cleandoc(EarlyStop.__doc__ or "").partition("\n")[0],
    )
    yield f"{key}.ENABLED", schedule.early_stop is not None, summary
    for name, description in attributes(EarlyStop).items():
        yield f"{key}.{name.upper()}", getattr(EarlyStop(), name), description


def config_rows() -> dict[str, tuple[Any, str]]:
    """Key → (default, description) for all keys outside of the settings dataclasses."""
    written = {
        key: text
        for function in (config.add_cldetr_config, config.add_output_config, add_model_config)
        for key, text in comments(function)
    }
    stock, ours = dict(leaves(get_cfg())), dict(leaves(default_config()))
    kept = {
        key: value
        for key, value in ours.items()
        if not key.startswith(("SCENARIO.", "METHOD.", "SCHEDULE."))
        and (key in OTHERS or key in written or key not in stock)
        and (key not in config._UNUSED or key.startswith("STAGE"))
    }
    rows: dict[str, tuple[Any, str]] = {}
    for key, value in kept.items():
        parent = key.rpartition(".")[0]
        if written.get(parent) and f"{parent}.*" not in rows:
            rows[f"{parent}.*"] = (None, written[parent])
        description = OTHERS.get(key) or written.get(key) or ""
        if not description and key not in stock:
            raise SystemExit(f"{key} has no description: add a comment where it is declared")
        if description:
            rows[key] = (value, description)
    rows["LAZY.*"] = (None, written["LAZY"])
    return rows


def _show(value: Any) -> str:
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, bool | int | float) or value is None:
        return "" if value is None else str(value)
    return json.dumps(value, ensure_ascii=False)


def _table(rows: Iterator[tuple[str, Any, str]]) -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, value, description in rows:
        mark = "°" if key in RUNTIME_KEYS else ""
        shown = f"`{_show(value)}`" if _show(value) else ""
        text = description.rstrip(".").replace("|", "\\|")
        text = re.sub(r"^(?:[a-z]{2,}|a)(?=[ ,:;])", lambda word: word[0].capitalize(), text)
        lines.append(f"| `{key}`{mark} | {shown} | {text} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    parts = [HEAD, _table(settings_rows(ScenarioSettings(), "SCENARIO"))]
    parts += ["## Method\n", inspect.cleandoc(Method.__doc__ or "").partition("\n")[0] + "\n"]
    parts += [_table(settings_rows(CLDETR, "METHOD"))]
    parts += [
        "## Schedule\n",
        "`SCHEDULE.FIRST` is the first phase, `TRAIN` and `CALIBRATE` the two steps of every later "
        "one.\n",
        _table(schedule_rows()),
    ]
    rows = config_rows()
    for title, prefixes in SECTIONS.items():
        chosen = [(key, *row) for key, row in rows.items() if key.startswith(prefixes)]
        parts += [f"## {title}\n", _table(iter(chosen))]
    missing = [key for key in rows if not key.startswith(sum(SECTIONS.values(), ()))]
    if missing:
        raise SystemExit(f"no section has {', '.join(missing)}")
    refused = ["| key | instead | allowed where you override |", "|---|---|---|"]
    refused += [
        f"| `{key}` | {instead} | {f'`{method}`' if method else ''} |"
        for key, (instead, method) in config._UNUSED.items()
        if not key.startswith("STAGE")
    ]
    lazy_names = ["| LazyConfig | key |", "|---|---|"]
    lazy_names += [f"| `{name}` | `{key}` |" for name, key in lazy._KEYS.items()]
    renamed = ["| before | now |", "|---|---|"]
    renamed += [f"| `{old}` | {new} |" for old, new in config._RENAMED.items()]
    parts += [
        "## Detectron2's keys that are refused\n",
        "Setting one of these to anything but its default is an error. All other keys mean what "
        "they mean in Detectron2. A key under `MODEL` that the chosen model does not read is an "
        "error, too.\n",
        "\n".join(refused) + "\n",
        "## Names in a LazyConfig\n",
        "Beside `scenario`, `method`, `schedule`, `input`, `datasets`, `solver`, `test` and "
        "`dataloader`, whose fields are the keys above in lower case:\n",
        "\n".join(lazy_names) + "\n",
        "## Renamed keys\n",
        "\n".join(renamed) + "\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
