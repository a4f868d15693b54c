"""Regions that cannot be shared out: left whole with all that they hold, and the rest is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpplan

WIDTH, HEADS = 16, 4


class Mixed(nn.Module):
    """Attention whose scores are mixed across heads, as in DeepViT (Zhou et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.between = nn.Parameter(torch.randn(HEADS, HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        scores = torch.einsum("bhij,hg->bgij", (q @ k.mT).softmax(-1), self.between)
        out: torch.Tensor = self.out((scores @ v).transpose(1, 2).flatten(2))
        return out


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )


class Listed(nn.Module):
    """Layers that are lists, which the model does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleList([Mixed(), MLP()]) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for attention, mlp in self.layers:
            x = x + attention(x)
            x = x + mlp(x)
        return x


@pytest.mark.turns(24)
def test_a_parameter_of_a_layer_that_is_left_whole() -> None:
    model, inputs = Listed(), {"ids": torch.randint(1, 40, (2, 8))}
    plan = tpplan.suggest(model, 2, inputs=inputs)
    assert "layers.*.0.between:" in plan.text
    assert "# not sharded: layers.*" in plan.text
    assert tpplan.verify(model, plan, 4, inputs=inputs).rank_share < 0.6
