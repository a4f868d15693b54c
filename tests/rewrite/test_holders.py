"""What else holds a model's parameters when they are replaced."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.rewrite.life import PLAN, Model, built
from tpplan.compat import fake_world


def parallelized(model: nn.Module) -> list[str]:
    """Shard it on a fake group; what was said about it."""
    with warnings.catch_warnings(record=True) as caught, fake_world(2) as mesh:
        warnings.simplefilter("always")
        tpplan.parallelize(model, PLAN, mesh)
    return [str(w.message) for w in caught if "held elsewhere" in str(w.message)]


def returning(value: Any) -> Callable[[], Any]:
    """A function that holds on to a value."""
    return lambda: value


def test_nobody() -> None:
    assert not parallelized(built())


@pytest.mark.turns(24)
@pytest.mark.parametrize("stepped", [False, True])
def test_optimizer_made_before(stepped: bool) -> None:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if stepped:
        model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
        optimizer.step()
    (said,) = parallelized(model)
    assert "in SGD, made before the model was parallelized" in said
    assert optimizer.param_groups


@pytest.mark.turns(12)
def test_list_of_the_user() -> None:
    model = built()
    held = list(model.parameters())
    (said,) = parallelized(model)
    assert f"in a list of {len(held)}" in said


@pytest.mark.turns(12)
def test_weight_tied_to_another_model() -> None:
    model, other = built(), nn.Linear(16, 29)
    other.weight = weight = model.tok.weight  # type: ignore[assignment]
    with pytest.raises(tpplan.PlanError, match=r"tok\.weight is a parameter of another module"):
        parallelized(model)
    assert type(model) is Model
    assert model.tok.weight is weight


def test_model_that_nobody_can_reach() -> None:
    model, other = built(), nn.Linear(16, 29)
    other.weight = model.tok.weight
    other.me = [other]  # type: ignore[assignment]
    del other
    assert not parallelized(model)


@pytest.mark.turns(12)
def test_attributes_of_the_model() -> None:
    model: Any = built()
    model.nested = {"a": [model.tok.weight, (model.norm.weight, 3)]}
    model.pair = (model.head.bias,)
    model.function = returning(model.norm.bias)
    model.some, model.groups = {model.norm.weight}, {model.norm.weight: 0.1}
    assert not parallelized(model)
    now = {id(p) for p in model.parameters()}
    held = [model.nested["a"][0], model.nested["a"][1][0], *model.pair, model.function()]
    assert {id(p) for p in (*held, *model.some, *model.groups)} <= now


@pytest.mark.turns(12)
def test_error_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = built()
    model.held = [model.tok.weight]
    held, weight = model.held, model.tok.weight
    handle = weight.register_hook(lambda g: g)
    apply = sys.modules["tpplan.rewrite.apply"]
    replace: Callable[..., None] = apply.replace

    def broken(*given: Any) -> None:
        replace(*given)
        if given[0] is model:  # and not what is rehearsed
            assert held[0] is not weight
            raise ValueError("stopped")

    monkeypatch.setattr(apply, "replace", broken)
    with pytest.raises(ValueError, match="stopped"):
        parallelized(model)
    assert type(model) is Model
    assert model.held is held
    assert held[0] is model.tok.weight is weight
    assert len(weight._backward_hooks) == 1
    handle.remove()
