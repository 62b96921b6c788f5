"""Weights on disk: written whole, checked by digest, loaded without executing anything."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cldetr.errors import InputError
from cldetr.files import atomic_path, sha256_file, write_json

logger = logging.getLogger(__name__)

_KEEP = 2  # checkpoints of a stage that are kept: the newest and one to fall back on


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint found on disk."""

    step: int
    path: Path
    state: dict[str, Any]


def save_state(path: Path, state: Mapping[str, Any]) -> str:
    """Writes a dictionary of tensors and plain data atomically; returns the file's SHA-256.

    Where the disk is full or broken, the partial file is removed and older ones stay.
    """
    try:
        with atomic_path(path) as partial:
            torch.save(dict(state), partial)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
        raise InputError(
            f"cannot write {path}: {str(error).splitlines()[0]}. What was saved before is kept; "
            "make room on the disk and go on with --resume"
        ) from error
    return sha256_file(path)


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a `.pth` or `.pkl` file of tensors and plain data; code in it is refused."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no checkpoint at {path}")
    try:
        if path.suffix == ".pkl":
            with open(path, "rb") as stream:
                state = _ArrayUnpickler(stream, encoding="latin1").load()
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise InputError(f"cannot load {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise InputError(f"{path} holds a {type(state).__name__}, not a checkpoint's dictionary")
    return state


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Saves the state after `step` steps beside older ones, then removes the oldest.

    The digest is written last: a checkpoint without one did not happen.
    """
    path = folder / f"step_{step:08d}.pth"
    digest = save_state(path, state)
    write_json(path.with_suffix(".json"), {"step": step, "sha256": digest})
    for old in sorted(folder.glob("step_*.json"))[:-_KEEP]:
        old.unlink()
        old.with_suffix(".pth").unlink(missing_ok=True)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """Loads the newest whole checkpoint of a stage; None where the stage never saved one.

    A damaged checkpoint is passed over with a warning that says how many steps are lost. When all
    are damaged this stops: starting the stage anew is the user's decision.
    """
    marks = sorted(folder.glob("step_*.json"), reverse=True)
    damaged: list[str] = []
    newest = _step_of(marks[0]) if marks else 0
    for mark in marks:
        path = mark.with_suffix(".pth")
        try:
            stored = json.loads(mark.read_text(encoding="utf-8"))
            if stored["sha256"] != sha256_file(path):
                raise InputError(f"{path.name} is damaged: its checksum differs")
            state = load_state(path)
        except (InputError, OSError, ValueError, KeyError, TypeError) as error:
            damaged.append(f"{path.name}: {error}")
            continue
        if damaged:
            logger.warning(
                "%s; going back to step %d, %d steps are lost",
                "; ".join(damaged),
                stored["step"],
                newest - stored["step"],
            )
        return Checkpoint(int(stored["step"]), path, state)
    if damaged:
        raise InputError.listing(
            f"no checkpoint in {folder} can be read (delete the folder to train the stage anew):",
            damaged,
        )
    return None


def load_into(model: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Loads weights that must fit exactly; names what does not."""
    current = model.state_dict()
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


def _step_of(mark: Path) -> int:
    return int(mark.stem.removeprefix("step_"))


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
