"""Loading by position: the order depends on nothing but the seed and the position."""

import numpy as np
import pytest
import torch
from detectron2.structures import BoxMode
from PIL import Image

from cldetr.data.loader import PositionDataset, SampleOrder, StepSampler, train_loader
from cldetr.data.mapper import Augmentation, Mapper
from cldetr.errors import InputError

SMALL = Augmentation(
    short_sides=(32, 40), max_side=60, crop_short_sides=(36,), crop_window=(20, 30)
)


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


def load(entries, *, first=0, last=6, workers=0, rank=0, world=1):
    order = SampleOrder(len(entries), batch=2, seed=(5, 1))
    dataset = PositionDataset(entries, Mapper(SMALL, training=True), order)
    return list(
        train_loader(dataset, first=first, last=last, workers=workers, rank=rank, world=world)
    )


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


def test_starting_later_gives_the_same_batches_as_going_through(entries):
    whole = load(entries)
    assert all(same(a, b) for a, b in zip(whole[3:], load(entries, first=3), strict=True))


def test_workers_change_nothing_and_draw_nothing_from_the_global_stream(entries):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    numpy_before = np.random.get_state()[1].copy()
    alone, helped = load(entries), load(entries, workers=2)
    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))
    assert torch.equal(before, torch.random.get_rng_state())
    assert (numpy_before == np.random.get_state()[1]).all()


def test_two_processes_share_the_batches_of_one(entries):
    alone = load(entries)
    parts = zip(load(entries, rank=0, world=2), load(entries, rank=1, world=2), strict=True)
    assert all(
        same(batch, [*left, *right]) for batch, (left, right) in zip(alone, parts, strict=True)
    )


def test_a_batch_that_processes_cannot_share_is_refused():
    with pytest.raises(InputError, match="multiple of 3"):
        StepSampler(0, 4, batch=4, rank=0, world=3)
