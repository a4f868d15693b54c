"""A small stack of layers between a table and a norm, for a test's own code in and around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH, VOCAB = 16, 40
RULES = {
    "table": "vocab",
    "layers.*.norm": "sequence_parallel",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "norm": "sequence_parallel",
}
PLAN: dict[str, Any] = {"tpplan": 1, "rules": RULES}
Code = Callable[[torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """``inner``: what is done to the columns between the projections; ``outer``: to the stream."""

    def __init__(self, inner: Code = torch.relu, outer: Code = lambda x: x) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.outer = inner, outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x) + self.down(self.inner(self.up(self.norm(x))))


class Stacked(nn.Module):
    def __init__(self, count: int = 3, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, ids: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        x = self.before(self.table(ids), *given)
        for layer in self.layers:
            x = layer(x)
        return self.after(self.norm(x), *given)

    def before(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        """Of what the first layer is given."""
        return x

    def after(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        """Of what the norm gives."""
        return x


def ids_of(batch: int, length: int) -> torch.Tensor:
    """Random ids, the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(VOCAB, (batch, length), generator=generator)
