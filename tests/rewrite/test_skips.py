"""Skips between layers, as in a U-net: joined with the stream, and brought to its width."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, step
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.stacked import RULES, WIDTH, Stacked, ids_of


class Model(Stacked):
    def __init__(self) -> None:
        super().__init__(4)
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        x, kept = self.table(ids), list[torch.Tensor]()
        for i, layer in enumerate(self.layers):
            if i >= 2:
                x = self.joins[i - 2](torch.cat([x, kept.pop()], -1))
            x = layer(x)
            kept += [x] if i < 2 else []
        return self.norm(x)


def skips_job(mesh: DeviceMesh, sp: bool, joins: str) -> Errors:
    torch.manual_seed(0)
    reference = Model().double()
    plan = {"tpplan": 1, "rules": {**RULES, "joins.*": joins}}
    model = tpplan.parallelize(copy.deepcopy(reference), plan, mesh, sp)
    found = Findings()
    for batch, length in ((1, 8), (3, 7), (2, 5)):
        ids = ids_of(batch, length)

        def run(m: Any, ids: torch.Tensor = ids) -> dict[str, torch.Tensor]:
            out = m(ids)
            return {"out": out, "objective": out.sin().sum()}

        found.add(f"{batch}x{length}", step(reference, model, run))
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("joins", ["replicate", "sequence_parallel"])
@pytest.mark.turns(4)
def test_skips(ranks: Ranks, tp: int, sp: bool, joins: str) -> None:
    assert not beyond(ranks.run(tp, skips_job, sp, joins), 1e-9)
