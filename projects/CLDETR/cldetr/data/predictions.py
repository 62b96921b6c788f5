"""A model's predictions on the images of a stage, computed once and stored with the run.

    FOLDER/starts.npy  scores.npy  boxes.npy  [background.npy]     plain arrays, read by mapping
    FOLDER/manifest.json                    what they are of, and their digests; written last

Shape shorthand: I images, P predictions of all images, N of one image, C classes of the model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from cldetr.errors import InputError
from cldetr.files import atomic_path, sha256_file, write_json

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True)
class ImagePredictions:
    """Predictions on one image, in its own pixels.

    All in float32: a few kilobytes an image, and a score stays on its side of every threshold.
    """

    scores: np.ndarray  # (N, C) class probabilities
    boxes: np.ndarray  # (N, 4) x1 y1 x2 y2; corners may lie outside of the image
    background: np.ndarray | None = None  # (N,) p(φ) of a softmax head


_ARRAYS = tuple(field.name for field in fields(ImagePredictions))


class PredictionStore:
    """Stored predictions, by the image's index in its view."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._starts = np.load(folder / "starts.npy", allow_pickle=False)
        self._arrays = {
            name: np.load(path, mmap_mode="r", allow_pickle=False)
            for name in _ARRAYS
            if (path := folder / f"{name}.npy").exists() or name != "background"
        }

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> ImagePredictions:
        rows = slice(*self._starts[index : index + 2].tolist())
        return ImagePredictions(
            **{name: np.array(array[rows]) for name, array in self._arrays.items()}
        )

    def __reduce__(self) -> tuple[type[PredictionStore], tuple[Path]]:
        # A spawned worker maps the files again: a pickled array would be a copy per worker.
        return PredictionStore, (self.folder,)


class PredictedView(Dataset):
    """A view whose entries carry stored predictions as `predictions`."""

    def __init__(self, view: Any, store: PredictionStore) -> None:
        assert len(view) == len(store)
        self.view = view  # entries in Detectron2's format, by index
        self.store = store

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.view[index], "predictions": self.store[index]}


def write_predictions(
    folder: Path, parts: Sequence[ImagePredictions], about: Mapping[str, Any]
) -> PredictionStore:
    """Stores the predictions of a view's images, in its order.

    Args:
        folder: where to; what is there is replaced.
        parts: one per image, at least one.
        about: what the predictions are of, as JSON data; `find_predictions` compares it.
    """
    (folder / "manifest.json").unlink(missing_ok=True)  # from here on there are none
    arrays = {"starts": np.cumsum([0, *(len(part.scores) for part in parts)])}
    for name in _ARRAYS:
        if getattr(parts[0], name) is not None:
            arrays[name] = np.concatenate([getattr(p, name) for p in parts]).astype(np.float32)
    for name, array in arrays.items():
        with atomic_path(folder / f"{name}.npy") as partial, partial.open("wb") as stream:
            np.save(stream, array, allow_pickle=False)
    digests = {f"{name}.npy": sha256_file(folder / f"{name}.npy") for name in arrays}
    write_json(folder / "manifest.json", {"format": FORMAT, "about": dict(about), "files": digests})
    return PredictionStore(folder)


def find_predictions(folder: Path, about: Mapping[str, Any]) -> PredictionStore | None:
    """Opens stored predictions; None, with a log message, where they have to be computed.

    Predictions of another model, of other images or for another rule are refused.
    """
    path = folder / "manifest.json"
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, stored, files = manifest["format"], manifest["about"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s): computing the predictions again", path, error)
        return None
    problems = [
        f"{key}: stored {stored.get(key)!r}, now {about.get(key)!r}"
        for key in sorted({*stored, *about})
        if stored.get(key) != about.get(key)
    ]
    if version != FORMAT:
        problems.append(f"format: stored {version!r}, now {FORMAT}")
    if problems:
        raise InputError.listing(
            f"the predictions in {folder} are not those of this stage; delete the folder to make "
            "them again:",
            problems,
        )
    damaged = [
        name
        for name, digest in files.items()
        if not (folder / name).is_file() or sha256_file(folder / name) != digest
    ]
    if damaged:
        logger.warning(
            "%s: missing or damaged: %s; computing the predictions again",
            folder,
            ", ".join(damaged),
        )
        return None
    return PredictionStore(folder)
