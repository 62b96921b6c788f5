import math

import pytest
import torch
import torch.nn.functional as F

from cldetr.modeling.levels import extract_levels, extract_levels_with_padding
from cldetr.modeling.structures import ImageBatch

SIZES = [(40, 70), (64, 33), (40, 70), (57, 64)]
STRIDES = [4, 16]


def batch_of(sizes, multiple=1):
    height, width = (
        math.ceil(max(side) / multiple) * multiple for side in zip(*sizes, strict=True)
    )
    tensor = torch.zeros(len(sizes), 1, height, width)
    for index, (h, w) in enumerate(sizes):
        tensor[index, :, :h, :w] = index + 1
    return ImageBatch(tensor, sizes)


def pool(tensor):
    """One map per stride; a cell holds the mean of its pixels, as far as there are any."""
    return [F.avg_pool2d(tensor, s, ceil_mode=True, count_include_pad=False) for s in STRIDES]


def test_every_image_is_extracted_without_its_padding_and_put_in_its_place():
    levels = extract_levels(batch_of(SIZES), pool, STRIDES)
    for stride, maps, extents in zip(STRIDES, levels.maps, levels.extents, strict=True):
        assert extents == [(math.ceil(h / stride), math.ceil(w / stride)) for h, w in SIZES]
        for index, (height, width) in enumerate(extents):
            assert (maps[index, 0, :height, :width] == index + 1).all()
            assert not maps[index, 0, height:].any()
            assert not maps[index, 0, :, width:].any()


def test_padding_mask_and_valid_sizes_cover_all_levels():
    levels = extract_levels(batch_of(SIZES), pool, STRIDES)
    padding = levels.padding()
    assert padding.shape == (4, 16 * 18 + 4 * 5)
    cells = torch.cat([x.flatten(2) for x in levels.maps], dim=2)[:, 0]
    assert torch.equal(padding, cells == 0)
    assert levels.valid()[1].tolist() == [[9, 16], [3, 4]]  # width, height


def test_nothing_is_marked_where_nothing_is_padded():
    levels = extract_levels(batch_of([(33, 47)] * 2), pool, STRIDES)
    assert not levels.padded
    assert levels.padding() is None


def test_images_of_one_size_pass_together():
    seen = []

    def extract(tensor):
        seen.append(tuple(tensor.shape))
        return pool(tensor)

    extract_levels(batch_of(SIZES), extract, STRIDES)
    assert sorted(seen) == [(1, 1, 57, 64), (1, 1, 64, 33), (2, 1, 40, 70)]


def test_backbones_that_want_multiples_get_them_and_extents_stay():
    seen = []

    def extract(tensor):
        seen.append(tuple(tensor.shape[-2:]))
        return pool(tensor)

    levels = extract_levels(batch_of(SIZES, multiple=32), extract, STRIDES, divisibility=32)
    assert sorted(seen) == [(64, 64), (64, 64), (64, 96)]
    assert levels.extents == extract_levels(batch_of(SIZES), pool, STRIDES).extents
    assert levels.padded


@pytest.mark.parametrize("sizes", [SIZES, [(61, 90), (97, 130)]])
def test_official_rule_interpolates_the_pixel_mask(sizes):
    images = batch_of(sizes)
    levels = extract_levels_with_padding(images, pool)
    start = 0
    for maps in levels.maps:
        mask = F.interpolate(images.mask[None].float(), size=maps.shape[-2:])[0].bool()
        cells = mask[0].numel()
        assert torch.equal(levels.padding()[:, start : start + cells], mask.flatten(1))
        start += cells
