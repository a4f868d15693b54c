"""Random numbers that are one for many: the same on every rank where the ranks share those out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import tpplan
from tests.ranks import Ranks
from tests.rewrite import MODES
from tests.rewrite.dropout import gathered
from tests.rewrite.noise import DRAWS, IN_REGION, ON_STREAM, WIDTH, Attending, Layer, Noisy, plan_of
from tpplan.compat import draws


class Reading(TorchDispatchMode):
    """Keeps what is drawn, but for the numbers that seed a rank's own sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if draws(func, args, kwargs or {}) and "randint" not in str(func):
            first = out[0] if isinstance(out, tuple) else out
            self.drawn.append(getattr(first, "_local_tensor", first).detach().double().clone())
        return out


def alike_job(mesh: DeviceMesh, sp: bool, make: Callable[[], nn.Module], packed: bool) -> bool:
    """Whether all ranks drew the same."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, WIDTH)
    model = Noisy(make)
    tpplan.parallelize(model, plan_of(packed), mesh=mesh, sequence_parallel=sp, inputs=x)
    torch.manual_seed(1)
    with Reading() as reading:
        model.train()(x)
    assert len(reading.drawn) >= 2
    first, *others = gathered(reading.drawn, mesh)
    # torch.equal is false of tensors of two shapes
    return all(all(map(torch.equal, first, drawn)) for drawn in others)


def layer_job(mesh: DeviceMesh, sp: bool, name: str, inside: bool) -> bool:
    return alike_job(mesh, sp, lambda: Layer(DRAWS[name], inside), False)


def module_job(mesh: DeviceMesh, sp: bool, inside: bool) -> bool:
    return alike_job(mesh, sp, lambda: Layer(nn.Dropout1d(0.5), inside), False)


def heads_job(mesh: DeviceMesh, sp: bool, each: bool) -> bool:
    return alike_job(mesh, sp, lambda: Attending(each), True)


@MODES
@pytest.mark.parametrize("name", ON_STREAM)
def test_on_the_stream(ranks: Ranks, sp: bool, name: str) -> None:
    expected = ON_STREAM[name] or not sp
    assert set(ranks.run(2, layer_job, sp, name, False)) == {expected}


@MODES
@pytest.mark.parametrize("name", IN_REGION)
def test_in_a_region(ranks: Ranks, sp: bool, name: str) -> None:
    assert set(ranks.run(2, layer_job, sp, name, True)) == {IN_REGION[name]}


@MODES
@pytest.mark.parametrize("each", [False, True])
def test_on_the_scores_of_heads(ranks: Ranks, sp: bool, each: bool) -> None:
    assert set(ranks.run(2, heads_job, sp, each)) == {not each}


@MODES
@pytest.mark.parametrize("inside", [False, True], ids=["on the stream", "in a region"])
def test_modules_that_drop_out_all_columns_of_tokens(ranks: Ranks, sp: bool, inside: bool) -> None:
    assert set(ranks.run(2, module_job, sp, inside)) == {inside or not sp}


TIME_FIRST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a sample": lambda x: x * torch.rand(1, x.size(1), 1),
    "tokens": lambda x: x * torch.rand(*x.shape[:2], 1),
    "columns": lambda x: x * torch.rand(1, *x.shape[1:]),
}


@pytest.mark.turns(4)
@MODES
@pytest.mark.parametrize("inside", [False, True], ids=["on the stream", "in a region"])
@pytest.mark.parametrize("name", TIME_FIRST)
def test_where_the_sequence_comes_first(name: str, inside: bool, sp: bool) -> None:
    model = Noisy(lambda: Layer(TIME_FIRST[name], inside)).train()
    plan = {**plan_of(False), "sequence_dim": 0}
    tpplan.check(model, plan, 2, sp, inputs=torch.randn(6, 4, WIDTH))


class Labelled(Noisy):
    """Some samples lose their label in training (Ho & Salimans 2022)."""

    def __init__(self) -> None:
        super().__init__(lambda: Layer(DRAWS["each"], True))
        self.table = nn.Embedding(4, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.training:
            labels = torch.where(torch.rand(len(labels)) < 0.5, 3, labels)
        return super().forward(x + self.table(labels)[:, None])


@MODES
def test_labels_that_are_dropped(sp: bool) -> None:
    plan = plan_of(False)
    plan = {**plan, "rules": {**plan["rules"], "table": "replicate"}}
    inputs = {"x": torch.randn(2, 6, WIDTH), "labels": torch.tensor([1, 2])}
    tpplan.check(Labelled().train(), plan, 2, sp, inputs=inputs)
