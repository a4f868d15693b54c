"""What each process has for itself: numbers that are no parameters, random sequences, a loss."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.comm.test_agreement import complaint
from tests.compare import Errors, Findings, beyond, compare_gradients, error, full, local, same
from tests.models import VOCAB, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES

WIDTH = 16
PLAN = {
    "tpplan": 1,
    "rules": {
        "table": "replicate",
        "layers.*.norm": "sequence_parallel",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
    },
}
TABLE: list[float] = []


class Layer(nn.Module):
    """Does with its result what a test makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.down(F.gelu(self.up(self.norm(x)))))


class Number(Layer):
    def __init__(self, own: float) -> None:
        super().__init__()
        self.own = own

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.own


class Held(Number):
    """A tensor that is no buffer."""

    def __init__(self, own: float) -> None:
        super().__init__(own)
        self.own = torch.full((WIDTH,), own, dtype=torch.double)  # type: ignore[assignment]


class Listed(Number):
    """In a global list."""

    def __init__(self, own: float) -> None:
        super().__init__(1.0)
        TABLE[:] = [own]

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * TABLE[0]


class Scaling(Number):
    """Of the gradient only."""

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.own + (x * (1 - self.own)).detach()


class Training(Number):
    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.own if self.training else x


class Generating(Number):
    def __init__(self, own: float) -> None:
        super().__init__(own)
        self.generator = torch.Generator().manual_seed(int(8 * own))

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(torch.rand((), generator=self.generator))


class Buffered(Number):
    """With an attribute that is the same tensor, and a buffer that few models have."""

    def __init__(self, own: float) -> None:
        super().__init__(own)
        self.register_buffer("scale", torch.full((WIDTH,), own, dtype=torch.double))
        self.register_buffer("kept", torch.tensor(int(100 * own)), persistent=False)
        self.register_buffer("spread", torch.tensor([[1.0]]).expand(2, 3))
        self.alias = self.scale

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.alias + self.kept


class PythonDrawing(Layer):
    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random() if self.training else x


class NumpyDrawing(Layer):
    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(numpy.random.rand()) if self.training else x


class TorchDrawing(Layer):
    """In evaluation too."""

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(torch.rand(()))


class Dropping(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training and random.random() < 0.5 else super().forward(x)


class Model(nn.Module):
    def __init__(self, kind: Any, *given: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList((Layer(), kind(*given), Layer()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def model(kind: Any, *given: Any) -> Model:
    torch.manual_seed(0)
    return Model(kind, *given).double()


def step(made: nn.Module, seed: int = 0, factor: float = 1.0) -> torch.Tensor:
    made.zero_grad()
    out: torch.Tensor = made(token_ids(2, 9, seed))
    (factor * out.square().sum()).backward()
    return out


def held_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Numbers that are no parameters are compared before anything is rewritten."""
    found = Findings()
    own = 0.5 + mesh.get_local_rank()
    for kind in (Number, Held, Listed, Scaling, Training):
        made = model(kind, own)
        before = copy.deepcopy(made.state_dict())
        said = complaint(tpplan.parallelize, made, PLAN, mesh, sequence_parallel=sp)
        found.add(kind.__name__, same("rank 1" in said and "computes something else" in said))
        if kind in (Number, Held, Listed):
            found.add(f"{kind.__name__}: where", same("layers.1 differs first" in said))
        now = made.state_dict()
        found.add("untouched", same(all(torch.equal(t, now[name]) for name, t in before.items())))
        ours = tpplan.parallelize(model(kind, 0.5), PLAN, mesh, sequence_parallel=sp)
        due = model(kind, 0.5)
        for seed in range(3):
            found.add(f"{kind.__name__} alike", error(step(due, seed), full(step(ours, seed))))
        found.add(f"{kind.__name__} alike", compare_gradients(due, ours))
    return found.errors


def buffers_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Buffers are those of the rank whose values count, or each rank's own."""
    found = Findings()
    rank = mesh.get_local_rank()
    due = model(Buffered, 0.5)
    ours: Any = tpplan.parallelize(model(Buffered, 0.5 + rank), PLAN, mesh, sequence_parallel=sp)
    found.add("one tensor", same(ours.layers[1].alias is ours.layers[1].scale))
    found.add("alike", error(step(due), full(step(ours))))
    found.add("alike", compare_gradients(due, ours))
    last: Any = tpplan.parallelize(
        model(Buffered, 0.5 + rank), PLAN, mesh, sequence_parallel=sp, src_data_rank=1
    )
    found.add("of rank 1", error(step(model(Buffered, 1.5)), full(step(last))))
    made = model(Buffered, 0.5 + rank)
    given = PLAN, mesh
    said = complaint(tpplan.parallelize, made, *given, sequence_parallel=sp, src_data_rank=None)
    found.add("each its own", same("rank 1" in said and "computes something else" in said))
    with mock.patch("tpplan.api.apply", side_effect=ValueError("no")):
        said = complaint(tpplan.parallelize, made, *given, sequence_parallel=sp)
    found.add("stopped", same(said == "no"))
    found.add("as it was", same(bool((made.layers[1].scale == 0.5 + rank).all())))
    found.add("as it was", same(int(made.layers[1].kept) == 50 + 100 * rank))
    return found.errors


def drawing_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Random sequences that the model's code draws from stand alike when a call begins."""
    found = Findings()
    rank = mesh.get_local_rank()

    def seed(own: int) -> None:
        random.seed(own)
        numpy.random.seed(own)
        torch.manual_seed(own)

    for kind in (PythonDrawing, NumpyDrawing, TorchDrawing, Dropping):
        due = model(kind)
        ours = tpplan.parallelize(model(kind), PLAN, mesh, sequence_parallel=sp)
        for number in range(3):
            outs = []
            for made in (due, ours):
                made.train(number != 1)
                seed(number)
                outs.append(full(step(made, number)))
            found.add(f"{kind.__name__} alike", error(*outs))
        found.add(f"{kind.__name__} alike", compare_gradients(due, ours))
        ours = tpplan.parallelize(model(kind), PLAN, mesh, sequence_parallel=sp).train()
        if kind in (NumpyDrawing, TorchDrawing):
            seed(4)
            random.seed(rank)  # which it does not draw from
            found.add(f"{kind.__name__} only", same(not complaint(step, ours)))
        seed(rank)  # by which one of them drops its layer, and would be waited for
        said = complaint(step, ours)
        found.add(kind.__name__, same("the random state of rank 1" in said))
    ours = tpplan.parallelize(model(Layer), PLAN, mesh, sequence_parallel=sp).train()
    seed(5 + rank)  # and nothing draws
    found.add("not drawn from", same(not complaint(step, ours)))
    due, ours = (model(Generating, 0.5) for _ in range(2))
    tpplan.parallelize(ours, PLAN, mesh, sequence_parallel=sp)
    for number in range(3):
        found.add("a generator", error(step(due, number), full(step(ours, number))))
    ours = model(Generating, 0.5 + rank)
    tpplan.parallelize(ours, PLAN, mesh, sequence_parallel=sp)
    found.add("of its own", same("the random state of rank 1" in complaint(step, ours)))
    return found.errors


def later_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """What comes to differ: a number, a loss, parameters."""
    found = Findings()
    rank = mesh.get_local_rank()

    def rewritten(*given: Any) -> Any:
        return tpplan.parallelize(model(*given), PLAN, mesh, sequence_parallel=sp)

    if not sp:  # of rows no rank has what another has
        ours = rewritten(Number, 0.5)
        step(ours)
        ours.layers[1].own = 0.5 + rank
        said = complaint(step, ours)
        found.add("a number", same("layers.2" in said and "is another one on rank 1" in said))
        ours = rewritten(Layer)
        ours.layers[2].after = lambda x: x * (1 + rank)
        said = complaint(step, ours)
        found.add("the result", same("the model (its result)" in said))
    ours = rewritten(Layer)
    said = complaint(step, ours, 0, 1.0 + rank)
    found.add("a loss", same("the gradient of what the model gives" in said))
    with torch.no_grad():
        found.add("no loss", same(not complaint(ours, token_ids(2, 9, 0))))
    for name in ("layers.0.norm.weight", "table.weight"):
        ours = rewritten(Layer)
        step(ours)
        with torch.no_grad():
            local(ours.get_parameter(name)).mul_(1 + rank)
        said = complaint(step, ours)
        found.add(name, same(f"{name} (parameter) is another one on rank 1" in said))
    ours = rewritten(Layer)
    step(ours)
    with torch.no_grad():
        local(ours.get_parameter("layers.0.up.weight")).mul_(1 + rank)  # of which each has its own
    found.add("a part", same(not complaint(step, ours)))
    return found.errors


@MODES
@pytest.mark.parametrize("job", [held_job, buffers_job, drawing_job, later_job])
def test_alike(ranks: Ranks, job: Any, sp: bool) -> None:
    assert not beyond(ranks.run(2, job, sp))
