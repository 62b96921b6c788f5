"""Random inputs of the op, and its gradients for a random gradient of the output."""

import torch


def make_inputs(
    images=2,
    shapes=((5, 7), (3, 2), (1, 1)),
    heads=3,
    channels=8,
    queries=9,
    points=3,
    dtype=torch.float64,
    seed=0,
):
    """Locations reach outside the levels on every side."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        return torch.rand(size, generator=generator, dtype=torch.float64)

    levels, cells = len(shapes), sum(height * width for height, width in shapes)
    value = (random(images, cells, heads, channels) - 0.5).to(dtype)
    coordinates = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    locations = (random(images, queries, heads, levels, points, 2) * 1.6 - 0.3).to(coordinates)
    weights = random(images, queries, heads, levels, points).to(coordinates)
    spatial_shapes = torch.tensor(shapes, dtype=torch.int64).reshape(levels, 2)
    return value, spatial_shapes, locations, weights


def with_grad(value, spatial_shapes, locations, weights):
    leaves = [tensor.clone().requires_grad_() for tensor in (value, locations, weights)]
    return leaves[0], spatial_shapes, leaves[1], leaves[2]


def gradients(function, inputs, seed=1):
    inputs = with_grad(*inputs)
    output = function(*inputs)
    generator = torch.Generator().manual_seed(seed)
    grad = torch.rand(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    return torch.autograd.grad(output, (inputs[0], inputs[2], inputs[3]), grad)
