"""Counting what a campaign tried and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Size = Literal["short", "nightly", "long"]
SHOWN = 10  # misses printed in full


@dataclass(frozen=True)
class Options:
    """How much of a campaign to run."""

    work: Path  # a folder for its files
    size: Size = "nightly"
    count: int | None = None  # faults to try, instead of what the size says
    seed: int = 0
    minutes: float = 60.0
    begun: float = field(default_factory=time.monotonic)

    def number(self, short: int, nightly: int, long: int) -> int:
        """How many faults to try."""
        if self.count is not None:
            return self.count
        return {"short": short, "nightly": nightly, "long": long}[self.size]

    @property
    def out_of_time(self) -> bool:
        """Whether the campaign is to end with what it has."""
        return time.monotonic() - self.begun > 60 * self.minutes

    def folder(self, name: str) -> Path:
        """An empty folder of that name."""
        path = self.work / name
        path.mkdir(parents=True)
        return path


class Tally:
    """What was tried, by kind, and every miss."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tried: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.misses: list[str] = []
        self.notes: list[str] = []

    def check(self, kind: str, good: bool, miss: str = "") -> bool:
        """Counts one fault of a kind; `miss` says what happened where it was not handled."""
        self.tried[kind] += 1
        if good:
            self.held[kind] += 1
        else:
            self.misses.append(f"{kind}: {miss}")
        return good

    def note(self, text: str) -> None:
        """Adds a line to what is printed."""
        self.notes.append(text)

    def text(self) -> str:
        """The lines to print."""
        lines = [
            f"{self.name}: {self.held[kind]} of {count} {kind}"
            for kind, count in self.tried.items()
        ]
        lines += [f"{self.name}: {note}" for note in self.notes]
        lines += [f"{self.name}: MISS {miss}" for miss in self.misses[:SHOWN]]
        if len(self.misses) > SHOWN:
            lines.append(f"{self.name}: … and {len(self.misses) - SHOWN} more misses")
        return "\n".join(lines)
