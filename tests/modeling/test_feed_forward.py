import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from cldetr.layers.dropout import add_dropout, draw_dropped
from cldetr.layers.feed_forward import feed_forward


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
