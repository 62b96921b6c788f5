"""The box heads' multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU in between."""

    def __init__(self, dim: int, hidden: int, out: int, layers: int) -> None:
        super().__init__()
        widths = [dim, *[hidden] * (layers - 1), out]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    @property
    def last(self) -> nn.Linear:
        """The layer that says the result."""
        layer = self.layers[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """(…, dim) → (…, out)."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.last(x)
