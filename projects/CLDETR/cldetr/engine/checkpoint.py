"""Weights on disk: written whole, checked by digest, loaded without executing anything."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.checkpoint import DetectionCheckpointer
from torch import Tensor, nn

from cldetr.errors import InputError
from cldetr.files import atomic_path, sha256_file
from cldetr.modeling.huggingface_files import folder_of, folder_state

logger = logging.getLogger(__name__)

_STATE, _DIGEST = "state.pth", "digest.json"  # the files of a checkpoint
_NAME = re.compile(r"step_\d{8,}")
KEPT = 2  # checkpoints of a stage that are kept: the newest and one to fall back on


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint found on disk."""

    step: int
    path: Path
    state: dict[str, Any]


def save_state(path: Path, state: Mapping[str, Any]) -> str:
    """Writes a dictionary of tensors and plain data atomically; returns the file's SHA-256.

    The same state makes the same bytes. Where the disk is full or broken, the partial file is
    removed and older ones stay.
    """
    buffer = io.BytesIO()  # torch would turn a write that fails into an error without its reason
    torch.save(dict(state), buffer)
    with atomic_path(path) as partial:
        partial.write_bytes(buffer.getbuffer())
    return hashlib.sha256(buffer.getbuffer()).hexdigest()


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a `.pth` or `.pkl` file of tensors and plain data; code in it is refused.

    A folder of Hugging Face transformers, or a name on their hub, is read as such a file.
    """
    folder = folder_of(os.fspath(path))
    if folder is not None:
        return folder_state(folder)
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no checkpoint at {path}")
    try:
        if path.suffix == ".pkl":
            with open(path, "rb") as stream:
                state = _ArrayUnpickler(stream, encoding="latin1").load()
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises anything
        reason = str(error).partition("\n")[0]
        raise InputError(f"cannot load {path}: {type(error).__name__}: {reason}") from error
    if not isinstance(state, dict):
        raise InputError(f"{path} holds a {type(state).__name__}, not a checkpoint's dictionary")
    return state


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Saves the state after `step` steps beside older ones, then removes the oldest.

    A checkpoint is a folder with the state and its digest, there with both or not at all.
    """
    with atomic_path(folder / f"step_{step:08d}", folder=True) as partial:
        digest = save_state(partial / _STATE, state)
        (partial / _DIGEST).write_bytes(_digest_text(step, digest))
    saved = _saved(folder)
    later = [path for path in saved if _step_of(path) > step]  # damaged: they were passed over
    for old in [*later, *[path for path in saved if path not in later][:-KEPT]]:
        shutil.rmtree(old)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """Loads the newest whole checkpoint of a stage; None where the stage never saved one.

    A damaged checkpoint is passed over with a warning that says how many steps are lost. When all
    are damaged this stops: starting the stage anew is the user's decision.
    """
    saved = _saved(folder)
    damaged: list[str] = []
    for path in reversed(saved):
        step = _step_of(path)
        try:
            text = (path / _DIGEST).read_bytes()
            if text != _digest_text(step, sha256_file(path / _STATE)):
                raise InputError("damaged, its checksum differs")
            state = load_state(path / _STATE)
        except (InputError, OSError) as error:
            damaged.append(f"{path.name}: {error}")
            continue
        if damaged:
            logger.warning(
                "%s; going back to step %d, %d steps are lost",
                "; ".join(damaged),
                step,
                _step_of(saved[-1]) - step,
            )
        return Checkpoint(step, path, state)
    if damaged:
        raise InputError.listing(
            f"no checkpoint in {folder} can be read (delete the folder to train the stage anew):",
            damaged,
        )
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Loads one of the checkpoints that `latest_checkpoint` finds."""
    return Checkpoint(_step_of(path), path, load_state(path / _STATE))


class RunCheckpointer(DetectionCheckpointer):
    """Detectron2's checkpointer for hooks of the user's, such as `hooks.BestCheckpointer`.

    It saves the detector's weights with all that prediction needs, whole or not at all. The exact
    state of a stage, from which a run is resumed, is saved apart from it.
    """

    def __init__(self, model: nn.Module, save_dir: Path, meta: Mapping[str, Any]) -> None:
        super().__init__(model, str(save_dir))
        self.meta = meta

    def save(self, name: str, **kwargs: Any) -> None:
        """Writes `save_dir/name.pth`."""
        if self.save_to_disk:
            state = {"model": self.model.state_dict(), "cldetr": dict(self.meta), **kwargs}
            save_state(Path(self.save_dir) / f"{name}.pth", state)


def load_into(model: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Loads weights that must fit exactly; names what does not."""
    current = model.state_dict()
    if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
        raise InputError(f"{origin} does not hold weights")
    optional = getattr(model, "optional_keys", ())
    state = {**{key: current[key] for key in optional}, **state}
    problems = [f"missing: {key}" for key in current if key not in state]
    problems += [f"unexpected: {key}" for key in state if key not in current]
    problems += [
        f"{key}: expected {tuple(value.shape)}, found {tuple(state[key].shape)}"
        for key, value in current.items()
        if key in state and state[key].shape != value.shape
    ]
    if problems:
        raise InputError.listing(f"the weights in {origin} do not fit the model:", problems, 10)
    model.load_state_dict(state)


def finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every number is finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _saved(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; anything else in it is refused."""
    found = sorted(path for path in folder.glob("*") if not path.name.startswith("."))
    strange = [path.name for path in found if not _NAME.fullmatch(path.name)]
    if strange:
        raise InputError.listing(
            f"{folder} holds what is no checkpoint of this version (remove it; without the folder "
            "the stage is trained anew):",
            strange,
        )
    return found


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _digest_text(step: int, digest: str) -> bytes:
    return f'{{"step": {step}, "sha256": "{digest}"}}\n'.encode()


class _ArrayUnpickler(pickle.Unpickler):
    """Reads pickled dictionaries of NumPy arrays (Detectron2's model zoo) and nothing else."""

    _ALLOWED = frozenset(
        {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy.core.multiarray", "scalar"),
            ("numpy._core.multiarray", "scalar"),
            ("numpy._core.numeric", "_frombuffer"),
            ("numpy.core.numeric", "_frombuffer"),
            ("collections", "OrderedDict"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(
                f"the file asks for {module}.{name}: only plain arrays are loaded"
            )
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
            module = module.replace("numpy.core.", "numpy._core.")
        return super().find_class(module, name)
