"""Attention in a block's own code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS = 32, 4
INPUT = {"x": torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))}
RULES = {
    "layers.*.before": "sequence_parallel",
    "layers.*.{one,two,three}": "colwise",
    "layers.*.last": "rowwise",
}


class Block(nn.Module):
    """Attention without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.wide = HEADS, WIDTH
        self.before = nn.LayerNorm(WIDTH)
        self.one, self.two, self.three, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        """The width of a head, and of all."""
        return -1, -1

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        head, wide = self.sizes(x)
        b, n = x.shape[:2]
        q, k, v = (
            f(x).view(b, n, self.parts, head).transpose(1, 2)
            for f in (self.one, self.two, self.three)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.last(y.transpose(1, 2).reshape(b, n, wide))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attend(self.before(x))


class OfAttributes(Block):
    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        return WIDTH // HEADS, self.wide


class OfInput(Block):
    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        return x.shape[-1] // self.parts, x.shape[-1]


class Model(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
