"""What the model's own code adds to, and multiplies, the sequence-sharded stream by."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, full, step
from tests.ranks import Ranks
from tests.rewrite import SIZES
from tests.stacked import RULES, WIDTH, Stacked, ids_of


class Classes(Stacked):
    """A vector for each sample, of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Embedding(11, WIDTH)

    def before(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return x + self.extra((given[0][:, 0] > 0).long())[:, None]


class Scales(Stacked):
    """Scale and shift, of what is known of each sample; before the layers and after."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(1, 2 * WIDTH)

    def before(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        scale, shift = self.extra(given[0][:, :1]).unsqueeze(1).chunk(2, -1)
        return x * (1 + scale) + shift

    def after(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return self.before(x, *given)


class Masked(Stacked):
    """No numbers of masked positions; then the mean of the others."""

    def before(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return x * (given[0] > -1).to(x.dtype)[..., None]

    def after(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        mask = (given[0] > -1).to(x.dtype)[..., None]
        return (x * mask).sum(1) / mask.sum(1).clamp(min=1)


class Weighted(Stacked):
    """Each position by a number that the user gives, and its place."""

    def before(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.size(1), dtype=x.dtype)
        return x * given[0][..., None] + torch.outer(
            places, torch.linspace(0, 1, WIDTH, dtype=x.dtype)
        )


class Pooled(Stacked):
    """The mean over positions beside what is made of other numbers of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(1, WIDTH)

    def after(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return x.mean(1) * self.extra(given[0][:, :1])


class Numbers(Pooled):
    """The same of one number for each sample, whose tensors have no dimension of the sequence."""

    def after(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean((1, 2)) + self.extra(given[0][:, :1])[:, 0]


class Flattened(Pooled):
    """One number for each token of the batch, by weights that are made of the tokens."""

    def after(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        y = x.pow(2)
        weights: torch.Tensor = self.extra(y[..., :1])[..., 0]
        return (y.mean(-1).flatten() * weights.flatten()).sum()[None]


MODELS: dict[str, tuple[type[Stacked], dict[str, str]]] = {
    "classes": (Classes, {"extra": "replicate"}),
    "many classes": (Classes, {"extra": "vocab"}),
    "scales": (Scales, {"extra": "replicate"}),
    "masked": (Masked, {}),
    "weighted": (Weighted, {}),
    "pooled": (Pooled, {"extra": "replicate"}),
    "numbers": (Numbers, {"extra": "replicate"}),
    "flattened": (Flattened, {"extra": "replicate"}),
}


def meeting_job(mesh: DeviceMesh, name: str) -> Errors:
    torch.manual_seed(0)
    kind, rules = MODELS[name]
    reference = kind().double()
    plan: dict[str, Any] = {"tpplan": 1, "sequence_parallel": True, "rules": {**RULES, **rules}}
    inputs = (ids_of(2, 8), torch.randn(2, 8, dtype=torch.float64))
    model = tpplan.parallelize(copy.deepcopy(reference), plan, mesh, inputs=inputs)
    found = Findings()
    for batch, length in ((2, 8), (3, 7), (1, 5), (2, 1)):
        generator = torch.Generator().manual_seed(length)
        ids = ids_of(batch, length)
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

        found.add(f"{batch}x{length}", step(reference, model, run))
    return found.errors


@SIZES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns(4)
def test_met_by_what_is_whole(ranks: Ranks, tp: int, name: str) -> None:
    assert not beyond(ranks.run(tp, meeting_job, name), 1e-9)
