"""Code of a region that changes what it is given in place, as that of routers that jitter does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, step
from tests.ranks import Ranks
from tests.rewrite import MODES

WIDTH, INNER = 16, 32
PLAN = {
    "tpplan": 1,
    "rules": {
        "embed": "replicate",
        "layers.*.norm": "sequence_parallel",
        "layers.*.mlp.{gate,up}": "colwise",
        "layers.*.mlp.down": "rowwise",
    },
}


class Changing(nn.Module):
    """Scales and shifts its input in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x *= 1.5
        y = self.gate(x).sigmoid()
        return self.down(y * self.up(x.add(0.25)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Changing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def made() -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randn(2, 6, WIDTH)


def step_job(mesh: DeviceMesh, sp: bool, compiled: bool) -> Errors:
    reference, x = made()
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, PLAN, mesh, sequence_parallel=sp, inputs=x)
    torch._dynamo.reset()
    ours = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model

    def run(m: nn.Module) -> dict[str, torch.Tensor]:
        out = (ours if m is model else m)(x)
        return {"objective": out.square().mean(), "output": out}

    return step(reference, model, run)


@MODES
def test_on_ranks(ranks: Ranks, sp: bool) -> None:
    assert beyond(ranks.run(2, step_job, sp, False)) == {}


@MODES
def test_in_one_graph(ranks: Ranks, sp: bool) -> None:
    assert beyond(ranks.run(2, step_job, sp, True)) == {}


@MODES
@pytest.mark.parametrize("tp", [2, 4])
def test_verified(tp: int, sp: bool) -> None:
    model, x = made()
    result = tpplan.verify(model, PLAN, tp=tp, sequence_parallel=sp, inputs=x)
    assert result.gradient_error <= 1e-5
