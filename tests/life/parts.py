"""What the blocks are made of: plain modules whose ``repr`` says nothing about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, INNER, HEAD, VOCAB = 16, 32, 4, 13


class Quiet(nn.Module):
    """Nothing can be told from its ``repr``."""

    def __repr__(self) -> str:
        return "Quiet()"


class Layer(Quiet):
    """x + scale · inside(x); the scale is another one in every layer."""

    recompute: bool | None = None  # how its own code checkpoints its inside: reentrant, or not

    def __init__(self, index: int) -> None:
        super().__init__()
        self.scale = 1 + index / 4

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        if self.recompute is None or not self.training:
            return x + self.scale * self.inside(x, *more)
        y: torch.Tensor = checkpoint(self.inside, x, *more, use_reentrant=self.recompute)
        return x + self.scale * y


class Stack(Quiet):
    """Layers of one kind, one after the other."""

    recompute: bool | None = None  # how every layer is checkpointed

    def __init__(self, make: Callable[[int], nn.Module], count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(index) for index in range(count))

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        for layer in self.layers:
            if self.recompute is None or not self.training:
                x = layer(x, *more)
            else:
                x = checkpoint(layer, x, *more, use_reentrant=self.recompute)
        return x


class MLP(Quiet):
    """Two projections around an activation."""

    def __init__(self, bias: bool = False, out_bias: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, INNER, bias=bias)
        self.out = nn.Linear(INNER, WIDTH, bias=out_bias)

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return F.gelu(y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.between(self.fc(x)))


class Conv1D(Quiet):
    """A projection whose weight is stored (in, out)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, out))
        self.bias = nn.Parameter(torch.empty(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], rows.size(-1))


class RMSNorm(Quiet):
    """A norm of the last dimension, with an epsilon of its own."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


def heads(x: torch.Tensor) -> torch.Tensor:
    """(batch, sequence, width) as (batch, heads, sequence, head)."""
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention in plain products, which have second derivatives; heads side by side."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scores = q @ k.mT / HEAD**0.5
    if bias is not None:
        scores = scores + bias
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


class Attention(Quiet):
    """q, k and v in three projections; key-value heads may be fewer."""

    def __init__(self, kv: int = WIDTH) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, kv, bias=False) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(p(x)) for p in (self.q, self.k, self.v))
        return self.o(attend(q, k, v))
