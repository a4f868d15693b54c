"""What the model's own code adds to, and multiplies, the sequence-sharded stream by."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, full, step
from tests.ranks import Ranks
from tests.rewrite import SIZES

RULES = {
    "table": "vocab",
    "layers.*.norm": "sequence_parallel",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "norm": "sequence_parallel",
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(40, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        x = self.before(self.table(ids), given)
        for layer in self.layers:
            x = layer(x)
        return self.after(self.norm(x), given)

    def before(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return x

    def after(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return x


class Classes(Model):
    """A vector for each sample, of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Embedding(11, 16)

    def before(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return x + self.extra((given[:, 0] > 0).long())[:, None]


class Scales(Model):
    """Scale and shift, of what is known of each sample; before the layers and after."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(1, 32)

    def before(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        scale, shift = self.extra(given[:, :1]).unsqueeze(1).chunk(2, -1)
        return x * (1 + scale) + shift

    def after(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return self.before(x, given)


class Masked(Model):
    """No numbers of masked positions; then the mean of the others."""

    def before(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return x * (given > -1).to(x.dtype)[..., None]

    def after(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        mask = (given > -1).to(x.dtype)[..., None]
        return (x * mask).sum(1) / mask.sum(1).clamp(min=1)


class Weighted(Model):
    """Each position by a number that the user gives, and its place."""

    def before(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.size(1), dtype=x.dtype)
        return x * given[..., None] + torch.outer(places, torch.linspace(0, 1, 16, dtype=x.dtype))


MODELS: dict[str, tuple[type[Model], dict[str, str]]] = {
    "classes": (Classes, {"extra": "replicate"}),
    "many classes": (Classes, {"extra": "vocab"}),
    "scales": (Scales, {"extra": "replicate"}),
    "masked": (Masked, {}),
    "weighted": (Weighted, {}),
}


def meeting_job(mesh: DeviceMesh, name: str) -> Errors:
    torch.manual_seed(0)
    kind, rules = MODELS[name]
    reference = kind().double()
    plan: dict[str, Any] = {"tpplan": 1, "sequence_parallel": True, "rules": {**RULES, **rules}}
    inputs = (torch.randint(40, (2, 8)), torch.randn(2, 8, dtype=torch.float64))
    model = tpplan.parallelize(copy.deepcopy(reference), plan, mesh, inputs=inputs)
    worst: Errors = {}
    for batch, length in ((2, 8), (3, 7), (1, 5), (2, 1)):
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(40, (batch, length), generator=generator)
        given = torch.randn(batch, length, dtype=torch.float64, generator=generator)

        def run(
            m: Any, ids: torch.Tensor = ids, given: torch.Tensor = given
        ) -> dict[str, torch.Tensor]:
            mine = given.clone().requires_grad_()
            out = m(ids, mine)
            out.sin().sum().backward()
            gradient = torch.zeros_like(mine) if mine.grad is None else full(mine.grad)
            m.zero_grad()
            again = m(ids, given)
            return {"out": out.detach(), "given": gradient, "objective": again.sin().sum()}

        errors = step(reference, model, run)
        worst = {name: max(e, worst.get(name, 0.0)) for name, e in errors.items()}
    return worst


@SIZES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns(4)
def test_met_by_what_is_whole(ranks: Ranks, tp: int, name: str) -> None:
    assert not beyond(ranks.run(tp, meeting_job, name), 1e-9)
