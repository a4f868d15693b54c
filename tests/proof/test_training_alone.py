"""Models that say themselves that they need gradients of their inputs, as speech encoders do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.stacked import RULES, WIDTH, Layer

PLAN = {"tpplan": 1, "rules": {p: s for p, s in RULES.items() if p != "table"}}


class Last(torch.autograd.Function):
    """The gradient of the last column is larger: on the last rank alone that is right."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1 + (torch.arange(gradient.shape[-1]) == gradient.shape[-1] - 1))


class Listening(nn.Module):
    """``mistaken``: whether its layers compute, in training alone, what no rank's columns can."""

    def __init__(self, mistaken: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(self.inner) for _ in range(2))
        self.norm, self.mistaken = nn.LayerNorm(WIDTH), mistaken

    def inner(self, h: Tensor) -> Tensor:
        if not self.training or not self.mistaken:
            return h.relu()
        return Last.apply(h).relu()  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        x = x[:]
        if self.training:
            x.requires_grad = True
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)  # type: ignore[no-any-return]


def checked(model: nn.Module) -> None:
    tpplan.check(model, PLAN, 2, False, inputs=torch.randn(2, 8, WIDTH))


def test_right() -> None:
    checked(Listening(False))


def test_a_mistake_in_training() -> None:
    with pytest.raises(tpplan.PlanError, match=r"the gradient of .* differs in training"):
        checked(Listening(True))


class Infinite(Listening):
    """Of which no step in training gives numbers that could be compared."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0.0 if not self.training else (x * 0).log().sum())


def test_no_step_in_training_is_said() -> None:
    with pytest.warns(UserWarning, match="no step in training was compared"):
        checked(Infinite(False))
