"""The CPU's own ways equal PyTorch's, with gradients and memory formats."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck

from cldetr.layers.cpu import add_dropout, draw_dropped, feed_forward, stem_pool


@pytest.mark.parametrize("shape", [(2, 5, 8, 8), (1, 3, 7, 10), (3, 16, 1, 2)])
def test_pooling_equals_max_pool2d_with_gradients(shape):
    x = torch.randn(shape).mul(4).round()  # equal maxima, too
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = stem_pool(ours), F.max_pool2d(theirs, 3, stride=2, padding=1)
    assert torch.equal(found, wanted)
    gradient = torch.randn_like(wanted)
    found.backward(gradient)
    wanted.backward(gradient)
    assert torch.equal(ours.grad, theirs.grad)


def test_pooling_keeps_the_memory_format():
    x = torch.randn(2, 8, 6, 6)
    assert stem_pool(x).is_contiguous()
    last = x.contiguous(memory_format=torch.channels_last)
    assert stem_pool(last).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(7,), (2, 3), (2, 1500), (0, 4)])
def test_feed_forward_equals_its_layers_one_after_the_other(shape):
    first, second = nn.Linear(6, 10), nn.Linear(10, 5)
    x = torch.randn(*shape, 6, requires_grad=True)
    gradients = []
    for result in (
        second(torch.relu(first(x))),
        feed_forward(x, first, second, 0.0, training=True),
        feed_forward(x, first, second, 0.3, training=False),
    ):
        parameters = [x, *first.parameters(), *second.parameters()]
        gradients.append([result, *torch.autograd.grad(result.square().sum(), parameters)])
    for found in gradients[1:]:
        for a, b in zip(found, gradients[0], strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_gradients_with_dropout_are_those_of_the_function_that_was_computed():
    first, second = nn.Linear(4, 9).double(), nn.Linear(9, 3).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def seeded(x, *_):
        torch.manual_seed(1)
        return feed_forward(x, first, second, 0.4, training=True)

    assert gradcheck(seeded, (x, *first.parameters(), *second.parameters()))

    def added(residual, x):
        torch.manual_seed(1)
        return add_dropout(residual, x.clone(), 0.4, training=True)

    residual = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(added, (residual, x))


def test_dropout_drops_at_its_rate_and_keeps_the_mean():
    dropped, scale = draw_dropped(torch.Size([1000, 999]), 0.1, torch.device("cpu"))
    assert dropped.float().mean().item() == pytest.approx(0.1, abs=0.002)
    assert scale == pytest.approx(1 / 0.9, rel=1e-4)
    for part in (dropped[:, ::4], dropped[:, 3::4], dropped[::2]):  # all 16-bit parts of a word
        assert part.float().mean().item() == pytest.approx(0.1, abs=0.003)
    neighbours = (dropped[:, 1:] & dropped[:, :-1]).float().mean().item()
    assert neighbours == pytest.approx(0.01, abs=0.001)  # independent of each other
    residual = torch.full((1000, 1000), 2.0)
    result = add_dropout(residual, torch.ones(1000, 1000), 0.25, training=True)
    assert result.mean().item() == pytest.approx(3.0, abs=0.005)
    assert result.unique().tolist() == pytest.approx([2.0, 2 + 1 / 0.75], rel=1e-4)


def test_dropout_does_nothing_in_evaluation():
    residual, x = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(add_dropout(residual, x, 0.5, training=False), residual + x)


def test_same_seed_drops_the_same():
    first, second = nn.Linear(6, 100), nn.Linear(100, 6)
    x = torch.randn(8, 6)
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(feed_forward(x, first, second, 0.5, training=True))
    assert torch.equal(*results)
    assert not torch.equal(results[0], feed_forward(x, first, second, 0.5, training=True))


def test_autocast_computes_in_its_type():
    first, second = nn.Linear(6, 2000), nn.Linear(2000, 5)
    x = torch.randn(3000, 6, requires_grad=True)
    wanted = second(torch.relu(first(x)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = feed_forward(x, first, second, 0.0, training=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, atol=0.05, rtol=0.05)
    found.float().sum().backward()
    assert first.weight.grad.dtype == torch.float32


# Page faults of taking, touching and freeing five blocks of 20 MB, three times. A fresh process
# asks forks of itself: this one may have changed the setting, and importing torch takes long.
SCRIPT = """
import ctypes, os, resource, sys
from cldetr.layers.cpu import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def turn():
    blocks = [ctypes.c_void_p(libc.malloc(20 << 20)) for _ in range(5)]
    for block in blocks:
        ctypes.memset(block, 1, 20 << 20)
    for block in blocks:
        libc.free(block)
for keep, environment in ((False, {}), (True, {}), (True, {"MALLOC_TRIM_THRESHOLD_": "1000000"})):
    if os.fork():
        os.wait()
        continue
    os.environ.update(environment)
    kept = keep_freed_memory() if keep else None
    turn()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        turn()
    print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    sys.exit()
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_memory_that_was_freed_is_not_cleared_anew():
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    left, kept, other = (line.split() for line in done.stdout.splitlines())
    assert other[0] == "False"  # settings in the environment are respected
    if kept[0] == "False":
        pytest.skip("not glibc")
    assert (left[0], kept[0]) == ("None", "True")
    assert int(kept[1]) < 1000 < int(left[1])  # 76,800 pages are touched
