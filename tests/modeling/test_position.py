import math

import pytest
import torch

from cldetr.layers.position import sine_embedding, sine_position_map


def embed_by_cumulative_sums(mask, dim, offset):
    """The formula as the papers' code states it: on the whole map, through its mask."""
    steps_y, steps_x = (~mask).float().cumsum(1), (~mask).float().cumsum(2)
    y = (steps_y + offset) / (steps_y[:, -1:, :] + 1e-6) * 2 * math.pi
    x = (steps_x + offset) / (steps_x[:, :, -1:] + 1e-6) * 2 * math.pi
    channels = []
    for angle in (y, x):
        for index in range(dim // 2):
            scaled = angle / 10000 ** (2 * (index // 2) / (dim // 2))
            channels.append(scaled.sin() if index % 2 == 0 else scaled.cos())
    return torch.stack(channels, dim=-1)


@pytest.mark.parametrize("offset", [-0.5, 0.0])
def test_map_equals_the_formula_on_cumulative_sums_of_the_mask(offset):
    valid = torch.tensor([[5, 3], [7, 6]])  # width, height
    mask = torch.ones(2, 6, 7, dtype=torch.bool)
    for image, (width, height) in enumerate(valid.tolist()):
        mask[image, :height, :width] = False
    found = sine_position_map(valid, (6, 7), 16, offset)
    wanted = embed_by_cumulative_sums(mask, 16, offset)
    torch.testing.assert_close(found[~mask], wanted[~mask], atol=1e-5, rtol=1e-5)
    assert torch.isfinite(found).all()


def test_embedding_interleaves_sine_and_cosine():
    found = sine_embedding(torch.tensor([0.3]), 4)[0]
    slow = 0.3 / 100
    wanted = [math.sin(0.3), math.cos(0.3), math.sin(slow), math.cos(slow)]
    torch.testing.assert_close(found, torch.tensor(wanted))
