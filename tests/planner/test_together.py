"""What is reduced together: outputs that the model only adds up, each of them once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, step
from tests.models import randomize, weighed, weights_like
from tests.planner.layers import INNER, WIDTH
from tests.ranks import Ranks
from tests.rewrite import MODES

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def in_place(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a += b
    return x + a


def in_place_on_a_sum(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x + a
    y += b
    return y


def in_place_on_the_last(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b += a
    return x + b


def sum_read_early(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x + a
    return y + b + y.tanh()


def used_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y * y.tanh()


TOGETHER: Mapping[str, Way] = {
    "one after the other": lambda x, a, b: x + a + b,
    "by themselves first": lambda x, a, b: x + (b + a),
    "reshaped": lambda x, a, b: x + (a.flatten(0, 1) + b.flatten(0, 1)).view(x.shape),
    "in place on a sum": in_place_on_a_sum,
    "in place on the last": in_place_on_the_last,
    "the sum used twice": lambda x, a, b: used_twice(x, a + b),
}
APART: Mapping[str, Way] = {
    "one of them used twice": lambda x, a, b: x + a + b + a,
    "doubled": lambda x, a, b: x + (a + a) + b,
    "alpha": lambda x, a, b: torch.add(x + a, b, alpha=0.5),
    "subtracted": lambda x, a, b: x + a - b,
    "scaled": lambda x, a, b: x + a + 2 * b,
    "in place": in_place,
    "detached": lambda x, a, b: x + a.detach() + b,
    "a part of the sum read": sum_read_early,
    "only one of them": lambda x, a, b: x + b,
    "broadcast": lambda x, a, b: x + a + b[:1],
}


class Sides(nn.Module):
    """Two branches from one input, put together in some way; ``give``: the first is given out."""

    def __init__(self, way: Way, give: bool) -> None:
        super().__init__()
        self.way, self.give = way, give
        self.a, self.b = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.a_out, self.b_out = nn.Linear(INNER, WIDTH), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        a, b = self.a_out(self.a(x).relu()), self.b_out(self.b(x).tanh())
        y = self.way(x, a, b)
        return (y, a) if self.give else y


class Model(nn.Module):
    """Two layers, and what they give out."""

    def __init__(self, way: Way, give: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sides(way, give) for _ in range(2))
        self.give = give
        randomize(self, 1, 0.3)
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = []
        for layer in self.layers:
            x = layer(x)
            if self.give:
                x, a = x
                given.append(a)
        return (x, *given)


def stream() -> torch.Tensor:
    return weights_like(torch.empty(2, 6, WIDTH, dtype=torch.float64), 1)


def planned(model: nn.Module, stated: str = "") -> bool:
    """Whether the layers are reduced together."""
    plan = tpplan.load_plan({"tpplan": 1, "rules": rules(stated)})
    compiled = tpplan.check(model, plan, tp=2, sequence_parallel=False, inputs=stream())
    return bool(compiled.modules["layers.0.a_out"].together)


def rules(stated: str = "") -> dict[str, object]:
    options = {"style": "rowwise", **({"reduce": stated} if stated else {})}
    return {"layers.*.{a,b}": "colwise", "layers.*.{a,b}_out": options}


@pytest.mark.parametrize("way", TOGETHER)
@pytest.mark.turns(12)
def test_only_added(way: str) -> None:
    assert planned(Model(TOGETHER[way]))
    assert planned(Model(TOGETHER[way]), "together")


@pytest.mark.parametrize("way", APART)
@pytest.mark.turns(12)
def test_more_than_added(way: str) -> None:
    assert not planned(Model(APART[way]))
    with pytest.raises(tpplan.PlanError, match="reduce: the model does more than add"):
        planned(Model(APART[way]), "together")


def test_given_out() -> None:
    assert not planned(Model(TOGETHER["one after the other"], give=True))


def parity_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Every way, against the unsharded model."""
    found = Findings()
    models = {name: Model(way) for name, way in {**TOGETHER, **APART}.items()}
    if sp:
        del models["broadcast"]  # cuts the stream, which is refused
    else:  # under sequence parallelism nothing but the stream is given out
        models["given out"] = Model(TOGETHER["one after the other"], give=True)
    for name, reference in models.items():
        model = copy.deepcopy(reference)
        plan = {"tpplan": 1, "rules": rules()}
        tpplan.parallelize(model, plan, mesh, sequence_parallel=sp, inputs=stream())

        def run(m: nn.Module) -> dict[str, torch.Tensor]:
            outs = m(stream())
            return {**{f"{i}": out for i, out in enumerate(outs)}, "objective": weighed(*outs)}

        with found.case(name):
            found.add(name, step(reference, model, run))
    return found.errors


@MODES
def test_right(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, parity_job, sp), 1e-10)
