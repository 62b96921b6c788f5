"""The transformer of Deformable DETR: an encoder over feature maps and a decoder of queries.

Parameters bear the names of the official implementation, so that its checkpoints fit.

Shape shorthand: B images, S cells of all levels, C channels, Q queries, L levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cldetr.layers.cpu import add_dropout, feed_forward
from cldetr.layers.deform_attn import MSDeformAttn
from cldetr.layers.position import sine_embedding, sine_position_map
from cldetr.modeling.blocks import LayerStack, Transformer
from cldetr.modeling.levels import Levels


@dataclass
class EncoderOutput:
    """The encoded cells of all levels and their geometry."""

    tokens: Tensor  # (B, S, C)
    shapes: Tensor  # (L, 2) height and width, on the CPU
    centres: Tensor  # (B or 1, S, 2), x and y of each cell in [0, 1] of the unpadded image
    valid_ratios: Tensor  # (B or 1, L, 2), how much of each level's width and height is image
    padding: Tensor | None  # (B, S), True at padding


@dataclass
class Proposals:
    """Two-stage: what each cell proposes, and the queries made of the best ones."""

    logits: Tensor  # (B, S, K)
    boxes: Tensor  # (B, S, 4) cxcywh in [0, 1]
    query_pos: Tensor  # (B, Q, C)
    states: Tensor  # (B, Q, C)
    reference: Tensor  # (B, Q, 4)


@dataclass
class Decoded:
    """What the decoder makes of the queries, layer by layer."""

    states: Tensor  # (layers, B, Q, C)
    boxes: Tensor | None  # (layers, B, Q, 4) where they are refined from layer to layer


class DeformableTransformer(Transformer):
    """Encoder and decoder with multi-scale deformable attention."""

    def __init__(
        self,
        *,
        dim: int = 256,
        heads: int = 8,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        ffn_dim: int = 1024,
        dropout: float = 0.1,
        levels: int = 4,
        encoder_points: int = 4,
        decoder_points: int = 4,
        two_stage: bool = False,
        query_groups: int = 1,
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
            levels: number of feature levels.
            encoder_points: points sampled per head and level in the encoder.
            decoder_points: the same in the decoder.
            two_stage: make the queries of the encoder's best proposals.
            query_groups: queries attend to those of their own group alone; all have one size.
            checkpointing: see `Transformer`.
        """
        super().__init__(dim, checkpointing)
        self.levels = levels
        self.two_stage = two_stage
        self.query_groups = query_groups
        block: dict[str, Any] = {"heads": heads, "levels": levels}
        block |= {"ffn_dim": ffn_dim, "dropout": dropout}
        self.encoder = LayerStack(
            EncoderLayer(dim, points=encoder_points, **block) for _ in range(encoder_layers)
        )
        self.decoder = LayerStack(
            DecoderLayer(dim, points=decoder_points, query_groups=query_groups, **block)
            for _ in range(decoder_layers)
        )
        self.level_embed = nn.Parameter(torch.empty(levels, dim))
        if two_stage:
            self.enc_output = nn.Linear(dim, dim)
            self.enc_output_norm = nn.LayerNorm(dim)
            self.pos_trans = nn.Linear(2 * dim, 2 * dim)
            self.pos_trans_norm = nn.LayerNorm(2 * dim)
        else:
            self.reference_points = nn.Linear(dim, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier for all matrices, then the attentions' own rule, level_embed ~ N(0, 1)."""
        self.init_matrices()
        for module in self.modules():
            if isinstance(module, MSDeformAttn):
                module.reset_parameters()
        nn.init.normal_(self.level_embed)
        if not self.two_stage:
            nn.init.zeros_(self.reference_points.bias)

    def encode(self, levels: Levels) -> EncoderOutput:
        """Runs the encoder over feature maps."""
        valid = levels.valid()  # (B, L, 2)
        padding = levels.padding()
        if padding is None:
            valid = valid[:1]  # the same for all images
        tokens = torch.cat([x.flatten(2).transpose(1, 2) for x in levels.maps], dim=1)
        positions = self._positions(levels.shapes, valid)
        centres = _cell_centres(levels.shapes, valid)
        size = torch.tensor(levels.shapes)  # (L, 2), on the CPU, where the op wants it
        ratios = valid / size.flip(-1).to(valid.device, non_blocking=True)
        reference = centres[:, :, None] * ratios[:, None]  # (B or 1, S, L, 2)
        for layer in self.encoder.layers:
            tokens = self.run_layer(layer, tokens, positions, reference, size, padding)
        return EncoderOutput(tokens, size, centres, ratios, padding)

    def decode(
        self,
        encoded: EncoderOutput,
        states: Tensor,
        query_pos: Tensor,
        reference: Tensor,
        refine: nn.ModuleList | None,
    ) -> Decoded:
        """Runs the decoder.

        Args:
            encoded: the output of `encode`.
            states: (B, Q, C), the queries' initial states.
            query_pos: (B, Q, C), their position embeddings.
            reference: (B, Q, 2 or 4) in [0, 1] of the unpadded image: where each query looks.
            refine: box heads, one per layer: each layer's boxes are the next one's references.
                None: all layers have the same references.
        """
        kept, boxes = [], []
        for index, layer in enumerate(self.decoder.layers):
            scale = encoded.valid_ratios[:, None]  # (B or 1, 1, L, 2)
            if reference.shape[-1] == 4:
                scale = torch.cat([scale, scale], dim=-1)
            states = self.run_layer(
                layer, states, query_pos, reference[:, :, None] * scale, encoded
            )
            kept.append(states)
            if refine is not None:
                boxes.append(shift_reference(refine[index](states), reference))
                reference = boxes[-1].detach()
        return Decoded(torch.stack(kept), torch.stack(boxes) if boxes else None)

    def propose(
        self, encoded: EncoderOutput, class_head: nn.Module, box_head: nn.Module, count: int
    ) -> Proposals:
        """Two-stage: lets every cell propose a box and makes queries of the `count` best."""
        anchors = self._anchors(encoded)  # (B or 1, S, 4)
        unusable = ~((anchors > 0.01) & (anchors < 0.99)).all(dim=-1)
        if encoded.padding is not None:
            unusable = unusable | encoded.padding
        unusable = unusable.expand(encoded.tokens.shape[:2])[..., None]  # (B, S, 1)
        tokens = encoded.tokens.masked_fill(unusable, 0.0)
        tokens = self.enc_output_norm(self.enc_output(tokens))
        logits = class_head(tokens)
        # An infinite logit puts the box of an unusable cell at 1, with no gradient.
        base = torch.logit(anchors).masked_fill(unusable, torch.inf)
        unactivated = box_head(tokens).float() + base
        objectness = logits[..., 0].float()
        if encoded.padding is not None:
            # Padding must not be chosen: an image alone has none.
            objectness = objectness.masked_fill(encoded.padding, -torch.inf)
        best = objectness.topk(min(count, objectness.shape[1]), dim=1).indices
        chosen = unactivated.detach().gather(1, best[..., None].expand(-1, -1, 4))
        reference = chosen.sigmoid()
        embedding = sine_embedding(reference * (2 * torch.pi), self.dim // 2).flatten(2)
        queries = self.pos_trans_norm(self.pos_trans(embedding))
        query_pos, states = queries.split(self.dim, dim=-1)
        return Proposals(logits, unactivated.sigmoid(), query_pos, states, reference)

    def _positions(self, shapes: list[tuple[int, int]], valid: Tensor) -> Tensor:
        """Sine embedding plus level embedding of every cell, (B or 1, S, C)."""
        maps = [
            sine_position_map(valid[:, level], shape, self.dim).flatten(1, 2)
            + self.level_embed[level]
            for level, shape in enumerate(shapes)
        ]
        return torch.cat(maps, dim=1)

    def _anchors(self, encoded: EncoderOutput) -> Tensor:
        """A square around every cell, larger on coarser levels, (B or 1, S, 4)."""
        cells = encoded.shapes.prod(dim=1)
        side = 0.05 * 2.0 ** torch.arange(len(cells))
        sides = torch.repeat_interleave(side, cells)[None, :, None]
        sides = sides.to(encoded.centres.device, non_blocking=True)
        return torch.cat([encoded.centres, sides.expand(*encoded.centres.shape[:2], 2)], dim=-1)


class EncoderLayer(nn.Module):
    """Deformable self-attention over all cells, then a feed-forward network; post-norm."""

    def __init__(
        self, dim: int, *, heads: int, levels: int, points: int, ffn_dim: int, dropout: float
    ) -> None:
        super().__init__()
        self.self_attn = MSDeformAttn(dim, heads=heads, levels=levels, points=points)
        self.norm1 = nn.LayerNorm(dim)
        self.linear1 = nn.Linear(dim, ffn_dim)
        self.linear2 = nn.Linear(ffn_dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.dropout = dropout

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        reference: Tensor,
        shapes: Tensor,
        padding: Tensor | None,
    ) -> Tensor:
        """(B, S, C) → (B, S, C)."""
        attended = self.self_attn(tokens + positions, reference, tokens, shapes, padding)
        tokens = self.norm1(add_dropout(tokens, attended, self.dropout, self.training))
        fed = feed_forward(tokens, self.linear1, self.linear2, self.dropout, self.training)
        return self.norm2(add_dropout(tokens, fed, self.dropout, self.training))


class DecoderLayer(nn.Module):
    """Self-attention of the queries, deformable attention to the cells, feed-forward; post-norm.

    The norms are numbered as in the official implementation: the self-attention's is `norm2`.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        levels: int,
        points: int,
        ffn_dim: int,
        dropout: float,
        query_groups: int = 1,
    ) -> None:
        super().__init__()
        self.query_groups = query_groups
        self.self_attn = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.cross_attn = MSDeformAttn(dim, heads=heads, levels=levels, points=points)
        self.norm1 = nn.LayerNorm(dim)
        self.linear1 = nn.Linear(dim, ffn_dim)
        self.linear2 = nn.Linear(ffn_dim, dim)
        self.norm3 = nn.LayerNorm(dim)
        self.dropout = dropout

    def forward(
        self, states: Tensor, query_pos: Tensor, reference: Tensor, encoded: EncoderOutput
    ) -> Tensor:
        """(B, Q, C) → (B, Q, C)."""
        attended = self._attend_in_groups(states + query_pos, states)
        states = self.norm2(add_dropout(states, attended, self.dropout, self.training))
        attended = self.cross_attn(
            states + query_pos, reference, encoded.tokens, encoded.shapes, encoded.padding
        )
        states = self.norm1(add_dropout(states, attended, self.dropout, self.training))
        fed = feed_forward(states, self.linear1, self.linear2, self.dropout, self.training)
        return self.norm3(add_dropout(states, fed, self.dropout, self.training))

    def _attend_in_groups(self, query: Tensor, states: Tensor) -> Tensor:
        """Self-attention, its matrix block-diagonal where there are several groups of queries."""
        if self.query_groups == 1:
            return self.self_attn(query, query, states, need_weights=False)[0]
        # Every group is an image of its own for the attention.
        query, states = (
            x.unflatten(1, (self.query_groups, -1)).flatten(0, 1) for x in (query, states)
        )
        attended = self.self_attn(query, query, states, need_weights=False)[0]
        return attended.unflatten(0, (-1, self.query_groups)).flatten(1, 2)


def shift_reference(delta: Tensor, reference: Tensor) -> Tensor:
    """Boxes from a head's output relative to reference points or boxes, in float32.

    Args:
        delta: (…, 4), what the box head says.
        reference: (…, 2 or 4) in [0, 1]; a point gives no size to start from.

    Returns:
        (…, 4) cxcywh in [0, 1].
    """
    base = inverse_sigmoid(reference.float())
    if base.shape[-1] == 2:
        base = torch.cat([base, torch.zeros_like(base)], dim=-1)
    return (delta.float() + base).sigmoid()


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    """The logit of x in [0, 1], kept finite at both ends."""
    x = x.clamp(0, 1)
    return torch.log(x.clamp(min=eps) / (1 - x).clamp(min=eps))


def _cell_centres(shapes: list[tuple[int, int]], valid: Tensor) -> Tensor:
    """Cell centres (x, y) in [0, 1] of the unpadded image, beyond 1 at padding, (B or 1, S, 2)."""
    centres = []
    for level, (height, width) in enumerate(shapes):
        x = (torch.arange(width, device=valid.device) + 0.5) / valid[:, level, :1]  # (B, W)
        y = (torch.arange(height, device=valid.device) + 0.5) / valid[:, level, 1:]  # (B, H)
        x = x[:, None].expand(-1, height, -1)
        y = y[:, :, None].expand(-1, -1, width)
        centres.append(torch.stack([x, y], dim=-1).flatten(1, 2))
    return torch.cat(centres, dim=1)
