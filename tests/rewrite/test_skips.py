"""Skips between layers, as in a U-net: joined with the stream, and brought to its width."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, step
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.joins = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, kept = self.embed(ids), list[torch.Tensor]()
        for i, layer in enumerate(self.layers):
            if i >= 2:
                x = self.joins[i - 2](torch.cat([x, kept.pop()], -1))
            x = layer(x)
            kept += [x] if i < 2 else []
        return self.last(x)


def skips_job(mesh: DeviceMesh, sp: bool, joins: str) -> Errors:
    torch.manual_seed(0)
    reference = Model().double()
    plan: dict[str, Any] = {
        "tpplan": 1,
        "rules": {
            "embed": "vocab",
            "layers.*.norm": "sequence_parallel",
            "layers.*.up": "colwise",
            "layers.*.down": "rowwise",
            "joins.*": joins,
            "last": "sequence_parallel",
        },
    }
    model = tpplan.parallelize(copy.deepcopy(reference), plan, mesh, sp)
    worst: Errors = {}
    for batch, length in ((1, 8), (3, 7), (2, 5)):
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(0, 32, (batch, length), generator=generator)

        def run(m: Any, ids: torch.Tensor = ids) -> dict[str, torch.Tensor]:
            out = m(ids)
            return {"out": out, "objective": out.sin().sum()}

        errors = step(reference, model, run)
        worst = {name: max(e, worst.get(name, 0.0)) for name, e in errors.items()}
    return worst


@SIZES
@MODES
@pytest.mark.parametrize("joins", ["replicate", "sequence_parallel"])
@pytest.mark.turns(4)
def test_skips(ranks: Ranks, tp: int, sp: bool, joins: str) -> None:
    assert not beyond(ranks.run(tp, skips_job, sp, joins), 1e-9)
