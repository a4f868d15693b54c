"""Values of a whole sequence that meet its rows: scales and gates made of a condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.planner.helpers import WIDTH, Layer, Stack, plan, refused, stream, wrong


class Conditioned(Stack):
    """Gives every layer a vector for each sequence."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(lambda _: make())
        self.embed = nn.Linear(WIDTH, 12)

    def forward(self, x: torch.Tensor) -> Any:
        c = self.embed(x[:, 0])
        for layer in self.layers:
            x = layer(x, c)
        return x


class Modulated(Layer):
    """Scales, shifts and gates by what its own projection makes of the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(12, 3 * WIDTH))

    def forward(self, x: torch.Tensor, c: Any = None) -> Any:
        shift, scale, gate = self.ada(c).chunk(3, -1)
        y = self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        return x + gate.unsqueeze(1) * self.out(self.between(self.fc(y)))


class Tabled(Layer):
    """Adds a table of its own to the condition, which others made."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 4))
        self.scaler = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, c: Any = None) -> Any:
        a, b, g = (self.scaler(c.unflatten(-1, (3, 4))) + self.table).unbind(1)
        y = x * a.repeat(1, 4)[:, None] + b.sigmoid().mean(-1)[:, None, None]
        return x + g.sum(-1).view(-1, 1, 1) * self.out(self.between(self.fc(y)))


class Both(Modulated):
    """Two makers, one of them given what the other made, and one of them a gate of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(12, WIDTH)
        self.squeeze = Squeeze()

    def forward(self, x: torch.Tensor, c: Any = None) -> Any:
        x = super().forward(x, c) * self.more(c)[:, None].tanh()
        return x * self.squeeze(x)[:, None]


class Twice(Modulated):
    """Uses the condition as it is beside what it makes of it."""

    def forward(self, x: torch.Tensor, c: Any = None) -> Any:
        return super().forward(x, c) * c.mean(-1)[:, None, None]


class Squeeze(nn.Module):
    """A gate made of the mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.mean(1)).sigmoid()


NORM = {"layers.*.norm": "sequence_parallel", "embed": "replicate"}
GATHER = {"style": "replicate", "input": "gather"}
ADA = {**NORM, "layers.*.ada.1": "replicate"}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "by its own projection": (Modulated, ADA),
    "by its own module": (Modulated, {**NORM, "layers.*.ada": "replicate"}),
    "by what it is given": (
        Tabled,
        {"embed": "replicate", "layers.*.table": "replicate", "layers.*.scaler": "replicate"},
    ),
    "by a norm without a rule": (Tabled, {"embed": "replicate", "layers.*.table": "replicate"}),
    "by what is given and what becomes of it": (Twice, ADA),
    "by several": (Both, {**ADA, "layers.*.more": "replicate", "layers.*.squeeze": GATHER}),
}


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns(12)
def test_a_condition_meets_the_rows(name: str, tp: int, sp: bool) -> None:
    make, rules = MODELS[name]
    assert not wrong(Conditioned(make), rules, sp, tp)


def test_its_gradient_is_summed_where_it_is_made() -> None:
    compiled = tpplan.check(Conditioned(Modulated), plan(ADA), 2, True, inputs=stream(8).float())
    assert compiled.modules["layers.0.ada.1"].spread is not None
    assert not compiled.parameter("layers.0.ada.1.weight").summed
    whole = tpplan.check(Conditioned(Modulated), plan(ADA), 2, False, inputs=stream(8).float())
    assert whole.modules["layers.0.ada.1"].spread is None


class Narrow(Conditioned):
    """Its condition is as wide as the sequence that it is traced with is long."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        self.embed = nn.Linear(WIDTH, 8)


class Averaged(Layer):
    """Scales by the mean of what it is given."""

    def forward(self, x: torch.Tensor, c: Any = None) -> Any:
        return x * c.mean(-1)[:, None, None] + self.out(self.between(self.fc(x)))


def test_a_condition_may_be_as_wide_as_the_sequence_is_long() -> None:
    assert not wrong(Narrow(Averaged), {"embed": "replicate"}, True)


class Returning(Averaged):
    """Gives the condition on, of which others make something."""

    def forward(self, x: torch.Tensor, c: Any = None) -> Any:
        return super().forward(x, c), c


class Reusing(Conditioned):
    """Makes something else of the condition when its layers are done with it."""

    def forward(self, x: torch.Tensor) -> Any:
        c = self.embed(x[:, 0])
        for layer in self.layers:
            x, c = layer(x, c)
        return x, c


class Stashed(Conditioned):
    """Hands the condition over where no call shows it."""

    def forward(self, x: torch.Tensor) -> Any:
        c = self.embed(x[:, 0])
        for layer in self.layers:
            layer.c = c
            x = layer(x)
        return x


class Reading(Averaged):
    """Has the condition from elsewhere."""

    def forward(self, x: torch.Tensor, c: Any = None) -> Any:
        return super().forward(x, self.c)


def test_a_condition_of_another_use_besides() -> None:
    said = refused(Reusing(Returning), {"embed": "replicate"}, True)
    assert "a whole tensor from embed, whose gradient would be a part, and of which" in said
    assert "in a module with replicate inside of the layer, for this use alone" in said
    assert said.count("error:") == 1


def test_a_condition_that_is_not_given() -> None:
    said = refused(Stashed(Reading), {"embed": "replicate"}, True)
    assert "a whole tensor from embed, whose gradient would be a part" in said
    assert "make it in a module of the layer with replicate" in said
    assert said.count("error:") == 1
