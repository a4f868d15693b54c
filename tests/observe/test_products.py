"""A projection is replaced where its own forward is exactly a product, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpplan
from tests.planner.helpers import INNER, WIDTH, Layer, Stack, plan, refused, stream, wrong
from tpplan.observe import products


class Shifted(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 0.5


class Detached(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.detach())


class FrozenBias(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight) + self.bias.detach()


class Rounded(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight + (self.weight.round() - self.weight).detach()
        return F.linear(input, weight, self.bias)


class Clamped(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.clamp(-50, 50))


class InTraining(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input * 2 if self.training else input)


class Plain(nn.Module):
    """A matrix that is not torch's Linear, and does more than multiply."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight).tanh()


@pytest.mark.parametrize(
    "kind", [Shifted, Detached, FrozenBias, Rounded, Clamped, InTraining, Plain]
)
def test_more_than_a_product(kind: Any) -> None:
    def make(leaf: str, inputs: int, outputs: int) -> nn.Module:
        layer = Layer()
        setattr(layer, leaf, kind(inputs, outputs))
        return layer

    first = refused(Stack(lambda i: make("fc", WIDTH, INNER)), {}, False)
    assert "layers.*.fc" in first
    assert "multipl" in first
    last = refused(Stack(lambda i: make("out", INNER, WIDTH)), {}, False)
    assert "layers.*.out" in last
    assert "does not just multiply by its weight" in last


class Same(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        shape = (*input.shape[:-1], self.out_features)
        return (input.reshape(-1, input.size(-1)) @ self.weight.T + self.bias).view(shape)


class Transposed(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.nx, self.nf = inputs, outputs
        self.weight = nn.Parameter(torch.rand(inputs, outputs))
        self.bias = nn.Parameter(torch.rand(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(
            *x.shape[:-1], self.nf
        )


class Of(Layer):
    def __init__(self, kind: Any, inner: int = INNER) -> None:
        super().__init__()
        self.fc, self.out = kind(WIDTH, inner), kind(inner, WIDTH)


@pytest.mark.parametrize("kind", [Same, Transposed])
def test_products_by_other_means(kind: Any) -> None:
    assert not wrong(Stack(lambda i: Of(kind)), {}, True)
    # square ones, of which the numbers alone tell how they are stored
    assert not wrong(Stack(lambda i: Of(kind, WIDTH)), {}, False)


@pytest.mark.parametrize("kind", [Same, Transposed, Rounded])
def test_large_ones_are_run_narrow(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_SMALL", WIDTH * INNER // 4)
    monkeypatch.setattr(products, "_LARGE", WIDTH * INNER // 2)
    with torch.device("meta"):
        model = Stack(lambda i: Of(kind), 1)
    inputs = stream(dtype=torch.float32)
    if kind is not Rounded:
        assert tpplan.check(model, plan({}), 2, False, inputs=inputs)
        return
    with pytest.raises(tpplan.PlanError, match="does not just multiply"):
        tpplan.check(model, plan({}), 2, False, inputs=inputs)
