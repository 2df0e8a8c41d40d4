"""A small decoder-only transformer over bytes, in plain torch: nothing in here knows of ranks.

The number of heads is read from the width of what the projections return, so they may be split by columns (tensor
parallelism); and a model may have some of the layers only (a pipeline stage), each with the name that it has in the
whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; width / heads is a head's width."""

    context: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, shape.width)
        self.value = nn.Linear(shape.width, shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, _ = x.shape
        return x.view(batch, context, -1, self.head_width).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self, shape: Shape, mlp: Callable[[Shape], nn.Module]) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = mlp(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        y: torch.Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y


class Transformer(nn.Module):
    """Bytes of (batch, context) to logits of (batch * context, 256).

    layers: the layers that this stage of a pipeline has; the first stage takes bytes, the last one returns logits, and
    between stages go activations of (batch, context, width).
    """

    def __init__(
        self, shape: Shape, *, mlp: Callable[[Shape], nn.Module] = MLP, layers: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        layers = range(shape.layers) if layers is None else layers
        self.is_first, self.is_last = 0 in layers, shape.layers - 1 in layers
        if self.is_first:
            self.bytes = nn.Embedding(BYTES, shape.width)
            self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleDict({str(layer): Block(shape, mlp) for layer in layers})
        if self.is_last:
            self.norm = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, BYTES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        if self.is_last:
            x = self.head(self.norm(x).flatten(0, 1))
        return x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of a byte, in nats."""
    return nn.functional.cross_entropy(logits, targets.flatten())
