"""Loading by position: the order depends on nothing but the seed and the position."""

import random

import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from detectron2.structures import BoxMode
from PIL import Image

from cldetr.config import add_cldetr_config
from cldetr.data import loader
from cldetr.data.loader import PositionDataset, SampleOrder, StepSampler, build_train_loader
from cldetr.data.mapper import Augmentation, Mapper
from cldetr.errors import InputError

SMALL = Augmentation(short_sides=(32, 40), max_side=60, crop_short_sides=(36,), crop_size=(20, 30))


@pytest.fixture
def entries(tmp_path):
    made = []
    rng = np.random.default_rng(0)
    for number in range(7):
        path = tmp_path / f"{number}.png"
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
        annotation = {
            "bbox": [5, 6, 20, 10],
            "bbox_mode": BoxMode.XYWH_ABS,
            "category_id": number % 3,
            "iscrowd": 0,
        }
        made.append(
            {
                "file_name": str(path),
                "image_id": number,
                "height": 40,
                "width": 50,
                "annotations": [annotation],
            }
        )
    return made


def load(monkeypatch, entries, *, first=0, workers=0, rank=0, world=1):
    """The batches of a stage of six steps, as one of its ranks loads them."""
    cfg = get_cfg()
    add_cldetr_config(cfg)
    cfg.DATASETS.TRAIN = ("loader_entries",)
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.IMS_PER_BATCH, cfg.SEED = 6, 2, 5
    cfg.STAGE.PHASE, cfg.STAGE.NAME = 1, "train"
    cfg.DATALOADER.NUM_WORKERS, cfg.MODEL.DEVICE = workers, "cpu"
    monkeypatch.setattr(loader, "get_detection_dataset_dicts", lambda *_, **__: entries)
    monkeypatch.setattr(loader.comm, "get_rank", lambda: rank)
    monkeypatch.setattr(loader.comm, "get_world_size", lambda: world)
    batches = build_train_loader(cfg, Mapper(SMALL, training=True))
    batches.batch_sampler.start_at(first)
    return list(batches)


def same(batch, other):
    return [x["image_id"] for x in batch] == [x["image_id"] for x in other] and all(
        torch.equal(x["image"], y["image"])
        and torch.equal(x["instances"].gt_boxes.tensor, y["instances"].gt_boxes.tensor)
        for x, y in zip(batch, other, strict=True)
    )


def test_an_epoch_is_a_permutation_cut_into_whole_batches():
    order = SampleOrder(images=11, batch=4, seed=(0,))
    assert order.steps_per_epoch == 2
    assert len(set(order.epoch(0).tolist())) == 8
    assert order.epoch(0).tolist() != order.epoch(1).tolist()


def test_a_coco_epoch_has_as_many_steps_as_in_deformable_detr():
    assert SampleOrder(images=118_287, batch=32, seed=(0,)).steps_per_epoch == 3_696


def test_fewer_images_than_a_batch_go_round():
    order = SampleOrder(images=3, batch=8, seed=(0,))
    assert order.steps_per_epoch == 1
    assert set(order.epoch(0).tolist()) == {0, 1, 2}


def test_no_image_at_all_is_refused():
    with pytest.raises(InputError, match="no image"):
        SampleOrder(images=0, batch=2, seed=(0,))


def test_starting_later_gives_the_same_batches_as_going_through(entries, monkeypatch):
    whole, rest = load(monkeypatch, entries), load(monkeypatch, entries, first=3)
    assert all(same(a, b) for a, b in zip(whole[3:], rest, strict=True))


def test_workers_change_nothing_and_draw_nothing_from_the_global_stream(entries, monkeypatch):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    numpy_before = np.random.get_state()[1].copy()
    alone, helped = load(monkeypatch, entries), load(monkeypatch, entries, workers=2)
    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))
    assert torch.equal(before, torch.random.get_rng_state())
    assert (numpy_before == np.random.get_state()[1]).all()


def test_two_processes_share_the_batches_of_one(entries, monkeypatch):
    alone = load(monkeypatch, entries)
    shares = [load(monkeypatch, entries, rank=rank, world=2) for rank in (0, 1)]
    assert all(
        same(batch, [*left, *right]) for batch, left, right in zip(alone, *shares, strict=True)
    )


def test_a_batch_that_processes_cannot_share_is_refused():
    with pytest.raises(InputError, match="multiple of 3"):
        StepSampler(0, 4, batch=4, rank=0, world=3)


def test_a_mapper_of_detectron2s_kind_draws_by_position(entries):
    """It draws from the global generators, which are seeded for every sample."""

    def mapper(entry):
        return {**entry, "drawn": (random.random(), np.random.rand(), float(torch.rand(())))}

    order = SampleOrder(len(entries), batch=2, seed=(5, 1))
    samples = PositionDataset(entries, mapper, order)
    first, again, other = samples[3], samples[3], samples[4]
    assert first["drawn"] == again["drawn"] != other["drawn"]
    with pytest.raises(InputError, match="returned nothing for"):
        PositionDataset(entries, lambda entry: None, order)[0]
