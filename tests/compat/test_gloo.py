"""Groups of gloo that tpplan starts run one collective after another."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from tests.ranks import Ranks
from tpplan.compat import gloo_in_order
from tpplan.rewrite import world

MINUTE = datetime.timedelta(seconds=60)


def _alone() -> dist.ProcessGroupGloo:
    """A group of this process, made as ``init_process_group`` makes it."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    return c10d.ProcessGroupGloo(store, 0, 1, timeout=MINUTE)


@pytest.mark.parametrize("interfaces", ["", "lo", "lo,lo"])
def test_threads(interfaces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One inside, and torch's own number outside; devices and timeout as torch has them."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    torchs = c10d.ProcessGroupGloo
    before = _alone()
    with gloo_in_order(), gloo_in_order():
        inside = _alone()
        assert isinstance(inside, c10d.ProcessGroupGloo)
    assert c10d.ProcessGroupGloo is torchs
    groups = [before.options, inside.options, _alone().options]
    devices = max(1, len(interfaces.split(",")))
    assert [o._threads for o in groups] == [2 * devices, 1, 2 * devices]
    assert [len(o._devices) for o in groups] == [devices] * 3
    assert {o._timeout for o in groups} == {MINUTE}


def test_started_by_parallelize(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torchrun's world, on CPUs."""
    made: list[tuple[str, int]] = []
    start = lambda backend: made.append((backend, _alone().options._threads))  # noqa: E731
    monkeypatch.setattr(dist, "init_process_group", start)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    world._start()
    assert made == [("gloo", 1)]


def in_order_job(mesh: DeviceMesh) -> int:
    group = mesh.get_group()
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert bool((x == mesh.size()).all())
    return group._get_backend(torch.device("cpu")).options._threads  # type: ignore[no-any-return]


def test_ranks_of_tests(ranks: Ranks) -> None:
    for shape in (2, 4, "ep2"):
        assert set(ranks.run(shape, in_order_job)) == {1}
