"""What regions hold besides projections: scales of heads, tables that heads share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tests.suggestion.test_suggest import rules

WIDTH, HEADS, DIM = 32, 4, 8
FAR = 20


class Unit(nn.Module):
    """A direction, scaled for each head, as in Dehghani et al. 2023 (ViT-22B)."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(HEADS, 1, DIM) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1) * self.gamma


class Attention(nn.Module):
    """With a norm of its own, and positions relative to each query (Shaw et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scaled, self.also = nn.LayerNorm(WIDTH), Unit(), Unit()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.far = nn.Embedding(2 * FAR + 1, DIM)
        self.heads = HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.view(*t.shape[:2], self.heads, -1).transpose(1, 2) for t in parts)
        q, k = self.scaled(q), self.also(k)
        at = torch.arange(x.size(1))
        near = self.far((at[:, None] - at).clamp(-FAR, FAR) + FAR)
        scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, near)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.turns(24)
def test_scales_and_tables() -> None:
    model, inputs = Model(), {"ids": torch.randint(1, 40, (2, 8))}
    plan = tpplan.suggest(model, 2, inputs=inputs)
    found = rules(plan)
    assert found["layers.*.{scaled,also}.gamma"] == "colwise"
    assert found["layers.*.far"] == "replicate"
    assert found["layers.*.norm"] == "sequence_parallel"
    for sp in (False, True):
        assert tpplan.verify(model, plan, 4, sequence_parallel=sp, inputs=inputs).rank_share < 0.4
