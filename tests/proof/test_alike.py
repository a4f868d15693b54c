"""Elements that are alike until a step that only some code takes; most of them are not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tpplan

pytestmark = pytest.mark.turns(4)

PLAN: dict[str, Any] = {
    "tpplan": 1,
    "sequence_parallel": False,
    "rules": {
        "layers.*.norm": "sequence_parallel",
        "layers.*.inner.up": "colwise",
        "layers.*.inner.down": "rowwise",
    },
}


class Inner(nn.Module):
    """Keeps what is of its columns, and mixes them where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, most: int = 0, scale: float = 1.0) -> torch.Tensor:
        h = self.up(x).relu() * scale
        if most and x.size(1) > most:
            h = h.softmax(-1)
        self.kept = h.mean((0, 1)).pow(2).mean()
        return self.down(h)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), Inner()

    def forward(self, x: torch.Tensor, most: int = 0, scale: float = 1.0) -> torch.Tensor:
        return x + self.inner(self.norm(x), most, scale)


class Model(nn.Module):
    """``asks``: what its own code does besides."""

    def __init__(self, count: int, asks: str) -> None:
        super().__init__()
        self.layers, self.asks = nn.ModuleList(Layer() for _ in range(count)), asks

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        if self.asks == "draws":
            x = x[:, torch.randperm(x.size(1))] + torch.rand(x.size(0), 1, 1)
        for i, layer in enumerate(self.layers):
            x = layer(x, 9 if self.asks == "told" and i == 2 else 0, 1.0)
        reads = {"in training": self.training, "with labels": y is not None}
        if reads.get(self.asks, False):
            return x, sum(layer.inner.kept for layer in self.layers)
        if self.asks == "reads in training" and self.training:
            return x, sum(layer.inner.down.bias.sum() for layer in self.layers)
        return x


def checked(count: int, asks: str) -> None:
    torch.manual_seed(0)
    model = Model(count, asks)
    tpplan.check(model, PLAN, tp=2, inputs={"x": torch.randn(2, 8, 16)})


@pytest.mark.parametrize(
    ("count", "asks"),
    [
        *((count, asks) for count in (2, 4, 6) for asks in ("in training", "with labels")),
        *((count, "told") for count in (4, 6)),  # the third layer is
    ],
)
def test_what_differs_in_some_step_only_is_refused(count: int, asks: str) -> None:
    with pytest.raises(tpplan.PlanError, match="computes something else than whole"):
        checked(count, asks)


@pytest.mark.parametrize("asks", ["", "reads in training", "draws"])
def test_others_are_right(asks: str) -> None:
    checked(6, asks)
