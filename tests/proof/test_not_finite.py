"""Outputs that are infinite on purpose (masked logits) are compared as far as they are numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, full, step
from tests.ranks import Ranks

INF, NAN = float("inf"), float("nan")
PLAN = {
    "tpplan": 1,
    "rules": {
        "table": "vocab",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "layers.*.norm": "sequence_parallel",
        "norm": "sequence_parallel",
        "head": "vocab",
    },
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Masked(nn.Module):
    """Some tokens are never said."""

    def __init__(self, value: float = -INF, probabilities: bool = False) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
        self.register_buffer("unsaid", torch.arange(32) % 5 == 4)
        self.value, self.probabilities = value, probabilities

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x)).masked_fill(self.unsaid, self.value)
        return logits.log_softmax(-1) if self.probabilities else logits


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("value", "probabilities"), [(-INF, False), (-INF, True), (NAN, False)])
def test_masked_outputs(value: float, probabilities: bool, sp: bool) -> None:
    tpplan.check(Masked(value, probabilities), PLAN, 2, sp, inputs={"ids": ids()})


def test_verified() -> None:
    found = tpplan.verify(Masked(), PLAN, inputs={"ids": ids()})
    assert found.output_error <= 1e-5 and found.gradient_error <= 1e-5


class Overflowing(Masked):
    """Numbers of which no gradient comes."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (super().forward(ids) * 1e308).exp()


def test_overflow() -> None:
    with pytest.raises(tpplan.PlanError, match="gives no numbers that could be compared"):
        tpplan.check(Overflowing(), PLAN, 2, False, inputs={"ids": ids()})


def masked(mesh: DeviceMesh, sp: bool) -> Errors:
    torch.manual_seed(0)
    reference = Masked()
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, PLAN, mesh, sequence_parallel=sp, inputs={"ids": ids()})
    given = ids(1)
    labels = torch.where(given % 5 == 4, 0, given)

    def run(m: nn.Module) -> dict[str, torch.Tensor]:
        logits = m(given)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"objective": loss, "loss": loss, "chances": full(logits.detach()).softmax(-1)}

    return step(reference, model, run, plain=False)


@pytest.mark.turns(2)
@pytest.mark.parametrize("sp", [False, True])
def test_on_ranks(ranks: Ranks, sp: bool) -> None:
    assert beyond(ranks.run(2, masked, sp)) == {}
