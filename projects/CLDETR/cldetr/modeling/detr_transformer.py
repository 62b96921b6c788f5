"""The transformer of DETR: full attention over one feature map and between queries.

Parameters bear the names of the official implementation, so that its checkpoints fit, and
UP-DETR's, which is this transformer with normalisation before each sub-layer.

Shape shorthand: B images, S cells of the map, C channels, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cldetr.layers.cpu import add_dropout, feed_forward
from cldetr.layers.position import sine_position_map
from cldetr.modeling.blocks import LayerStack, Transformer
from cldetr.modeling.levels import Levels


class DetrTransformer(Transformer):
    """Encoder and decoder with standard multi-head attention."""

    def __init__(
        self,
        *,
        dim: int = 256,
        heads: int = 8,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        ffn_dim: int = 2048,
        dropout: float = 0.1,
        pre_norm: bool = False,
        checkpointing: bool = False,
    ) -> None:
        """Sets up the transformer.

        Args:
            dim: width C.
            heads: attention heads.
            encoder_layers: number of encoder layers.
            decoder_layers: number of decoder layers.
            ffn_dim: width of the feed-forward networks.
            dropout: dropout rate, everywhere.
            pre_norm: normalise before each sub-layer (UP-DETR) and not after it (DETR).
            checkpointing: see `Transformer`.
        """
        super().__init__(dim, checkpointing)
        block: dict[str, Any] = {"heads": heads, "ffn_dim": ffn_dim}
        block |= {"dropout": dropout, "pre_norm": pre_norm}
        self.encoder = LayerStack(
            (EncoderLayer(dim, **block) for _ in range(encoder_layers)),
            norm=nn.LayerNorm(dim) if pre_norm else None,
        )
        self.decoder = LayerStack(
            (DecoderLayer(dim, **block) for _ in range(decoder_layers)), norm=nn.LayerNorm(dim)
        )
        self.init_matrices()

    def forward(self, levels: Levels, query_pos: Tensor) -> Tensor:
        """Runs encoder and decoder.

        Args:
            levels: one level.
            query_pos: (Q, C), the queries' position embeddings; their states start at zero.

        Returns:
            (layers, B, Q, C), the normalised states after each decoder layer.
        """
        (shape,) = levels.shapes
        padding = levels.padding()
        tokens = levels.maps[0].flatten(2).transpose(1, 2)
        positions = sine_position_map(levels.valid()[:, 0], shape, self.dim, offset=0.0)
        positions = positions.flatten(1, 2)
        for layer in self.encoder.layers:
            tokens = self.run_layer(layer, tokens, positions, padding)
        if self.encoder.norm is not None:
            tokens = self.encoder.norm(tokens)
        assert self.decoder.norm is not None
        query_pos = query_pos.expand(len(tokens), -1, -1)
        states = torch.zeros_like(query_pos)
        kept = []
        for layer in self.decoder.layers:
            states = self.run_layer(layer, states, query_pos, tokens, positions, padding)
            kept.append(self.decoder.norm(states))
        return torch.stack(kept)


class _Layer(nn.Module):
    """What both kinds of layers share: where normalisation stands and the feed-forward network."""

    def __init__(self, dim: int, *, ffn_dim: int, dropout: float, pre_norm: bool) -> None:
        super().__init__()
        self.linear1 = nn.Linear(dim, ffn_dim)
        self.linear2 = nn.Linear(ffn_dim, dim)
        self.dropout = dropout
        self.pre_norm = pre_norm

    def _add(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return add_dropout(x, sublayer(norm(x)), self.dropout, self.training)
        return norm(add_dropout(x, sublayer(x), self.dropout, self.training))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return feed_forward(x, self.linear1, self.linear2, self.dropout, self.training)


class EncoderLayer(_Layer):
    """Self-attention over the cells, then a feed-forward network."""

    def __init__(self, dim: int, *, heads: int, dropout: float, **block: Any) -> None:
        super().__init__(dim, dropout=dropout, **block)
        self.self_attn = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor, positions: Tensor, padding: Tensor | None) -> Tensor:
        """(B, S, C) → (B, S, C)."""
        tokens = self._add(
            tokens, self.norm1, lambda x: _attend(self.self_attn, x + positions, None, x, padding)
        )
        return self._add(tokens, self.norm2, self._feed_forward)


class DecoderLayer(_Layer):
    """Self-attention of the queries, attention to the cells, then a feed-forward network."""

    def __init__(self, dim: int, *, heads: int, dropout: float, **block: Any) -> None:
        super().__init__(dim, dropout=dropout, **block)
        self.self_attn = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.norm3 = nn.LayerNorm(dim)

    def forward(
        self,
        states: Tensor,
        query_pos: Tensor,
        tokens: Tensor,
        positions: Tensor,
        padding: Tensor | None,
    ) -> Tensor:
        """(B, Q, C) → (B, Q, C)."""
        states = self._add(
            states, self.norm1, lambda x: _attend(self.self_attn, x + query_pos, None, x, None)
        )
        key = tokens + positions
        states = self._add(
            states,
            self.norm2,
            lambda x: _attend(self.multihead_attn, x + query_pos, key, tokens, padding),
        )
        return self._add(states, self.norm3, self._feed_forward)


def _attend(
    attention: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor | None,
    value: Tensor,
    padding: Tensor | None,
) -> Tensor:
    """Attention without its weights, so that the fused kernels serve; no key: the query's."""
    key = query if key is None else key
    return attention(query, key, value, key_padding_mask=padding, need_weights=False)[0]
