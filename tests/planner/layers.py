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


class Latent(nn.Module):
    """Keys and values come of a small latent, of which a part is of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), _Latent()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm(x))


class _Latent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.a = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 12)
        self.b, self.o = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> Any:
        latent, shared = self.a(states).split([8, 4], -1)
        q = self.q(states).unflatten(-1, (-1, 4)).transpose(1, 2)
        k = self.b(latent).unflatten(-1, (-1, 4)).transpose(1, 2)
        shared = shared.unsqueeze(1).expand(-1, k.size(1), -1, -1)
        y = F.scaled_dot_product_attention(q, k + shared, k)
        return self.o(y.transpose(1, 2).flatten(2))


class ForEachHead(nn.Module):
    """A norm for each head, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(INNER // 8))
        for norm in self.norms:
            nn.init.normal_(norm.weight)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.fc(x).split(8, -1)
        assert len(heads) == len(self.norms)
        return x + self.out(
            torch.cat([norm(h) for norm, h in zip(self.norms, heads, strict=True)], -1)
        )


class AcrossHeads(nn.Module):
    """A number for each head that comes of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.mix = nn.Linear(INNER, INNER // 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.fc(x)
        scale = self.mix(heads).sigmoid().unsqueeze(-1)
        return x + self.out((heads.unflatten(-1, (-1, 8)) * scale).flatten(-2))


class Beside(nn.Module):
    """Is given something of the stream beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return x * beside + self.out(self.fc(x).relu())


class BesideStack(nn.Module):
    """Hands its layers a parameter of its own, and what it makes of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(Beside() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = start = self.table(x.sum(-1).long() % WIDTH)
        for layer in self.layers:
            x = layer(x + self.shift.expand_as(x), start)
        return x
