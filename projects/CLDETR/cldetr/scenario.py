"""Scenarios: which classes and which images each phase of incremental training sees.

A class's *label* is its place in `Scenario.categories`, and it keeps that place for ever: labels
are what data sets, heads and checkpoints use. Categories stand in ascending id order for one base
data set (Detectron2's contiguous ids) and in order of arrival for phases from separate data sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Protocol = Literal["strict", "traditional", "separate"]


@dataclass(frozen=True)
class Category:
    """A category as the annotation file names it."""

    id: int
    name: str


@dataclass(frozen=True)
class Phase:
    """One phase: the classes C_i annotated in it and the images D_i that it sees."""

    index: int  # from 1, as the paper counts
    classes: tuple[int, ...]  # labels of C_i, in the order of the scenario's class order
    image_ids: tuple[int, ...]
    source: str = "base"  # which data set the images come from


@dataclass(frozen=True)
class Scenario:
    """All phases over a list of categories, with what is needed to make them again."""

    name: str  # as people say it: "70+10"
    protocol: Protocol
    categories: tuple[Category, ...]  # a class's label is its place here
    phases: tuple[Phase, ...]
    order: str  # "id", "seed", "released" or "list"
    class_seed: int | None
    data_seed: int | None
    fingerprints: tuple[tuple[str, str], ...]  # (source, fingerprint of its annotation file)

    def seen(self, index: int) -> tuple[int, ...]:
        """Labels of C_1 ∪ … ∪ C_index."""
        return tuple(label for phase in self.phases[:index] for label in phase.classes)

    def old(self, index: int) -> tuple[int, ...]:
        """Labels seen before phase `index`."""
        return self.seen(index - 1)
