"""Annotation arrays in shared memory, for worker processes that are spawned and not forked.

A spawned worker receives its data set as a pickle. Tensors in it travel between `torch` processes
as handles of shared memory, so that tens of megabytes of annotations are not copied per worker.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from cldetr.data.coco import CocoData
from cldetr.data.texts import PackedTexts


@dataclass(eq=False)
class SharedData:
    """A `CocoData` whose arrays are tensors in shared memory."""

    plain: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    _opened: CocoData | None = field(default=None, repr=False)

    def open(self) -> CocoData:
        """The data set, looking at the shared memory."""
        if self._opened is None:
            arrays: dict[str, Any] = {key: tensor.numpy() for key, tensor in self.tensors.items()}
            names = PackedTexts(arrays.pop("characters"), arrays.pop("ends"))
            self._opened = CocoData(file_names=names, **self.plain, **arrays)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {"plain": self.plain, "tensors": self.tensors, "_opened": None}


_shared: weakref.WeakKeyDictionary[CocoData, SharedData] = weakref.WeakKeyDictionary()


def share(data: CocoData) -> SharedData:
    """Moves a data set's arrays to shared memory, once; `data` looks at them from then on."""
    if data not in _shared:
        values = {entry.name: getattr(data, entry.name) for entry in fields(data)}
        names = values.pop("file_names")
        if not isinstance(names, PackedTexts):
            names = PackedTexts.pack(names)
        arrays = {key: value for key, value in values.items() if isinstance(value, np.ndarray)}
        plain = {key: value for key, value in values.items() if key not in arrays}
        tensors = {
            key: torch.from_numpy(np.array(array)).share_memory_()
            for key, array in {**arrays, "characters": names.characters, "ends": names.ends}.items()
        }
        # One copy, not two: the arrays in private memory are let go.
        for key in arrays:
            object.__setattr__(data, key, tensors[key].numpy())
        names = PackedTexts(tensors["characters"].numpy(), tensors["ends"].numpy())
        object.__setattr__(data, "file_names", names)
        _shared[data] = SharedData(plain, tensors)
    return _shared[data]
