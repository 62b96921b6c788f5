"""The stem's pooling equals PyTorch's, to the bit, with its gradients and its memory format."""

import pytest
import torch
import torch.nn.functional as F

from cldetr.layers.pooling import stem_pool


@pytest.mark.parametrize("shape", [(2, 5, 8, 8), (1, 3, 7, 10), (3, 16, 1, 2)])
def test_it_equals_max_pool2d_with_gradients(shape):
    x = torch.randn(shape).mul(4).round()  # equal maxima, too
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = stem_pool(ours), F.max_pool2d(theirs, 3, stride=2, padding=1)
    assert torch.equal(found, wanted)
    gradient = torch.randn_like(wanted)
    found.backward(gradient)
    wanted.backward(gradient)
    assert torch.equal(ours.grad, theirs.grad)


def test_the_memory_format_stays():
    x = torch.randn(2, 8, 6, 6)
    assert stem_pool(x).is_contiguous()
    last = x.contiguous(memory_format=torch.channels_last)
    assert stem_pool(last).is_contiguous(memory_format=torch.channels_last)
