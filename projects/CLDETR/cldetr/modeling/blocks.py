"""What both transformers and their heads are made of."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class MLP(nn.Module):
    """Linear layers with ReLU in between: the box head."""

    def __init__(self, dim: int, hidden: int, out: int, layers: int) -> None:
        super().__init__()
        widths = [dim, *[hidden] * (layers - 1), out]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    @property
    def last(self) -> nn.Linear:
        """The output layer."""
        layer = self.layers[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """(…, dim) → (…, out)."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.last(x)


class LayerStack(nn.Module):
    """Layers under the name `layers`, and possibly a norm after them."""

    def __init__(self, layers: Iterable[nn.Module], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class Transformer(nn.Module):
    """Encoder and decoder layers of width `dim`.

    Attributes:
        checkpointing: keep only the layers' inputs for the backward pass, computing each layer
            twice: less memory for more time.
    """

    def __init__(self, dim: int, checkpointing: bool) -> None:
        super().__init__()
        self.dim = dim
        self.checkpointing = checkpointing

    def run_layer(self, layer: nn.Module, *args: Any) -> Tensor:
        """Computes one layer, with checkpointing where it is on and a backward pass may follow."""
        if self.checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(layer, *args, use_reentrant=False)
        return layer(*args)

    def init_matrices(self) -> None:
        """Initializes all matrices by Xavier's rule."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
