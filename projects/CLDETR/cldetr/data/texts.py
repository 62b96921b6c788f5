"""A list of texts that is cheap to keep, to write and to share: file names, in the main."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np


class PackedTexts(Sequence[str]):
    """A read-only list of texts in two arrays: small, and shared between processes as it is."""

    def __init__(self, characters: np.ndarray, ends: np.ndarray) -> None:
        self.characters = characters  # UTF-8 of all texts in a row, uint8
        self.ends = ends  # (I,) int64

    @classmethod
    def pack(cls, texts: Sequence[str]) -> PackedTexts:
        """Packs a list."""
        encoded = [text.encode() for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        place = range(len(self))[place]  # negative places and IndexError as in a list
        start = self.ends[place - 1] if place else 0
        return self.characters[start : self.ends[place]].tobytes().decode()
