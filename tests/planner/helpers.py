"""Small models, right on simulated ranks or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, step
from tpplan.compat import simulate
from tpplan.rewrite import apply

WIDTH, INNER = 16, 32
RULES = {"layers.*.fc": "colwise", "layers.*.out": "rowwise"}


class Layer(nn.Module):
    """An MLP, with something between its projections."""

    def __init__(self, inner: int = INNER, back: int | None = None) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, inner), nn.Linear(back or inner, WIDTH)

    def between(self, y: torch.Tensor) -> torch.Tensor:
        """What happens to the columns."""
        return y.relu()

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.out(self.between(self.fc(x)))


class Stack(nn.Module):
    """Layers one after the other, with a gap."""

    def __init__(self, make: Callable[[int], nn.Module], count: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make(i) for i in range(count))
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.3 * torch.randn(p.shape))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def stream(length: int = 8, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """An input."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn(2, length, WIDTH, generator=generator, dtype=dtype)


def plan(rules: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A plan of the projections' rules and more."""
    return {"tpplan": 1, "rules": {**RULES, **rules}, **keys}


def wrong(model: nn.Module, rules: dict[str, Any], sp: bool, tp: int = 2, **keys: Any) -> Errors:
    """What is wrong with ``model``, in float64, on the simulated ranks of a plan."""
    reference = model.double()
    compiled = tpplan.check(reference, plan(rules, **keys), tp, sp, inputs=stream())

    def job(mesh: DeviceMesh) -> Errors:
        ours, theirs = copy.deepcopy(reference), copy.deepcopy(reference)
        apply(ours, compiled, mesh)
        errors: Errors = {}
        for length in (8, 7):
            x = stream(length)

            def run(m: nn.Module, x: torch.Tensor = x) -> dict[str, torch.Tensor]:
                out = m(x)
                return {"out": out, "objective": (out * torch.arange(float(WIDTH))).sum()}

            errors |= {f"{length}: {n}": e for n, e in step(theirs, ours, run).items()}
        return errors

    return beyond(simulate(tp, job), 1e-9)


def refused(model: nn.Module, rules: dict[str, Any], sp: bool, tp: int = 2, **keys: Any) -> str:
    """What is said of a plan that cannot be right."""
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(model, plan(rules, **keys), tp, sp, inputs=stream(dtype=torch.float32))
    assert all(found.position is not None for found in caught.value.diagnostics)
    return str(caught.value)
