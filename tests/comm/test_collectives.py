"""Collectives that are started and waited for later: on real ranks, simulated ones, and traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.ranks import Ranks
from tpplan.comm import collectives
from tpplan.comm.collectives import Group, Handle, Site
from tpplan.comm.conjugates import Transition
from tpplan.comm.exchange import exchange
from tpplan.compat import simulate
from tpplan.simulate import Recorder

Started = Callable[[torch.Tensor, Group, Site], Handle]
Whole = Callable[[torch.Tensor, Group, Site], torch.Tensor]

BIAS = torch.arange(4.0)
PAIRS: dict[str, tuple[Started, Whole]] = {
    "all_reduce": (collectives.start_all_reduce, collectives.all_reduce),
    "all_gather": (
        lambda x, group, site: collectives.start_all_gather(x, 1, 11, group, site),
        lambda x, group, site: collectives.all_gather(x, 1, 11, group, site),
    ),
    "reduce_scatter": (
        lambda x, group, site: collectives.start_reduce_scatter(x, 1, group, site, BIAS),
        lambda x, group, site: collectives.reduce_scatter(x, 1, group, site, BIAS),
    ),
}


def expected(kind: str, given: list[torch.Tensor], rank: int) -> torch.Tensor:
    """The result, of what all ranks were given."""
    tp = len(given)
    if kind == "all_gather":
        return torch.cat(given, 1)[:, :11]
    total = torch.stack(given).sum(0)
    if kind == "all_reduce":
        return total
    rows = -(-total.size(1) // tp)
    padded = torch.nn.functional.pad(total, [0, 0, 0, rows * tp - total.size(1)])
    return padded[:, rank * rows : (rank + 1) * rows] + BIAS


def job(mesh: DeviceMesh, kind: str) -> bool:
    """Two under way at once, the second waited for first, and the sites they are seen at."""
    start, whole = PAIRS[kind]
    given = [torch.arange(2.0 * 6 * 4).view(2, 6, 4) * (r + 1) for r in range(mesh.size())]
    group, first, second = Group.of(mesh), Site("a", "first"), Site("b", "second")
    mine, want = given[group.rank], expected(kind, given, group.rank)
    recorder = Recorder()
    with recorder:
        one = start(mine, group, first)
        two = start(2 * mine, group, second)
        between = mine @ mine.transpose(1, 2)
        results = [two.wait(), one.wait()]
        results.append(whole(mine, group, first))
    seen = [(c.kind, c.module) for c in recorder.collectives]
    bias = BIAS if kind == "reduce_scatter" else 0.0
    right = torch.equal(results[0] - bias, 2 * (want - bias)) and between.shape == (2, 6, 6)
    right = right and torch.equal(results[1], want) and torch.equal(results[2], want)
    return right and seen == [(kind, "a"), (kind, "b"), (kind, "a")]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("tp", [2, 3])
def test_on_real_ranks(ranks: Ranks, tp: int, kind: str) -> None:
    assert all(ranks.run(tp, job, kind))


@pytest.mark.parametrize("kind", PAIRS)
def test_on_simulated_ranks(kind: str) -> None:
    assert all(simulate(4, lambda mesh: job(mesh, kind)))


def traced_job(mesh: DeviceMesh, kind: str) -> bool:
    """Compiled as one graph with other work between the two."""
    start, whole = PAIRS[kind]
    group, site = Group.of(mesh), Site("a", "traced")
    x = torch.arange(2.0 * 6 * 4).view(2, 6, 4) * (group.rank + 1)

    def between(x: torch.Tensor) -> torch.Tensor:
        handle = start(x, group, site)
        y = torch.sin(x).sum()
        return handle.wait() + y

    with torch.no_grad():
        got = torch.compile(between, backend="aot_eager", fullgraph=True)(x)
        return torch.equal(got, whole(x, group, site) + torch.sin(x).sum())


@pytest.mark.parametrize("kind", PAIRS)
def test_traced(ranks: Ranks, kind: str) -> None:
    assert all(ranks.run(2, traced_job, kind))


SHAPES = [((6, 4), 0), ((1, 6, 4), 1), ((2, 5, 4), 1), ((1, 1, 6, 4), 2), ((2, 1, 3, 6), 3)]


def scattered_job(mesh: DeviceMesh) -> list[object]:
    """What is not as due of the chunks of sums, along any dimension."""
    group, site = Group.of(mesh), Site("a", "any dimension")
    wrong = []
    for shape, dim in SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        length, rows = shape[dim], -(-shape[dim] // mesh.size())
        missing = [0, 0] * (len(shape) - 1 - dim) + [0, rows * mesh.size() - length]
        want = torch.nn.functional.pad(mesh.size() * whole, missing).chunk(mesh.size(), dim)
        got = collectives.reduce_scatter(whole, dim, group, site)
        # the model may change it in place
        if got._is_view() or not torch.equal(got, want[group.rank]):
            wrong.append((shape, dim))
    return wrong


def test_along_any_dimension() -> None:
    for size in (2, 4):
        assert simulate(size, scattered_job) == [[]] * size


def kinds_job(mesh: DeviceMesh, rows: tuple[int, int]) -> bool:
    """Rows of numbers of several kinds, a single one too, arrive as they were sent."""
    rank, site = mesh.get_local_rank(), Site("", "rows")
    sent = [rows[0], rows[1]] if rank == 0 else [rows[1], rows[0]]
    received = [rows[0], rows[1]] if rank == 0 else [rows[1], rows[0]]
    many = sum(sent)
    numbers = torch.arange(many * 3, dtype=torch.float64).view(many, 3) + 100 * rank
    chosen = torch.arange(many, dtype=torch.int32) + 100 * rank
    weights = torch.arange(many, dtype=torch.float32) + 100 * rank
    transition = Transition(Group.of(mesh), site, site)
    got = exchange((chosen, numbers, weights), sent, received, transition)
    made = exchange(got, received, sent, transition)
    return all(map(torch.equal, made, (chosen, numbers, weights)))


@pytest.mark.parametrize("rows", [(1, 0), (0, 1), (2, 1), (3, 2)])
def test_rows_of_several_kinds_arrive(ranks: Ranks, rows: tuple[int, int]) -> None:
    assert all(ranks.run(2, kinds_job, rows))
