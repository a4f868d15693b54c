"""Modules that multiply by bare parameters of their own, and regions beside the stack."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, same
from tests.life.parts import INNER, WIDTH, Layer, Stack
from tests.ranks import Ranks
from tests.rewrite import MODES
from tpplan.planner import compile_plan

pytestmark = pytest.mark.turns(4)

RULES: Mapping[str, Any] = {
    "layers.*.mlp.wide": "colwise",
    "layers.*.mlp.narrow": {"style": "rowwise", "dim": 0},
    "layers.*.mlp.{bias,gamma}": "replicate",
}
SIDE: Mapping[str, Any] = {
    "layers.*.mlp.fc": "colwise",
    "layers.*.mlp.out": "rowwise",
    "side.fc": "colwise",
    "side.out": "rowwise",
}


def numbers(*shape: int) -> nn.Parameter:
    """A parameter of random numbers."""
    return nn.Parameter(torch.randn(*shape) * 0.3)


class Bare(nn.Module):
    """Two products, and what the function does to their result."""

    def __init__(self, do: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.wide, self.narrow = numbers(INNER, WIDTH), numbers(INNER, WIDTH)
        self.bias, self.gamma = numbers(WIDTH), numbers(WIDTH)
        self.drop, self.do = nn.Dropout(0.5), do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.wide).relu() @ self.narrow
        return y if self.do is None else self.do(self, y)


class WithLinear(nn.Module):
    """A layer makes the columns, a bare parameter sums them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.narrow = nn.Linear(WIDTH, INNER), numbers(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).relu() @ self.narrow


class Around(Layer):
    """A layer around any module, which it may leave out."""

    def __init__(self, index: int, mlp: nn.Module, skipped: bool = False) -> None:
        super().__init__(index)
        self.mlp, self.skipped = mlp, skipped

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return x if self.skipped else self.mlp(x)


def stack(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Stack(lambda i: Around(i, make()))


def plan(rules: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"tpplan": 1, **more, "rules": dict(rules)}


def x_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed))


RIGHT: Mapping[str, tuple[Callable[[], nn.Module], Mapping[str, Any]]] = {
    "added": (lambda: Bare(lambda m, y: y + m.bias), RULES),
    "scaled": (lambda: Bare(lambda m, y: y * m.gamma), RULES),
    "added twice": (lambda: Bare(lambda m, y: y + m.bias + m.bias), RULES),
    "a layer before": (
        WithLinear,
        {"layers.*.mlp.fc": "colwise", "layers.*.mlp.narrow": RULES["layers.*.mlp.narrow"]},
    ),
}


@MODES
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.turns(12)
def test_right(name: str, sp: bool) -> None:
    make, rules = RIGHT[name]
    result = tpplan.verify(
        lambda: stack(make), plan(rules), 2, sequence_parallel=sp, inputs={"x": x_of()}
    )
    assert result.gradient_error <= 1e-5
    tpplan.check(stack(make), plan(rules), 2, sp, inputs={"x": x_of()})


def test_a_bias_of_several_layers() -> None:
    model = stack(lambda: Bare(lambda m, y: y + m.bias))
    model.layers[1].mlp.bias = model.layers[0].mlp.bias  # type: ignore[index, union-attr]
    assert tpplan.verify(model, plan(RULES), 2, inputs={"x": x_of()}).gradient_error <= 1e-5


DONE: Mapping[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "relu": lambda m, y: y.relu(),
    "one": lambda m, y: y + 1.0,
    "exp": lambda m, y: y + m.bias.exp(),
}


@pytest.mark.parametrize("name", DONE)
def test_what_is_done_to_the_parts_of_a_sum_is_refused(name: str) -> None:
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(stack(lambda: Bare(DONE[name])), plan(RULES), 2, inputs={"x": x_of()})
    said = str(caught.value)
    assert "gives parts that do not sum up" in said or "something else than whole" in said
    assert "be done outside of this module" in said or "needs the whole" in said


def test_parameters_that_nothing_computes_with() -> None:
    torch.manual_seed(0)
    model = Stack(lambda i: Around(i, Bare(), skipped=i == 1))
    with pytest.raises(tpplan.PlanError, match="wide: was not called in the forward pass"):
        tpplan.check(model, plan(RULES), 2, inputs={"x": x_of()})


# --- dropout of what is a sum, or whole


def drops(how: str) -> Callable[[], nn.Module]:
    """Dropout of the sum, as a module or as a function."""
    as_module = how == "module"
    return lambda: Bare(lambda m, y: m.drop(y) if as_module else F.dropout(y, 0.5, m.training))


def dropout_job(mesh: DeviceMesh, sp: bool, how: str) -> Errors:
    """Half of the sum is dropped, the same half on every rank: not a half of each part."""
    model = tpplan.parallelize(
        stack(drops(how)), plan(RULES), mesh, sequence_parallel=sp, inputs={"x": x_of()}
    )
    torch.manual_seed(0)
    x = torch.randn(4, 64, WIDTH)
    model.layers = model.layers[:1]
    dropped = (model(x) == x).float().mean().item()
    return {f"{dropped}": same(0.45 < dropped < 0.55)}


@MODES
@pytest.mark.parametrize("how", ["module", "function"])
def test_dropout_of_a_sum(ranks: Ranks, sp: bool, how: str) -> None:
    assert not beyond(ranks.run(2, dropout_job, sp, how))


class Side(nn.Module):
    """A stack, and a region beside it that is given something else, or the stream."""

    def __init__(self, join: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers = stack(MLP).layers
        self.side, self.join = MLP(), join

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:  # type: ignore[union-attr]
            x = layer(x)
        return self.join(self, x, z)


class MLP(nn.Module):
    """Two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.fc(x).relu())


JOINS: Mapping[str, Callable[..., torch.Tensor]] = {
    "added": lambda m, x, z: x + m.side(z),
    "pooled": lambda m, x, z: F.dropout(m.side(x.mean(1)), 0.5, m.training),
    "picked": lambda m, x, z: F.dropout(m.side(x[:, 0]), 0.5, m.training),
    "all positions": lambda m, x, z: F.dropout(m.side(x), 0.5, m.training),
}


@MODES
@pytest.mark.parametrize("join", JOINS)
@pytest.mark.turns(12)
def test_beside_the_stack(join: str, sp: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Side(JOINS[join]), {"x": x_of(1), "z": x_of(2)}
    stated = plan(SIDE, layers="layers.*")
    assert tpplan.verify(model, stated, 2, sequence_parallel=sp, inputs=inputs).checks
    compiled = compile_plan(
        copy.deepcopy(model), tpplan.load_plan(stated), 2, sequence_parallel=sp, inputs=inputs
    )
    assert compiled.modules[""].draws in (None, "whole")


# --- several calls


class Ways(nn.Module):
    """A region beside the stack that is given the model's own argument, or the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.side = stack(MLP).layers, MLP()

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:  # type: ignore[union-attr]
            x = layer(x)
        return self.side(x) if z is None else x + self.side(z)


@MODES
def test_calls_that_enter_a_region_at_different_depths(sp: bool) -> None:
    torch.manual_seed(0)
    calls = [{"x": x_of(1), "z": x_of(2)}, {"x": x_of(3)}]
    tpplan.check(Ways(), plan(SIDE, layers="layers.*"), 2, sp, inputs=calls)


class Hot(nn.Module):
    """A stack whose second way gives numbers that nobody can compare."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack(MLP).layers

    def forward(self, x: torch.Tensor, hot: bool = False) -> torch.Tensor:
        for layer in self.layers:  # type: ignore[union-attr]
            x = layer(x)
        return x.masked_fill(x == x, float("-inf")) if hot else x


def test_every_call_gives_numbers() -> None:
    rules = {n: rule for n, rule in SIDE.items() if n.startswith("layers")}
    calls = [{"x": x_of()}, {"x": x_of(), "hot": True}]
    with pytest.raises(tpplan.PlanError, match="no numbers that could be compared"):
        tpplan.check(Hot(), plan(rules), 2, inputs=calls)
    with pytest.raises(tpplan.PlanError, match="an empty list holds no call"):
        tpplan.check(Hot(), plan(rules), 2, inputs=[])
