"""Columns in other orders: the parts of each head side by side, every other column."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.planner.helpers import INNER, WIDTH, Stack, refused, wrong

HEADS, DIM = 4, 4


class Heads(nn.Module):
    """Query, key and value of each head side by side; a size in the code is that of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)
        self.size = HEADS * DIM

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.fc(x).unflatten(-1, (-1, 3 * DIM)).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.out(y.reshape(*y.shape[:2], self.size))


def rules(size: str) -> dict[str, Any]:
    packed = {"parts": ["q", "k", "v"], "repeat": "heads"}
    return {
        "layers.*": {"style": "attention", "attributes": {"size": size}},
        "layers.*.fc": {"style": "colwise", "packed": packed},
    }


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_parts_of_each_head_say_its_width(sp: bool) -> None:
    assert not wrong(Stack(lambda _: Heads()), rules("heads * head_dim"), sp)


def test_a_size_of_something_else_is_refused() -> None:
    said = refused(Stack(lambda _: Heads()), rules("3 * heads * head_dim"), False)
    assert "is 48, but size is 16" in said


class RMS(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Interleaved(nn.Module):
    """A gated MLP of every other column, with a norm over what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.norm = RMS(INNER)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x)
        return x + self.out(self.norm(y[..., ::2].tanh() * y[..., 1::2]))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_a_norm_over_every_other_column(sp: bool, tp: int) -> None:
    assert not wrong(Stack(lambda _: Interleaved()), {"layers.*.norm": "colwise"}, sp, tp)


class Halves(Interleaved):
    """The same of halves, without a word of it in the plan."""

    def forward(self, x: torch.Tensor) -> Any:
        gate, up = self.fc(x).chunk(2, -1)
        return x + self.out(self.norm(gate.tanh() * up))


def test_a_norm_over_halves_that_the_plan_does_not_name_is_refused() -> None:
    refused(Stack(lambda _: Halves()), {"layers.*.norm": "colwise"}, False)
