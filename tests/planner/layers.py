"""Small layers, each with one habit that a plan has to respect or be refused for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, INNER = 16, 32
RULES = {"layers.*.fc": "colwise", "layers.*.out": "rowwise"}


class Layer(nn.Module):
    """x + out(between(fc(x))), where ``between`` is the habit."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], inner: int) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(inner, WIDTH)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.between(self.fc(x)))


class Stream(nn.Module):
    """A habit on the stream itself, before an ordinary MLP."""

    def __init__(self, habit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.habit = habit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.fc(self.habit(x)).relu())


class Gated(nn.Module):
    """A gate that is left whole scales the sharded activations."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.fc(x) * self.gate(x).sigmoid())


class Auxiliary(nn.Module):
    """Returns a statistic of the stream beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + self.out(self.fc(x).relu())
        return y, y * y


class Flattened(nn.Module):
    """Projects tokens of which the batch is merged before (0), between (1) or never (2)."""

    def __init__(self, merged: int, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.merged, self.between = merged, between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x.flatten(0, 1) if self.merged == 0 else x).relu()
        y = self.between(y.flatten(0, 1) if self.merged == 1 else y)
        return x + self.out(y).view(x.shape)


class Threefold(nn.Module):
    """Attention is given one tensor as query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), _Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.attn(h, h, h)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (-1, 4)).transpose(1, 2)

        y = F.scaled_dot_product_attention(
            heads(self.q(query)), heads(self.k(key)), heads(self.v(value))
        )
        return self.o(y.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Two layers of one kind."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x
