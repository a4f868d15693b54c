"""Code that draws otherwise than through torch: the proof's ranks draw what one process would."""

from __future__ import annotations

import copy
import random
from random import random as imported
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, step
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES

OWN, THEIRS = random.Random(3), np.random.default_rng(3)
TORCHS = torch.Generator().manual_seed(3)
SYSTEMS = random.SystemRandom()
DRAWS = {
    "random": lambda: random.random(),
    "imported": lambda: imported(),
    "numpy": lambda: float(np.random.rand()),
    "own": lambda: OWN.random() + 0 * SYSTEMS.random(),
    "generator": lambda: float(THEIRS.random()),
    "torch's generator": lambda: float(torch.rand((), generator=TORCHS)),
}
PLAN = {
    "tpplan": 1,
    "rules": {
        "table": "vocab",
        "layers.*.norm": "sequence_parallel",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "norm": "sequence_parallel",
        "out": "vocab",
    },
}


class Layer(nn.Module):
    def __init__(self, weighs: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down, self.weighs = nn.Linear(16, 32), nn.Linear(32, 16), weighs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x)).relu()
        if self.weighs:
            h = h * torch.tensor([DRAWS[self.weighs]() for _ in range(h.size(-1))])
        return x + self.down(h)


class Model(nn.Module):
    """Drops layers by what it draws; ``weighs``: or its columns."""

    def __init__(self, drops: str = "", weighs: str = "") -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(Layer(weighs) for _ in range(5))
        self.norm, self.out, self.drops = nn.LayerNorm(16), nn.Linear(16, 40), drops

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            if not (self.drops and self.training and DRAWS[self.drops]() < 0.4):
                x = layer(x)
        return self.out(self.norm(x))


def _states() -> list[Any]:
    return [
        random.getstate(),
        str(np.random.get_state()),
        OWN.getstate(),
        str(THEIRS.bit_generator.state),
        TORCHS.get_state().tolist(),
        torch.get_rng_state().tolist(),
    ]


@MODES
@pytest.mark.parametrize("source", DRAWS)
@pytest.mark.turns(4)
def test_layers_are_dropped(source: str, sp: bool) -> None:
    model = Model(source)
    before = _states()
    for tp in (2, 4):
        tpplan.check(model, PLAN, tp, sp)
    assert _states() == before


@pytest.mark.parametrize("source", DRAWS)
def test_numbers_drawn_for_each_column_are_refused(source: str) -> None:
    with pytest.raises(tpplan.PlanError):
        tpplan.check(Model(weighs=source), PLAN, 2)


class Remembering(Model):
    """Does something else from call to call, by what its modules keep."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps, self.count, self.seen = keeps, 0, list[int]()
        self.source, self.generator = random.Random(5), torch.Generator().manual_seed(5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, layers = self.table(ids), list(self.layers)
        self.count += 1
        self.seen.append(self.count)
        if self.keeps == "source":
            self.source.shuffle(layers)
        elif self.keeps == "generator":
            x = x + torch.randn(x.size(0), 1, 16, generator=self.generator)
        elif (self.count if self.keeps == "count" else len(self.seen)) % 2:
            layers.reverse()
        for layer in layers:
            x = layer(x)
        return self.out(self.norm(x))


@MODES
@pytest.mark.parametrize("keeps", ["count", "list", "source", "generator"])
@pytest.mark.turns(4)
def test_what_modules_keep(keeps: str, sp: bool) -> None:
    model = Remembering(keeps)
    before = model.source.getstate(), model.generator.get_state().tolist()
    for tp in (2, 4):
        tpplan.check(model, PLAN, tp, sp)
    assert (model.count, model.seen) == (0, [])
    assert (model.source.getstate(), model.generator.get_state().tolist()) == before


def dropping_job(mesh: DeviceMesh, sp: bool) -> Errors:
    torch.manual_seed(0)
    reference = Model("random").double()
    model = tpplan.parallelize(copy.deepcopy(reference), PLAN, mesh, sp)
    worst: Errors = {}
    for seed, length in enumerate((8, 7, 5)):
        ids = torch.randint(40, (2, length), generator=torch.Generator().manual_seed(seed))

        def run(m: Any, seed: int = seed, ids: torch.Tensor = ids) -> dict[str, torch.Tensor]:
            random.seed(seed)
            out = m(ids)
            return {"out": out, "objective": out.sin().sum()}

        errors = step(reference, model, run)
        worst = {name: max(e, worst.get(name, 0.0)) for name, e in errors.items()}
    return worst


@SIZES
@MODES
@pytest.mark.turns(4)
def test_on_ranks(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, dropping_job, sp), 1e-9)
