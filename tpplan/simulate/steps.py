"""A run as data: what each step computes, moves, allocates and sends, in order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

PHASES = ("forward", "backward", "gradient_sync", "optimizer")


@dataclass(frozen=True)
class Collective:
    """One collective of one rank.

    Attributes:
        phase: forward, backward, gradient_sync, optimizer or startup.
        module: path of the module it serves; reason: what for; rule: the plan's pattern.
        shape, dtype: of the whole tensor: what an all-reduce sums, what an all-gather yields,
            what a reduce-scatter takes.
        bytes: sent by a rank with a ring algorithm over N ranks of D bytes: 2(N-1)/N D for an
            all-reduce, (N-1)/N D for the others (Thakur, Rabenseifner and Gropp 2005, section 4).
        dimension: the dimension of the mesh whose ranks take part; ranks: how many they are;
            stride: by how much the numbers of two neighbours differ.
        worst_bytes: of a collective whose sizes hang on which experts tokens choose: ``bytes`` is
            what is to be expected, where all experts are chosen as often; this is what goes to, or
            comes from, a rank that has all that are chosen. None of others.
        fused: whether it runs beside the products of its op, in as many pieces as there are ranks.
    """

    phase: str
    module: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    reason: str
    rule: str | None = None
    dimension: str = "tp"
    ranks: int = 1
    stride: int = 1
    worst_bytes: int | None = None
    fused: bool = False

    @property
    def at_worst(self) -> int:
        """Bytes, whichever experts tokens choose."""
        return self.bytes if self.worst_bytes is None else self.worst_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Matmul:
    """What one matrix multiplication, convolution or attention op does.

    Attributes:
        flops: two for each multiplication and addition; attention is counted whole, masked or not.
        bytes: of everything it reads and writes.
        dtype: of its inputs.
    """

    flops: int
    bytes: int
    dtype: str


@dataclass(frozen=True)
class Member:
    """The ``index``-th module of the list of modules at ``stack``."""

    stack: str
    index: int


@dataclass(frozen=True)
class Step:
    """Consecutive ops of one module, and the collective, or the wait for one, that ends them.

    Attributes:
        phase: forward, backward or optimizer: when it runs; recomputation is backward.
        module: path of the innermost module the ops belong to.
        element: the module of a stack that was entered last; None before the first.
        matmuls: ops that are counted in FLOPs, with how often each occurs.
        moved: bytes read and written by all other ops, views and collectives aside.
        ops: how many ops those were, matmuls included.
        net: bytes allocated less bytes freed; peak: the most that was allocated at once, over what
            was when the step began; gradients: bytes of ``net`` that are gradients of parameters,
            kept until the end.
        later: whether more is done before its collective is waited for.
        awaited: where it ends with the wait for such a one: how many were issued after that.
    """

    phase: str
    module: str
    element: Member | None
    matmuls: tuple[tuple[Matmul, int], ...] = ()
    moved: int = 0
    ops: int = 0
    net: int = 0
    peak: int = 0
    gradients: int = 0
    collective: Collective | None = None
    later: bool = False
    awaited: int | None = None

    @property
    def flops(self) -> int:
        """Of all its matmuls."""
        return sum(matmul.flops * count for matmul, count in self.matmuls)


def data_bytes(shape: Iterable[int], dtype: str) -> int:
    """Bytes of a tensor."""
    size: int = math.prod(shape) * getattr(torch, dtype).itemsize
    return size


def ring_bytes(kind: str, ranks: int, shape: Iterable[int], dtype: str) -> int:
    """Bytes that a rank sends with a ring algorithm; see ``Collective``."""
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) * data_bytes(shape, dtype) // ranks


def worst_bytes(ranks: int, shape: Iterable[int], dtype: str) -> int:
    """Bytes that N - 1 ranks send to one, each of them all that it has."""
    return (ranks - 1) * data_bytes(shape, dtype)


def counts(collectives: Iterable[Collective], phase: str) -> dict[str, int]:
    """How many collectives of each kind a phase issues; the three usual kinds always appear."""
    found = Counter(all_reduce=0, all_gather=0, reduce_scatter=0)
    found.update(collective.kind for collective in collectives if collective.phase == phase)
    return dict(found)
