"""What collectives cost: the formulas of the literature, by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tpplan.cost import Hardware, Link, load_hardware
from tpplan.cost.costs import ALGORITHMS, collective_cost, collective_seconds, send_seconds
from tpplan.simulate.recorder import KINDS
from tpplan.simulate.steps import ring_bytes

ALPHA, BETA = 1e-6, 100e9
SLOW_ALPHA, SLOW_BETA = 5e-6, 10e9
BIG, SMALL = 2**30, 2**10
PLAIN = Hardware(
    "plain", "", {"float32": 1e12}, 1e12, 1e10, 8, Link(BETA, ALPHA), Link(SLOW_BETA, SLOW_ALPHA)
)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_rings(ranks: int) -> None:
    """Thakur, Rabenseifner and Gropp 2005, section 4; ANCHORS, section 2."""
    half = (ranks - 1) * ALPHA + (ranks - 1) / ranks * BIG / BETA
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert collective_seconds(kind, BIG, ranks, PLAIN) == pytest.approx(half)
    whole = collective_cost("all_reduce", BIG, ranks, PLAIN)
    assert whole.seconds == pytest.approx(2 * half)
    assert whole.algorithm == "ring"


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_transfer_is_what_the_report_calls_sent(kind: str, ranks: int) -> None:
    cost = collective_cost(kind, BIG, ranks, PLAIN)
    sent = ring_bytes(kind, ranks, (BIG // 4,), "float32")
    assert cost.transfer * BETA == pytest.approx(sent)


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_trees_are_for_small_messages(ranks: int) -> None:
    """2⌈log₂N⌉ latencies for 2(N-1), and all of D for (N-1)/N of it: Sanders et al. 2009."""
    small = collective_cost("all_reduce", SMALL, ranks, PLAIN)
    depth = math.ceil(math.log2(ranks))
    assert small.algorithm == "tree"
    assert small.seconds == pytest.approx(2 * depth * ALPHA + 2 * SMALL / BETA)
    # where both are equal: 2(N-1-depth)α = 2/N·D/β
    even = int((ranks - 1 - depth) * ALPHA * BETA * ranks)
    assert collective_cost("all_reduce", int(even * 0.9), ranks, PLAIN).algorithm == "tree"
    assert collective_cost("all_reduce", int(even * 1.1), ranks, PLAIN).algorithm == "ring"


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("size", [1, SMALL, 2**20, BIG])
def test_no_all_reduce_beats_the_lower_bound(ranks: int, size: int) -> None:
    """Patarasuk and Yuan 2009: each rank sends at least 2(N-1)/N·D."""
    cost = collective_cost("all_reduce", size, ranks, PLAIN)
    assert cost.transfer >= 2 * (ranks - 1) / ranks * size / BETA * (1 - 1e-12)
    assert cost.latency >= math.ceil(math.log2(ranks)) * ALPHA


def test_broadcast() -> None:
    cost = collective_cost("broadcast", BIG, 8, PLAIN)
    assert (cost.algorithm, cost.seconds) == ("tree", pytest.approx(3 * ALPHA + BIG / BETA))


def test_between_nodes() -> None:
    """Inside the nodes, then a share of it between them (Cho et al. 2019)."""
    cost = collective_cost("all_reduce", BIG, 32, PLAIN)
    inside = 14 * ALPHA + 14 / 8 * BIG / BETA
    between = 6 * SLOW_ALPHA + 6 / 4 * (BIG / 8) / SLOW_BETA
    assert cost.seconds == pytest.approx(inside + between)
    assert cost.algorithm == "ring + ring"
    gathered = collective_cost("all_gather", BIG, 32, PLAIN)
    assert 2 * gathered.seconds == pytest.approx(cost.seconds)
    exchanged = 7 * ALPHA + 7 / 8 * BIG / BETA + 3 * SLOW_ALPHA + 3 / 4 * BIG / SLOW_BETA
    assert collective_seconds("all_to_all", BIG, 32, PLAIN) == pytest.approx(exchanged)


def test_between_nodes_of_one_gpu() -> None:
    single = dataclasses.replace(PLAIN, node=1)
    cost = collective_cost("all_gather", BIG, 4, single)
    assert cost.seconds == pytest.approx(3 * SLOW_ALPHA + 3 / 4 * BIG / SLOW_BETA)


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_more_is_never_faster(kind: str) -> None:
    times = [collective_seconds(kind, BIG, n, PLAIN) for n in (1, 2, 4, 8, 16, 64)]
    assert times[0] == 0.0
    assert times == sorted(times)
    sizes = [collective_seconds(kind, size, 8, PLAIN) for size in (0, 1, SMALL, BIG)]
    assert sizes == sorted(sizes)


def test_efficiency_counts() -> None:
    """NCCL's rings reach about 370 of an H100's 450 GB/s."""
    cost = collective_cost("all_gather", BIG, 8, load_hardware("h100-nvlink"))
    assert 7 / 8 * BIG / cost.transfer == pytest.approx(370e9, rel=0.01)


def test_a_mesh_is_slow_for_few() -> None:
    """Two of eight fully connected MI300X have one wire in common."""
    hardware = load_hardware("mi300x").reached
    two = collective_cost("all_gather", BIG, 2, hardware)
    assert two.transfer == pytest.approx(BIG / 2 / (64e9 * 0.7))


def test_sending() -> None:
    assert send_seconds(BIG, PLAIN.link) == pytest.approx(ALPHA + BIG / BETA)
    assert send_seconds(BIG, load_hardware("mi300x").link) == pytest.approx(1.9e-6 + BIG / 64e9)


def test_whatever_is_recorded_has_a_cost() -> None:
    assert set(KINDS.values()) <= set(ALGORITHMS)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="no collective 'gossip'; there are all_gather"):
        collective_cost("gossip", 1, 2, PLAIN)
    with pytest.raises(ValueError, match="of 0 ranks"):
        collective_cost("all_reduce", 1, 0, PLAIN)
