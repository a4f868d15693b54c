"""What is made of parameters alone enters sharded regions: learned latents, queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan

pytestmark = pytest.mark.turns(4)

WIDTH, HEAD = 32, 8
INPUT = {"x": torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0))}


class Attention(nn.Module):
    """From one sequence to another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, HEAD)).transpose(1, 2)

        y = F.scaled_dot_product_attention(
            heads(self.q(x)), heads(self.k(states)), heads(self.v(states))
        )
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Latents look at the states and at themselves; one norm serves the queries and the keys."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.beside = beside
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.cross, self.among = Attention(), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, latents: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        own, states = self.norms[0](latents), self.norms[1](states)
        seen = torch.cat([states, own], 1) if self.beside else states
        latents = latents + self.cross(own, seen)
        own = self.norms[2](latents)
        latents = latents + self.among(own, own)
        return latents + self.down(F.gelu(self.up(self.norms[3](latents))))  # type: ignore[no-any-return]


class Perceiver(nn.Module):
    def __init__(self, beside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.latents = nn.Parameter(torch.randn(6, WIDTH))
        self.layers = nn.ModuleList(Layer(beside) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        for layer in self.layers:
            latents = layer(latents, x)
        return latents


RULES: dict[str, Any] = {
    "latents": "replicate",
    "layers.*.norms.*": "sequence_parallel",
    "layers.*.{cross,among}.{q,k,v}": "colwise",
    "layers.*.{cross,among}.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}


@pytest.mark.parametrize("beside", [False, True])
def test_latents(beside: bool) -> None:
    plan = {"tpplan": 1, "rules": RULES}
    tpplan.check(Perceiver(beside), plan, 2, False, inputs=INPUT)
    result = tpplan.verify(Perceiver(beside), plan, tp=2, sequence_parallel=False, inputs=INPUT)
    assert result.gradient_error < 1e-5


class Pooling(nn.Module):
    """Learned queries, as they are, normalised, or added to what they find."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.query = nn.Parameter(torch.randn(2, 3, WIDTH))
        self.norm, self.pool = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query if self.kind == "bare" else self.norm(self.query)
        found = self.pool(query, x)
        return query + found if self.kind == "added" else found  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["bare", "normalised", "added"])
def test_queries(kind: str) -> None:
    whole = {"query": "replicate", "norm": "replicate"}
    rules = {**whole, "pool.{q,k,v}": "colwise", "pool.out": "rowwise"}
    plan = {"tpplan": 1, "rules": rules}
    result = tpplan.verify(Pooling(kind), plan, tp=2, sequence_parallel=False, inputs=INPUT)
    assert result.gradient_error < 1e-5
