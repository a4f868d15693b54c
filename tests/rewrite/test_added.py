"""Modules that are put into the layers of a model that is sharded already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.compare import Errors, Findings, beyond, same
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.life import TIGHT, WIDTH, alike, built, sharded


class Beside(nn.Module):
    """Adds a product of its own to what a module gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.01, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x) + x @ self.weight


def added_job(mesh: DeviceMesh, sp: bool, frozen: bool) -> Errors:
    """It is trained as in the unsharded model, or is refused by its name."""
    found, reference = Findings(), built()
    model = sharded(reference, mesh, sp)
    for m in (reference, model):
        norms = m.layers[0].norms
        norms[0] = Beside(norms[0]).requires_grad_(not frozen)
    try:
        found.add("step", alike(reference, model))
        found.add("accepted", same(frozen or not sp))
    except RuntimeError as error:
        found.add("named", same("layers.0.norms.0.weight: this parameter was added" in str(error)))
        found.add("refused", same(sp and not frozen))
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_added(ranks: Ranks, tp: int, sp: bool, frozen: bool) -> None:
    assert not beyond(ranks.run(tp, added_job, sp, frozen), TIGHT)
