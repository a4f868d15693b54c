"""Models whose own code uses the table of another module: as a head, as it is, to write to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import (
    Errors,
    Findings,
    beyond,
    compare_gradients,
    compare_parameters,
    error,
)
from tests.planner.helpers import INNER, RULES, WIDTH, Layer
from tpplan.compat import simulate
from tpplan.compiled import CompiledPlan
from tpplan.rewrite import apply

VOCABULARY = 37  # no number of ranks divides it


class Reader(nn.Module):
    """A decoder that reads its table itself."""

    def __init__(self, read: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(INNER) for _ in range(2))
        self.read = read

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.read(x, self.embed)


READS: dict[str, Any] = {
    "a head": lambda x, table: F.linear(x, table.weight),
    "a head with a loss": lambda x, table: F.cross_entropy(
        F.linear(x, table.weight).view(-1, VOCABULARY), torch.arange(x.size(0) * x.size(1)) % 30
    ),
    "a product": lambda x, table: x @ table.weight.t(),
    "rows": lambda x, table: x + table.weight[:1],
    "a norm": lambda x, table: x * table.weight.norm(),
    "shape and dtype": lambda x, table: x.to(table.weight.dtype) * table.weight.size(0),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("name", READS)
def test_a_table_is_read_by_others(name: str, sp: bool) -> None:
    torch.manual_seed(0)
    plan = {"tpplan": 1, "rules": {"embed": "vocab", **RULES}}
    tpplan.verify(lambda: Reader(READS[name]), plan, 2, sequence_parallel=sp)


def test_a_head_of_the_table_keeps_its_classes_apart() -> None:
    plan = {"tpplan": 1, "rules": {"embed": "vocab", **RULES}}
    found = tpplan.verify(lambda: Reader(READS["a head with a loss"]), plan, 2)
    (check, *_) = found.checks
    assert check.counts["forward"]["all_gather"] == 0


def clamped(x: torch.Tensor, table: nn.Embedding) -> torch.Tensor:
    if table.training:
        table.weight.data.clamp_(-1.0, 1.0)
    return x


def scaled(x: torch.Tensor, table: nn.Embedding) -> torch.Tensor:
    with torch.no_grad():
        table.weight.mul_(0.5)
    return x


def overwritten(x: torch.Tensor, table: nn.Embedding) -> torch.Tensor:
    with torch.no_grad():
        table.weight[VOCABULARY - 1] = 0.0
    return x


def foreach(x: torch.Tensor, table: nn.Embedding) -> torch.Tensor:
    with torch.no_grad():
        torch._foreach_mul_([table.weight], 0.5)
    return x


PLAN = {"tpplan": 1, "rules": {"embed": "vocab", **RULES}}


def three_steps(mesh: DeviceMesh, model: nn.Module, compiled: CompiledPlan) -> Errors:
    """Of outputs, gradients and the table, over steps that accumulate gradients."""
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    apply(ours, compiled, mesh)
    found = Findings()
    for number in range(3):
        ids = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(number))
        x, y = ours(ids), theirs(ids)
        x.square().sum().backward()
        y.square().sum().backward()
        found.add(f"step {number}", error(y, x))
        found.add(f"step {number}", compare_gradients(theirs, ours))
        found.add(f"step {number}", compare_parameters(theirs, ours))
    return found.errors


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("write", [clamped, scaled, overwritten, foreach])
@pytest.mark.turns(12)
def test_code_that_writes_to_a_table_is_right_or_refused(write: Any, sp: bool) -> None:
    torch.manual_seed(0)
    model = Reader(write).double()
    ids = torch.randint(0, VOCABULARY, (2, 8))
    try:
        compiled = tpplan.check(model, PLAN, 2, sp, inputs=ids)
    except tpplan.PlanError as error:
        assert write in (overwritten, foreach)
        assert error.diagnostics[0].position is not None
        return
    found = simulate(2, lambda mesh: three_steps(mesh, model, compiled))
    assert not beyond(found, 1e-9)
