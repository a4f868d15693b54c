"""What modules beside the projections compute, by their numbers: right on ranks, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.planner.helpers import INNER, WIDTH, Layer, Stack, refused, wrong

NORM = {"layers.*.norm": "sequence_parallel"}


class Normed(Layer):
    """A layer with a module before its MLP."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.out(self.fc(self.norm(x)).relu())


class Distant(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.pad(x, (0, 0, 4, 0))[:, : x.size(1)]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.size(1)]


class BatchNorm(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class GradientOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g / g.norm()


class ClippedGradient(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return GradientOfAll.apply(x)


class InTraining(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True) if self.training else x


MIXING = (Distant, Positions, lambda: BatchNorm(WIDTH), ClippedGradient, InTraining)


class Before(Stack):
    """Something that runs before the layers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(lambda i: Layer())
        self.norm = norm

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.norm(x))


@pytest.mark.parametrize("kind", MIXING)
def test_positions_that_see_each_other(kind: Any) -> None:
    text = refused(Before(kind()), {"norm": "sequence_parallel"}, True)
    assert "depends on other positions" in text


def test_along_the_sequence_dimension() -> None:
    class First(Positions):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[: x.size(0), None]

    rules = {"norm": "sequence_parallel"}
    text = refused(Before(First()), rules, True, sequence_dim=0)
    assert "depends on other positions" in text


def test_modules_of_one_repr() -> None:
    class Centred(nn.Module):
        def __init__(self, centred: bool) -> None:
            super().__init__()
            self.centred = centred

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(1, keepdim=True) if self.centred else x

    model = Stack(lambda i: Normed(Centred(i == 1)))
    assert "layers.*.norm" in refused(model, NORM, True)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: float, shift: Any = None) -> torch.Tensor:
        return x * scale


class WithArgument(Normed):
    def forward(self, x: torch.Tensor) -> Any:
        return x + self.out(self.fc(self.norm(x, 2.0, shift=[None])).relu())


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, *, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight


class ByKeyword(Normed):
    def forward(self, x: torch.Tensor) -> Any:
        return x + self.out(self.fc(self.norm(hidden=x)).relu())


@pytest.mark.turns(4)
@pytest.mark.parametrize("style", ["sequence_parallel", "replicate"])
@pytest.mark.parametrize("kind", [lambda: WithArgument(Scaled()), lambda: ByKeyword(Named())])
def test_called_as_the_model_calls_it(kind: Any, style: str) -> None:
    assert not wrong(Stack(lambda i: kind()), {"layers.*.norm": style}, True)


class BeforeByKeyword(Stack):
    def __init__(self) -> None:
        super().__init__(lambda i: Layer())
        self.norm = Named()

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.norm(hidden=x))


@pytest.mark.parametrize("style", ["sequence_parallel", "replicate"])
def test_called_by_keyword_outside_the_stack(style: str) -> None:
    assert not wrong(BeforeByKeyword(), {"norm": style}, True)


# --- norms on sharded columns


class RMS(nn.Module):
    def __init__(self, width: int = INNER, eps: float = 1e-6, detached: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.detached = eps, detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * (scale.detach() if self.detached else scale) * self.weight


class NoAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(INNER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt() * self.weight


class OwnLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(INNER)), nn.Parameter(torch.zeros(INNER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unit = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()
        return unit * self.weight + self.bias


class Inside(Layer):
    """A norm between the projections, given heads of ``head`` columns."""

    def __init__(self, norm: nn.Module, head: int = INNER) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def between(self, y: torch.Tensor) -> torch.Tensor:
        y = y if self.head == INNER else y.unflatten(-1, (-1, self.head))
        out = self.norm(y)
        return out if self.head == INNER else out.flatten(2)


COLUMNS = {"layers.*.norm": "colwise"}


@pytest.mark.parametrize("sp", [False, True])
def test_norms_of_the_width_by_their_own_eps(sp: bool) -> None:
    model = Stack(lambda i: Inside(RMS(eps=1e-2 if i else 1e-6)))
    assert not wrong(model, COLUMNS, sp)
    assert not wrong(Stack(lambda i: Inside(NoAttribute())), COLUMNS, sp)


def test_norms_that_are_not_of_the_width() -> None:
    heads = Stack(lambda i: Inside(RMS(2), head=2))
    assert "its part of what the whole model has" in refused(heads, COLUMNS, False)
    assert "its part of what" in refused(Stack(lambda i: Inside(OwnLayerNorm())), COLUMNS, False)
    detached = Stack(lambda i: Inside(RMS(detached=True)))
    assert "its part of what" in refused(detached, COLUMNS, False)
    few = refused(heads, COLUMNS, False, tp=4)
    assert "tp 4 does not divide the 2 rows of its weight" in few


def test_groups_are_divided() -> None:
    class Grouped(Inside):
        def between(self, y: torch.Tensor) -> torch.Tensor:
            return self.norm(y.flatten(0, 1)).view(y.shape)

    model = Stack(lambda i: Grouped(nn.GroupNorm(4, INNER)))
    assert not wrong(model, COLUMNS, False)
    assert "does not divide its 4 groups" in refused(model.float(), COLUMNS, False, tp=8)
