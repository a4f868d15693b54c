"""Mixture of depths (Raposo et al., 2024): layers whose own code chooses positions for a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.stacked import WIDTH, Layer, Stacked


class Chosen(nn.Module):
    """Half of the positions go through the block."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.block = nn.Linear(WIDTH, 1), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, at = self.router(x).squeeze(-1).topk(x.shape[1] // 2, 1)
        at = at[..., None].expand(-1, -1, x.shape[-1])
        chosen = x.gather(1, at)
        more = (self.block(chosen) - chosen) * weights.sigmoid()[..., None]
        return x.scatter_add(1, at, more)


RULES: dict[str, Any] = {
    "table": "vocab",
    "layers.*.router": "replicate",
    "layers.*.block.norm": "sequence_parallel",
    "layers.*.block.up": "colwise",
    "layers.*.block.down": "rowwise",
    "norm": "sequence_parallel",
}


def test_without_the_sequence_cut() -> None:
    tpplan.check(Stacked(make=Chosen), {"tpplan": 1, "rules": RULES}, 2, sequence_parallel=False)


def test_advice_that_holds_when_it_is_followed() -> None:
    model = Stacked(make=Chosen)
    with pytest.raises(tpplan.PlanError, match="'topk' on the sequence-sharded stream") as caught:
        tpplan.check(model, {"tpplan": 1, "rules": RULES}, 2)
    (found,) = caught.value.diagnostics
    assert "'layers: layers.*.block' with 'layers.*: replicate'" in (found.hint or "")
    rules = {**RULES, "layers.*": "replicate"}
    tpplan.check(model, {"tpplan": 1, "layers": "layers.*.block", "rules": rules}, 4)


def test_what_is_alike_is_said_once() -> None:
    plan = {"tpplan": 1, "layers": "layers.*.block", "rules": RULES}
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(Stacked(make=Chosen), plan, 2)
    assert len(caught.value.diagnostics) == 1
