"""Layers with random numbers that are one for many: for a sample, a token, all heads, a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, INNER, HEAD = 16, 32, 4
Draw = Callable[[torch.Tensor], torch.Tensor]


def _kept(*size: int) -> torch.Tensor:
    return (torch.rand(*size) < 0.5).float()


def _row(x: torch.Tensor) -> torch.Tensor:
    """Stochastic depth (Huang et al. 2016), as libraries of vision write it."""
    noise = torch.empty([len(x)] + [1] * (x.ndim - 1), dtype=x.dtype).bernoulli_(0.5)
    return x * noise.div_(0.5)


# what becomes of a tensor by what is drawn: whether that is one for what the ranks share out
ONE: dict[str, Draw] = {
    "a sample": _row,
    "a sample, repeated": lambda x: x * _kept(len(x), 1, 1).expand_as(x),
    "a sample, as timm": lambda x: x * x.new_empty((len(x), 1, 1)).bernoulli_(0.5),
    "a sample, of one": lambda x: x * torch.rand_like(x[:, :1, :1]),
    "a sample, of odds": lambda x: x * torch.bernoulli(x.new_full((len(x), 1, 1), 0.5)),
    "a number": lambda x: x * (1 + torch.randn(())),
    "other samples": lambda x: x + 0.5 * x[torch.randperm(len(x))].detach(),
}
EVERY: dict[str, Draw] = {
    "each": lambda x: x * _kept(*x.shape),
    "each, in place": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "each, alike": lambda x: x * torch.rand_like(x),
    "of ones": lambda x: x * F.dropout(torch.ones(1).expand(x.shape), 0.5),
    "far out": lambda x: x + torch.empty_like(x).cauchy_().tanh(),
    "above nothing": lambda x: x * torch.empty_like(x).log_normal_(),
    "tries": lambda x: x / torch.empty_like(x).geometric_(0.5),
    "yes or no": lambda x: x * torch.empty_like(x).random_(0, 2),
    "counts": lambda x: x * torch.poisson(x.detach().abs()),
    "counts of three": lambda x: x * torch.binomial(torch.full_like(x, 3), x.detach().sigmoid()),
    "with its mask": lambda x: torch.native_dropout(x, 0.5, True)[0],
}
ON_STREAM = {
    **dict.fromkeys(ONE, True),
    **dict.fromkeys(EVERY, False),
    "columns": True,
    "tokens": False,
    "tokens, of ones": False,
    "tokens, dropped out": False,
    "columns, dropped out": True,
}
IN_REGION = {
    **dict.fromkeys(ONE, True),
    **dict.fromkeys(EVERY, False),
    "columns": False,
    "tokens": True,
    "tokens, of ones": True,
    "tokens, dropped out": True,
    "columns, dropped out": False,
    "slopes": False,
}
DRAWS: dict[str, Draw] = {
    **ONE,
    **EVERY,
    "columns": lambda x: x * _kept(len(x), 1, x.size(-1)),
    "tokens": lambda x: x * _kept(len(x), x.size(1), 1),
    "tokens, of ones": lambda x: x * F.dropout(torch.ones_like(x[:, :, :1]), 0.5),
    "tokens, dropped out": lambda x: F.dropout1d(x, 0.5),
    "columns, dropped out": lambda x: F.dropout1d(x.mT, 0.5).mT,
    "slopes": lambda x: torch.rrelu(x - 1, training=True),
}


class Layer(nn.Module):
    """Draws for its columns, or for what it gives."""

    def __init__(self, draw: Draw, inside: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.draw, self.inside = draw, inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.fc(self.norm(x)))
        y = self.draw(y) if self.inside and self.training else y
        y = self.out(y)
        return x + (y if self.inside or not self.training else self.draw(y))


class Attending(nn.Module):
    """Draws for the scores of all heads, or of each."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.norm, self.each = nn.LayerNorm(WIDTH), each
        self.fc, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.fc(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in parts)
        scores = q @ k.mT
        if self.training:
            scores = scores + torch.randn(
                len(x), scores.size(1) if self.each else 1, *scores.shape[2:]
            )
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Noisy(nn.Module):
    """Layers one after the other, each of which draws by itself."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def plan_of(packed: bool) -> dict[str, Any]:
    first: Any = {"style": "colwise", "packed": ["q", "k", "v"]} if packed else "colwise"
    rules = {
        "layers.*.norm": "sequence_parallel",
        "layers.*.fc": first,
        "layers.*.out": "rowwise",
    }
    return {"tpplan": 1, "rules": rules}
