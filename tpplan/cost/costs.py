"""How long collectives take: the α-β model over rings and trees, inside nodes and between them.

A message of n bytes takes α + n/β: a latency, and the bytes over the bandwidth (Hockney 1994, "The
communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20). A collective
is so many messages one after the other, and so many bytes that each rank sends in all. Nothing
else is counted: no arithmetic of a reduction, no kernel launch, no traffic of others.

The algorithms are those that NCCL and RCCL choose between on a node: rings, and for all-reduce
and broadcast trees. Sources of each are named in ``ALGORITHMS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpplan.cost.hardware import Hardware, Link


@dataclass(frozen=True)
class Algorithm:
    """How a collective is done by N ranks.

    Attributes:
        rounds: messages one after the other, by N.
        volume: bytes that a rank sends, as a multiple of the data, by N.
    """

    name: str
    rounds: Callable[[int], int]
    volume: Callable[[int], float]


@dataclass(frozen=True)
class Cost:
    """The time of a collective, in seconds.

    Attributes:
        latency: its messages' latencies; transfer: its bytes over the bandwidth.
        algorithm: the faster one, "ring" for example; for ranks in several nodes that inside and
            that between them.
    """

    latency: float
    transfer: float
    algorithm: str

    @property
    def seconds(self) -> float:
        """Both parts."""
        return self.latency + self.transfer


def _log2(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


# Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in
# MPICH", IJHPCA 19(1), sections 4.1 and 4.4: N - 1 messages of 1/N of the data each (the bucket
# algorithms of Chan, Heimlich, Purkayastha and van de Geijn 2007, "Collective communication:
# theory, practice, and experience", CCPE 19(13))
_RING = Algorithm("ring", lambda n: n - 1, _share)

ALGORITHMS: Mapping[str, tuple[Algorithm, ...]] = {
    "all_gather": (_RING,),
    "reduce_scatter": (_RING,),
    "all_reduce": (
        # a reduce-scatter and an all-gather: the fewest bytes possible (Patarasuk and Yuan 2009,
        # "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2))
        Algorithm("ring", lambda n: 2 * (n - 1), lambda n: 2 * _share(n)),
        # up and down a double binary tree, pipelined (Sanders, Speck and Träff 2009, "Two-tree
        # algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12))
        Algorithm("tree", lambda n: 2 * _log2(n), lambda _: 2.0),
    ),
    # down a double binary tree
    "broadcast": (Algorithm("tree", _log2, lambda _: 1.0),),
    # Thakur et al. 2005, section 4.3: pairwise exchange
    "all_to_all": (Algorithm("pairwise", lambda n: n - 1, _share),),
}

# Between nodes, GPUs of equal place talk over their own share of the network. Where a collective
# inside the nodes leaves each of them a part of the data, only that part travels (Cho, Finkler,
# Kung and Hunter 2019, "BlueConnect", MLSys).
_SCATTERED = frozenset({"all_reduce", "all_gather", "reduce_scatter"})


def collective_cost(
    kind: str, data_bytes: int, ranks: int, hardware: Hardware, stride: int = 1
) -> Cost:
    """What a collective costs on ``hardware``, at the bandwidths that are reached.

    Ranks fill nodes one after the other. Within one node, all-gather and reduce-scatter take
    (N-1)α + (N-1)/N·D/β; all-reduce the smaller of twice that and of 2⌈log₂N⌉α + 2·D/β. In
    several nodes it is done inside them and between them, one after the other: what overlaps of
    the two is not counted. With tensor parallelism within a node, as Megatron-LM recommends
    (Narayanan et al. 2021, section 3.2), only the first matters.

    Args:
        kind: as a ``Collective``'s.
        data_bytes: D, of the whole tensor: what an all-reduce sums, what an all-gather yields,
            what a reduce-scatter takes, what a rank has in an all-to-all.
        ranks: N.
        stride: by how much the numbers of two neighbours differ: of a node's ranks only so many
            take part.

    Raises:
        ValueError: where there is no such collective, or nobody to take part.
    """
    if kind not in ALGORITHMS:
        raise ValueError(f"no collective '{kind}'; there are {', '.join(ALGORITHMS)}")
    if ranks < 1:
        raise ValueError(f"a collective of {ranks} ranks")
    real = hardware.reached
    there = max(real.node // stride, 1)
    inside, nodes = min(ranks, there), math.ceil(ranks / there)
    travels = data_bytes / inside if kind in _SCATTERED else data_bytes
    levels = ((data_bytes, inside, real.link), (travels, nodes, real.network))
    parts = [_cheapest(kind, size, group, link) for size, group, link in levels if group > 1]
    return Cost(
        sum(part.latency for part in parts),
        sum(part.transfer for part in parts),
        " + ".join(part.algorithm for part in parts) or "none",
    )


def collective_seconds(kind: str, data_bytes: int, ranks: int, hardware: Hardware) -> float:
    """The seconds of ``collective_cost``."""
    return collective_cost(kind, data_bytes, ranks, hardware).seconds


def send_seconds(data_bytes: float, link: Link) -> float:
    """Seconds of one message from one GPU to another, over one of the link's wires.

    This is what a stage of a pipeline waits for. Give ``hardware.reached``'s link or network for
    the bandwidth that is reached.
    """
    return link.latency + data_bytes / link.among(2)


def _cheapest(kind: str, data_bytes: float, ranks: int, link: Link) -> Cost:
    bandwidth = link.among(ranks)
    costs = (
        Cost(
            algorithm.rounds(ranks) * link.latency,
            algorithm.volume(ranks) * data_bytes / bandwidth,
            algorithm.name,
        )
        for algorithm in ALGORITHMS[kind]
    )
    return min(costs, key=lambda cost: cost.seconds)
