"""Code that draws otherwise than through torch: the proof's ranks draw what one process would."""

from __future__ import annotations

import copy
import random
from random import random as imported
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, step
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.stacked import PLAN, WIDTH, Layer, Stacked, ids_of

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


def weighing(source: str) -> Layer:
    """A layer that draws a number for each column."""

    def weighed(h: torch.Tensor) -> torch.Tensor:
        return h.relu() * torch.tensor([DRAWS[source]() for _ in range(h.size(-1))])

    return Layer(weighed)


class Dropping(Stacked):
    """Drops layers by what it draws."""

    def __init__(self, source: str) -> None:
        super().__init__(5)
        self.source = source

    def forward(self, ids: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            if not (self.training and DRAWS[self.source]() < 0.4):
                x = layer(x)
        return self.norm(x)


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
    model = Dropping(source)
    before = _states()
    for tp in (2, 4):
        tpplan.check(model, PLAN, tp, sp)
    assert _states() == before


@pytest.mark.parametrize("source", DRAWS)
def test_numbers_drawn_for_each_column_are_refused(source: str) -> None:
    with pytest.raises(tpplan.PlanError):
        tpplan.check(Stacked(make=lambda: weighing(source)), PLAN, 2)


class Remembering(Stacked):
    """Does something else from call to call, by what its modules keep."""

    def __init__(self, keeps: str) -> None:
        super().__init__(5)
        self.keeps, self.count, self.seen = keeps, 0, list[int]()
        self.source, self.generator = random.Random(5), torch.Generator().manual_seed(5)

    def forward(self, ids: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        x, layers = self.table(ids), list(self.layers)
        self.count += 1
        self.seen.append(self.count)
        if self.keeps == "source":
            self.source.shuffle(layers)
        elif self.keeps == "generator":
            x = x + torch.randn(x.size(0), 1, WIDTH, generator=self.generator)
        elif (self.count if self.keeps == "count" else len(self.seen)) % 2:
            layers.reverse()
        for layer in layers:
            x = layer(x)
        return self.norm(x)


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
    reference = Dropping("random").double()
    model = tpplan.parallelize(copy.deepcopy(reference), PLAN, mesh, sp)
    found = Findings()
    for seed, length in enumerate((8, 7, 5)):

        def run(m: Any, seed: int = seed, length: int = length) -> dict[str, torch.Tensor]:
            random.seed(seed)
            out = m(ids_of(2, length))
            return {"out": out, "objective": out.sin().sum()}

        found.add(str(length), step(reference, model, run))
    return found.errors


@SIZES
@MODES
@pytest.mark.turns(4)
def test_on_ranks(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, dropping_job, sp), 1e-9)
