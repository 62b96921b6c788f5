import math

import pytest
import torch

from cldetr.layers.deform_attn import MSDeformAttn

SHAPES = [(5, 4), (3, 2)]


def attend_by_loops(module, query, reference, memory, padding):
    """Every sample on its own, by the definition."""
    value = memory @ module.value_proj.weight.T + module.value_proj.bias
    value = value * ~padding[..., None] if padding is not None else value
    images, queries, dim = query.shape
    size = dim // module.heads
    offsets = module.sampling_offsets(query).view(
        images, queries, module.heads, len(SHAPES), module.points, 2
    )
    logits = module.attention_weights(query).view(images, queries, module.heads, -1)
    weights = logits.softmax(-1).view(images, queries, module.heads, len(SHAPES), module.points)
    result = torch.zeros(images, queries, dim, dtype=query.dtype)
    for n in range(images):
        for q in range(queries):
            for m in range(module.heads):
                start = 0
                for level, (height, width) in enumerate(SHAPES):
                    for p in range(module.points):
                        dx, dy = offsets[n, q, m, level, p]
                        point = reference[n, q, level]
                        if len(point) == 2:
                            x, y = point[0] * width + dx, point[1] * height + dy
                        else:
                            x = (point[0] + dx / module.points * point[2] / 2) * width
                            y = (point[1] + dy / module.points * point[3] / 2) * height
                        x, y = float(x) - 0.5, float(y) - 0.5  # cell centres lie at whole numbers
                        for row in (math.floor(y), math.floor(y) + 1):
                            for column in (math.floor(x), math.floor(x) + 1):
                                if 0 <= row < height and 0 <= column < width:
                                    share = (1 - abs(x - column)) * (1 - abs(y - row))
                                    cell = value[n, start + row * width + column]
                                    part = slice(m * size, (m + 1) * size)
                                    sample = cell[part] * share * weights[n, q, m, level, p]
                                    result[n, q, part] += sample
                    start += height * width
    return module.output_proj(result)


@pytest.mark.parametrize("coordinates", [2, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_module_equals_its_definition_sample_by_sample(coordinates, padded):
    module = MSDeformAttn(12, heads=3, levels=2, points=2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn_like(parameter) * 0.3
    cells = sum(height * width for height, width in SHAPES)
    query, memory = torch.randn(2, 4, 12), torch.randn(2, cells, 12)
    reference = torch.rand(2, 4, 2, coordinates)
    padding = torch.rand(2, cells) < 0.3 if padded else None
    with torch.no_grad():
        found = module(query, reference, memory, torch.tensor(SHAPES), padding)
        wanted = attend_by_loops(module, query, reference, memory, padding)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_heads_start_in_eight_directions_at_growing_distance():
    module = MSDeformAttn(64, heads=8, levels=3, points=4)
    bias = module.sampling_offsets.bias.view(8, 3, 4, 2)
    directions = [(1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1)]
    for head, direction in enumerate(directions):
        for point in range(4):
            wanted = torch.tensor(direction).float() * (point + 1)
            for level in range(3):
                torch.testing.assert_close(bias[head, level, point], wanted, atol=1e-5, rtol=0)
    for zero in (module.sampling_offsets.weight, *module.attention_weights.parameters()):
        assert not zero.any()


def test_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="multiple of the heads"):
        MSDeformAttn(10, heads=4, levels=1, points=1)
