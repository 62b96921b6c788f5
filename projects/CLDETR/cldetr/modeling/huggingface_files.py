"""Folders and hub names of Hugging Face: settings, labels and weights of their detectors.

Nothing of a hub is executed: `trust_remote_code` is never set, and weights are safetensors.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cldetr.errors import InputError

# Set predictors by transformers' name of the model: whether the class head is a softmax with a row
# for no-object, and whether query j means the same on every image.
SET_PREDICTORS = {
    "deformable_detr": (False, True),  # without its two stages
    "detr": (True, True),
    "conditional_detr": (False, True),
    "dab-detr": (False, True),
    "table-transformer": (True, True),
    "yolos": (True, True),
    "rt_detr": (False, False),
    "rt_detr_v2": (False, False),
    "d_fine": (False, False),
    "deimv2": (False, False),
    "rf_detr": (False, False),
    "lw_detr": (False, False),
}
UNNAMED = ("N/A", "")  # labels of rows that stand for no category, as in COCO's 91 ids


def library() -> Any:
    """The package transformers, imported when it is needed: it is optional and slow to import."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"HuggingFaceDetector needs transformers ({error}): pip install 'cldetr[hf]'"
        ) from None
    return transformers


def describe_source(name: str) -> str:
    """The settings of a model and of its image processor, as JSON: all but the weights.

    Args:
        name: a folder that `save_pretrained` wrote, or a name on the hub.
    """
    transformers = library()
    if not name:
        raise InputError("set MODEL.HUGGINGFACE.NAME to a folder of save_pretrained or a hub name")
    config = _from_pretrained(transformers.AutoConfig, name, "model")
    check_architecture(config, name)
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(
            name, trust_remote_code=False, local_files_only=Path(name).is_dir()
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name} has no image processor (preprocessor_config.json), which says how images are "
            "resized and normalised: save the one that the model was trained with beside it, "
            f"AutoImageProcessor.from_pretrained(…).save_pretrained({name!r}) "
            f"({_first_line(error)})"
        ) from None
    description = {
        "model": plain_settings(config),
        "processor": processor.to_dict(),
        "tied": _tied(_load(name)[0] if _has_weights(name) else build_from_config(config)),
    }
    return json.dumps(description, sort_keys=True)


def plain_settings(config: Any) -> dict[str, Any]:
    """The settings of a model, without where and with what they were written."""
    settings = config.to_dict()
    return {k: v for k, v in settings.items() if k not in ("transformers_version", "_name_or_path")}


def read_description(text: str) -> tuple[Any, Any, dict[str, str]]:
    """The config, the image processor and the shared weights of `describe_source`."""
    transformers = library()
    try:
        content = json.loads(text)
        parts = {"config.json": content["model"], "preprocessor_config.json": content["processor"]}
        tied = dict(content["tied"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"MODEL.HUGGINGFACE.CONFIG is damaged ({error}): remove it, it follows from NAME"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        for name, part in parts.items():
            (Path(folder) / name).write_text(json.dumps(part))
        config = _from_pretrained(transformers.AutoConfig, folder, "model")
        check_architecture(config, "MODEL.HUGGINGFACE.CONFIG")
        processor = _from_pretrained(transformers.AutoImageProcessor, folder, "processor")
    return config, processor, tied


def read_weights(name: str, allow_pickle: bool = False) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of a folder or hub name under the names of `HuggingFaceDetector`.

    Args:
        name: a folder that `save_pretrained` wrote, or a name on the hub.
        allow_pickle: load a pickle where there are no safetensors.

    Returns:
        the weights, and the label of each row of the class head.
    """
    pickles = [*Path(name).glob("*.bin"), *Path(name).glob("*.pt")]
    if not _has_weights(name) and not (allow_pickle and pickles):
        if not pickles:
            raise InputError(f"{name} holds no weights (model.safetensors)")
        raise InputError(
            f"{name} holds its weights as a pickle only ({pickles[0].name}), and a pickle can run "
            "code: convert it where you trust it, AutoModelForObjectDetection.from_pretrained("
            f"{name!r}).save_pretrained({name!r}), or set MODEL.HUGGINGFACE.ALLOW_PICKLE to True"
        )
    model, info = _load(name, allow_pickle)
    config = model.config
    problems = [
        f"{entry[0]}: the weights have {tuple(entry[1])}, {config.num_labels} labels make "
        f"{tuple(entry[2])}"
        for entry in info["mismatched_keys"]
    ]
    if problems:
        raise InputError.listing(
            f"{name}: the weights do not fit config.json (set its id2label to the labels that the "
            "class head was trained with):",
            problems,
        )
    if info["missing_keys"]:
        raise InputError.listing(
            f"{name} lacks weights of the model:", sorted(info["missing_keys"]), 10
        )
    return {f"model.{key}": value for key, value in model.state_dict().items()}, labels_of(config)


def _has_weights(name: str) -> bool:
    """Whether there are safetensors; those of a name on the hub are looked for when needed."""
    return not Path(name).is_dir() or any(Path(name).glob("*.safetensors"))


def _load(name: str, allow_pickle: bool = False) -> tuple[Any, dict[str, Any]]:
    """A model with its weights, and what transformers says about loading them."""
    transformers = library()
    check_architecture(_from_pretrained(transformers.AutoConfig, name, "model"), name)
    with _quiet(transformers):
        return _from_pretrained(
            transformers.AutoModelForObjectDetection,
            name,
            "weights",
            use_safetensors=None if allow_pickle else True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
        )


def _tied(model: Any) -> dict[str, str]:
    """Names of weights → names of those that they are one with.

    The decoder's heads are those of the model: where their values are equal, they are one as well.
    """
    first: dict[Any, str] = {}
    tied = {}
    parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        twin = parameters.get(name.removeprefix("model.decoder."), parameter)
        if twin is not parameter and twin.equal(parameter):
            parameter = twin
        if first.setdefault(parameter, name) != name:
            tied[name] = first[parameter]
    return tied


def folder_of(name: str) -> Path | None:
    """The folder of a model of transformers: one that is given, or a name's on the hub.

    None for anything else: a file, a path that is not there.
    """
    path = Path(name)
    if path.is_dir():
        return path if (path / "config.json").is_file() else None
    if path.exists() or path.suffix or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception:  # no network, no such name, no such package: it is not there
        return None


def folder_state(folder: Path) -> dict[str, Any]:
    """A folder as a weights file of ours would have it: weights, and what they are of."""
    weights, labels = read_weights(str(folder))
    named = [label for label in labels if label not in UNNAMED]
    twice = sorted({label for label in named if named.count(label) > 1})
    if twice:
        raise InputError(
            f"{folder}: id2label in config.json has {', '.join(map(repr, twice))} twice: give each "
            "row of the class head a name of its own"
        )
    settings = {
        "META_ARCHITECTURE": "HuggingFaceDetector",
        "HUGGINGFACE.CONFIG": describe_source(str(folder)),
    }
    categories = [{"id": row, "name": label} for row, label in enumerate(labels)]
    return {
        "model": weights,
        "cldetr": {"categories": categories, "seen": named, "settings": settings},
    }


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a folder, by name."""
    return sorted(folder.glob("*.safetensors"))


def labels_of(config: Any) -> list[str]:
    """The label of each row of the class head, `UNNAMED` for those without one."""
    return [str(config.id2label.get(row, "")) for row in range(config.num_labels)]


def with_labels(config: Any, labels: Sequence[str]) -> Any:
    """The config with other labels."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: row for row, label in enumerate(labels)}
    return config


def build_from_config(config: Any, tied: Mapping[str, str] | None = None) -> Any:
    """A model with random weights.

    Args:
        config: its settings.
        tied: which weights are one, as `_tied` says. Left to themselves, some models tie all heads,
            and untie them only when a checkpoint has different ones.
    """
    transformers = library()
    if tied is not None and hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = False
    try:
        auto = transformers.AutoModelForObjectDetection
        model = auto.from_config(config, trust_remote_code=False)
    except (ImportError, ValueError) as error:
        raise InputError(f"cannot build {config.model_type}: {_first_line(error)}") from error
    for name, source in (tied or {}).items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, model.get_parameter(source))
    return model


def check_architecture(config: Any, name: str) -> None:
    """Refuses a model that does not predict a set of boxes."""
    if config.model_type not in SET_PREDICTORS:
        raise InputError(
            f"{name} is a {config.model_type}, which is no detector that predicts a set of boxes "
            f"with class scores: take one of {', '.join(sorted(SET_PREDICTORS))}"
        )


def _from_pretrained(kind: Any, name: str, what: str, **options: Any) -> Any:
    """`from_pretrained` that never runs code of the source and asks no hub about a folder."""
    try:
        return kind.from_pretrained(
            name, trust_remote_code=False, local_files_only=Path(name).is_dir(), **options
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"cannot read the {what} of {name}: {_first_line(error)} (give a folder that "
            "save_pretrained wrote, or the name of a model on the hub)"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silences the bar and the report of loading: what the report says we check."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
