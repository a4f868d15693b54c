"""Models parts of which were compiled before they were sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, step
from tests.models import weighed
from tests.ranks import Ranks
from tests.rewrite import MODES

WIDTH, INNER = 16, 32


class Layer(nn.Module):
    """A normalised MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.a(self.norm(x)).relu())  # type: ignore[no-any-return]


@torch.compile(backend="aot_eager", fullgraph=True)
def _bent(x: torch.Tensor) -> torch.Tensor:
    return x * x.tanh()


class OnStream(Layer):
    """A compiled function between layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_bent(x))


class InRegion(Layer):
    """A compiled method in a region."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def between(self, x: torch.Tensor) -> torch.Tensor:
        """Of columns."""
        return x * x.tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.between(self.a(self.norm(x))))  # type: ignore[no-any-return]


class Module(Layer):
    """A compiled module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.compile(nn.LayerNorm(WIDTH), backend="aot_eager", fullgraph=True)  # type: ignore[assignment]


class Bent(nn.Module):
    """The same as a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.tanh()


class InPlace(Layer):
    """A module that was compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.bent = Bent()
        self.bent.compile(backend="aot_eager", fullgraph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.bent(self.a(self.norm(x))))  # type: ignore[no-any-return]


PARTS: dict[str, Callable[[], nn.Module]] = {
    "function": OnStream,
    "method": InRegion,
    "module": Module,
    "in place": InPlace,
}


def parts_job(mesh: DeviceMesh, sp: bool, name: str) -> Errors:
    """Proved as it was written, and run compiled."""
    found = Findings()
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference: Any = nn.Sequential(PARTS[name](), PARTS[name]())
    model = copy.deepcopy(reference)
    norm = {"*.norm._orig_mod" if name == "module" else "*.norm": "sequence_parallel"}
    plan = {"tpplan": 1, "rules": {**norm, "*.a": "colwise", "*.b": "rowwise"}}
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    tpplan.parallelize(model, plan, mesh, sequence_parallel=sp, inputs=x)
    for length in (8, 7):

        def run(m: Any, x: torch.Tensor = x[:, :length]) -> dict[str, torch.Tensor]:
            out = m(x)
            return {"out": out, "objective": weighed(out)}

        found.add(f"{length}", step(reference, model, run))
    return found.errors


@MODES
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.turns(12)
def test_compiled_parts(ranks: Ranks, name: str, sp: bool) -> None:
    assert not beyond(ranks.run(2, parts_job, sp, name))
