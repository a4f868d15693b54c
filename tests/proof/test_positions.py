"""A refusal says at which rule: of the module that fails, or that the failure names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.proof.odd import MLP, WIDTH, Stack
from tests.proof.test_prove import example


class Sized(MLP):
    """Takes the size of what it gathers from what it was given."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x).relu()
        return x + self.out(y.view(*x.shape[:2], y.size(-1)))


class Named(MLP):
    """Says what failed by another module's name."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x).relu()
        if hasattr(self.fc.weight, "placements") and self.training:
            raise AssertionError("layers.1.out: cannot be")
        return x + self.out(y)


class Started(Stack):
    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.start = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.start(x))


@pytest.mark.parametrize(("make", "rule"), [(Sized, "layers.*.fc"), (Named, "layers.*.out")])
def test_a_failure_is_at_the_rule_of_its_module(make: Any, rule: str) -> None:
    rules = {"start": "replicate", "layers.*.fc": "colwise", "layers.*.out": "rowwise"}
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.check(
            Started(make).train(), {"tpplan": 1, "rules": rules}, 2, True, inputs=example()
        )
    (found,) = caught.value.diagnostics
    assert found.position is not None
    assert found.position.text.strip().startswith(rule)
