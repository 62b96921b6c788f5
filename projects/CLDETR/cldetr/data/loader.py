"""Loading by position, so that a run can stop and continue anywhere.

Every training sample has a position in its stage. The position alone, with the run's seed, decides
which image it is and how it is augmented: there is no random state to save, any number of workers
or processes sees the same samples, and a resumed run continues with the very next one.
"""

from __future__ import annotations

import copy
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import get_detection_dataset_dicts
from detectron2.data.build import trivial_batch_collator
from detectron2.data.samplers import InferenceSampler
from detectron2.utils import comm
from torch.utils.data import DataLoader, Dataset, Sampler

from cldetr.data.mapper import Augmentation, Mapper
from cldetr.errors import InputError

_LINGER = 60  # seconds that a worker outlives a SIGTERM
_STAGE_SEEDS = {"train": 1, "calibrate": 2}  # part of the seeds: never renumber
AnyMapper = Mapper | Callable[[dict[str, Any]], dict[str, Any] | None]


class Entries(Protocol):
    """Images with annotations in Detectron2's format: a view, or a list of dictionaries."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


@dataclass(frozen=True)
class SampleOrder:
    """One permutation of the images per epoch, cut into whole batches.

    As in DETR an epoch has ⌊images / batch⌋ batches, and the last few images of the permutation are
    not used in it. With fewer images than a batch, an epoch is one batch that repeats them.
    """

    images: int
    batch: int  # images in a step, over all processes
    seed: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.images < 1:
            raise InputError("there is no image to train on in this stage")

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return max(self.images // self.batch, 1)

    def epoch(self, epoch: int) -> np.ndarray:
        """The image indices of one epoch, (steps_per_epoch · batch,)."""
        order = np.random.default_rng((*self.seed, epoch)).permutation(self.images)
        return np.resize(order, self.steps_per_epoch * self.batch)


class PositionDataset(Dataset):
    """The samples of one stage, addressed by position."""

    def __init__(self, entries: Entries, mapper: AnyMapper, order: SampleOrder) -> None:
        assert len(entries) == order.images
        self.entries = entries
        self.mapper = mapper
        self.order = order
        self._epoch: tuple[int, np.ndarray] | None = None

    def __getitem__(self, position: int) -> dict[str, Any]:
        size = self.order.steps_per_epoch * self.order.batch
        epoch, index = divmod(position, size)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self.order.epoch(epoch))
        entry = self.entries[int(self._epoch[1][index])]
        # The trailing 1 keeps augmentation apart from the permutations' random streams.
        rng = np.random.default_rng((*self.order.seed, position, 1))
        if isinstance(self.mapper, Mapper):
            return self.mapper(entry, rng)
        # A mapper of Detectron2's kind draws from the global generators.
        seed = int(rng.integers(2**32))
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return _apply(self.mapper, copy.deepcopy(entry))


class StepSampler(Sampler[list[int]]):
    """The positions that one rank loads, step by step: its slice of each global batch."""

    def __init__(self, first: int, last: int, batch: int, rank: int, world: int) -> None:
        if batch % world:
            raise InputError(
                f"a batch of {batch} images cannot be divided among {world} processes: "
                f"choose SOLVER.IMS_PER_BATCH as a multiple of {world}"
            )
        self.steps = range(first, last)
        self.batch, self.rank, self.share = batch, rank, batch // world

    def start_at(self, step: int) -> None:
        """Begins at a later step, as a resumed stage does."""
        self.steps = range(step, self.steps.stop)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            start = step * self.batch + self.rank * self.share
            yield list(range(start, start + self.share))

    def __len__(self) -> int:
        return len(self.steps)


def build_train_loader(cfg: CfgNode, mapper: AnyMapper | None = None) -> DataLoader:
    """Loads the batches of a stage, as lists of inputs.

    `loader.batch_sampler.start_at(step)` begins at a later step: a resumed run sees the very
    samples that it would have seen.

    Args:
        cfg: of a stage: reads DATASETS.TRAIN, SOLVER (MAX_ITER, IMS_PER_BATCH), STAGE, SEED, INPUT.
        mapper: from an entry of the data set to a model's input, one of ours or of Detectron2's
            kind; `Mapper` with the augmentation of INPUT by default.
    """
    entries = get_detection_dataset_dicts(cfg.DATASETS.TRAIN, filter_empty=False)
    order = SampleOrder(
        len(entries),
        cfg.SOLVER.IMS_PER_BATCH,
        seed=(cfg.SEED, cfg.STAGE.PHASE, _STAGE_SEEDS.get(cfg.STAGE.NAME, 0)),
    )
    mapper = mapper or Mapper(Augmentation.from_config(cfg), training=True)
    return DataLoader(
        PositionDataset(entries, mapper, order),
        batch_sampler=StepSampler(
            0, cfg.SOLVER.MAX_ITER, order.batch, comm.get_rank(), comm.get_world_size()
        ),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        collate_fn=trivial_batch_collator,
        worker_init_fn=_start_worker,
        pin_memory=cfg.MODEL.DEVICE.startswith("cuda"),
        # Its own generator: the loader must not draw from the stream that drives dropout.
        generator=torch.Generator().manual_seed(0),
    )


def build_test_loader(
    cfg: CfgNode, dataset_name: str, mapper: AnyMapper | None = None
) -> DataLoader:
    """Loads a registered data set one image at a time in order, each process its share.

    Args:
        cfg: reads INPUT and DATALOADER.NUM_WORKERS.
        dataset_name: its name in `DatasetCatalog`.
        mapper: from an entry to a model's input; `Mapper` at test size by default.
    """
    entries = get_detection_dataset_dicts(dataset_name, filter_empty=False)
    mapper = mapper or Mapper(Augmentation.from_config(cfg), training=False)
    dataset = MappedDataset(entries, mapper)
    return DataLoader(
        dataset,
        batch_size=1,
        sampler=InferenceSampler(len(dataset)),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        collate_fn=trivial_batch_collator,
        worker_init_fn=_start_worker,
    )


class MappedDataset(Dataset):
    """Entries of a view through a test mapper, in order."""

    def __init__(self, entries: Entries, mapper: AnyMapper) -> None:
        self.entries = entries
        self.mapper = mapper

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _apply(self.mapper, self.entries[index])


def _apply(mapper: AnyMapper, entry: dict[str, Any]) -> dict[str, Any]:
    mapped = mapper(entry)
    if mapped is None:
        raise InputError(f"the mapper returned nothing for {entry.get('file_name')}")
    return mapped


def _start_worker(worker: int) -> None:
    """Sets up a worker: one thread, and the main process alone decides when it ends.

    Ctrl-C and batch systems signal every process of a run. Without its workers the main process
    could not finish the step that it saves after. SIGTERM ends a worker a minute later, because
    the loader stops a worker that hangs in this way.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.alarm(_LINGER))
