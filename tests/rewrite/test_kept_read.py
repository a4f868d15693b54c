"""What a mixture keeps as an attribute, which the model's own code gives out or adds up."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, compare_gradients, error
from tests.ranks import Ranks
from tests.routed import WIDTH, Model, plan


class Given(Model):
    """Gives the very tensor that one of its mixtures keeps."""

    def forward(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(t), self.b[0].m.loss  # type: ignore[union-attr, return-value]


class Rounds(Model):
    """Runs its layers twice, and adds up what they keep each time."""

    def forward(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        t, losses = self.a(t), []
        for _ in range(2):
            for block in self.b:
                t = block(t)
                losses.append(block.m.loss)  # type: ignore[union-attr]
        return self.c(t), torch.stack(losses).sum()  # type: ignore[arg-type]


class Between(Rounds):
    """Runs one of its layers twice, and gives what it keeps in the end."""

    def forward(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = self.a(t)
        for block in (self.b[0], self.b[0], self.b[1]):
            t = block(t)
        return self.c(t), self.b[0].m.loss + 2 * self.b[1].m.loss  # type: ignore[union-attr, operator]


KINDS = [Given, Rounds, Between]


def job(mesh: DeviceMesh, sp: bool) -> Errors:
    found = Findings()
    for kind in KINDS:
        torch.manual_seed(0)
        reference: nn.Module = kind().double()
        model = copy.deepcopy(reference)
        tpplan.parallelize(model, plan(sp), mesh, inputs=torch.randn(2, 8, WIDTH))
        for length in (8, 5):
            x = torch.randn(2, length, WIDTH).double()
            pairs = [m(x) for m in (reference, model)]
            for number, (due, got) in enumerate(zip(*pairs, strict=True)):
                found.add(f"{kind.__name__} at {length}: {number}", error(due, got))
            for out, loss in pairs:
                (out.square().mean() + 3 * loss).backward()
        found.add(kind.__name__, compare_gradients(reference, model))
    return found.errors


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.turns(12)
def test_read_by_the_model(ranks: Ranks, sp: bool, tp: int) -> None:
    assert beyond(ranks.run(tp, job, sp), 1e-12) == {}
