"""The arithmetic of the proof: what is random for everyone, and what backward runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.proof.odd import MLP, WIDTH, Stack
from tests.proof.test_prove import PLAN, example
from tpplan.proof.exact import exact
from tpplan.proof.step import Scene, step


class Centred(Stack):
    """Its numbers add up to nothing, whatever its weights are."""

    def forward(self, x: torch.Tensor) -> Any:
        return F.layer_norm(super().forward(x), (WIDTH,))


def test_objectives_weigh_each_number_differently() -> None:
    model = Centred(MLP).double()
    with exact():
        result = step(model, Scene("", ((example().double(),), {})))
    gradients = [g for g in result.gradients.values() if g is not None]
    assert gradients
    assert min(float(g.abs().max()) for g in gradients) > 1e-3


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_a_model_whose_numbers_cancel_is_proved(sp: bool) -> None:
    tpplan.check(Centred(MLP), PLAN, 2, sp, inputs=example())


class Dropping(Stack):
    """Drops out, in layers that backward runs again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(lambda i: MLP(i, lambda _, y: F.dropout(y.float().relu(), 0.5)))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_backward_runs_checkpointed_code_in_the_same_arithmetic(reentrant: bool) -> None:
    again, plain = Dropping(reentrant).double(), Stack(MLP).double()
    plain.load_state_dict(again.state_dict())
    scene = Scene("", ((example().double(),), {}), training=True)
    with exact():
        found, due = step(again, scene), step(plain, scene)
    for name, gradient in due.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_dropout_in_checkpointed_layers_is_proved(reentrant: bool, sp: bool) -> None:
    class Modular(MLP):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.drop = nn.Dropout(0.5)
            self.between = lambda module, y: module.drop(y.relu())

    model = Dropping(reentrant)
    model.layers = nn.ModuleList(Modular(i) for i in range(2))
    tpplan.check(model.train(), PLAN, 2, sp, inputs=example())


def _one_of_four(y: torch.Tensor) -> torch.Tensor:
    return y * F.gumbel_softmax(y.unflatten(-1, (-1, 4)), hard=True).view_as(y)


NOISY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gumbel_softmax": lambda y: y * F.gumbel_softmax(y, 2.0, dim=1),
    "hard gumbel_softmax": _one_of_four,
    "rrelu": lambda y: F.rrelu(y, training=True),
    "rrelu in place": lambda y: F.rrelu(y + 1, 0.1, 0.3, True, True),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("name", NOISY)
def test_functions_that_draw_inside_are_proved(name: str, sp: bool) -> None:
    noisy = NOISY[name]

    def between(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
        return noisy(y) if module.training else y.relu()

    model = Stack(lambda i: MLP(i, between)).train()
    tpplan.check(model, PLAN, 2, sp, inputs=example())


def test_a_rectifier_is_that_of_evaluation() -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    with exact():
        torch.testing.assert_close(F.rrelu(x, 0.1, 0.3, True), F.leaky_relu(x, 0.2))
        assert F.gumbel_softmax(x, hard=True).sum() == 4
