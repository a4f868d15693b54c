"""Which rows of a parameter each rank holds, where ``Shard`` cannot say it.

A packed projection ([q|k|v] in one weight) is cut part by part, and a key-value head may be held
by several ranks. Both are one thing: for every rank, the ranges of rows it holds, in order.
``Rows`` says that as a DTensor placement; the parameter stays one tensor of its original shape,
and everything that gathers or saves it goes through these ranges. (``_StridedShard`` covers equal
parts only, and no sharing.)
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

Range = tuple[int, int]


class Rows(Placement):  # type: ignore[misc]
    """A placement: along ``dim``, rank r holds the ranges ``pieces[r]``, one after the other.

    Attributes:
        cells: the pieces, cut so that no two of them overlap only in part.
    """

    dim: int
    pieces: tuple[tuple[Range, ...], ...]
    cells: tuple[tuple[Range, ...], ...]

    def __init__(self, dim: int, pieces: Sequence[Sequence[Range]]) -> None:
        super().__init__()
        self.dim = dim
        self.pieces = tuple(_joined(ranges) for ranges in pieces)
        self.cells = _cells(self.pieces)
        holders = collections.Counter(cell for cells in self.cells for cell in cells)
        self._shared = _joined([cell for cell in sorted(holders) if holders[cell] > 1])
        self._owned = _firsts(self.cells)

    def is_shard(self, dim: int | None = None) -> bool:
        """Not a ``Shard``: code that cuts evenly must not take it for one."""
        return False

    def is_replicate(self) -> bool:
        """Never."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Never."""
        return False

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = isinstance(other, Rows) and self.dim == other.dim
        return same and self.pieces == other.pieces  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.dim, self.pieces))

    def __repr__(self) -> str:
        return f"Rows({self.dim}, {self.pieces})"

    def __str__(self) -> str:
        return f"Rows({self.dim})"

    def __reduce__(self) -> tuple[type[Rows], tuple[int, tuple[tuple[Range, ...], ...]]]:
        return Rows, (self.dim, self.pieces)

    def length(self, rank: int = 0) -> int:
        """How many rows a rank holds; the same for every rank."""
        return sum(stop - start for start, stop in self.pieces[rank])

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The rows of ``whole`` that ``rank`` holds; a copy."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.pieces[rank]]
        return torch.cat(parts, self.dim)

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The same, of ``whole`` itself where they lie together."""
        if len(self.pieces[rank]) > 1:
            return self.take(whole, rank)
        ((start, stop),) = self.pieces[rank]
        return whole.narrow(self.dim, start, stop - start)

    def put(self, whole: torch.Tensor, local: torch.Tensor, rank: int) -> None:
        """Write the rows that ``rank`` holds into ``whole``, in place."""
        at = 0
        for start, stop in self.pieces[rank]:
            rows = stop - start
            whole.narrow(self.dim, start, rows).copy_(local.narrow(self.dim, at, rows))
            at += rows

    def shared(self) -> tuple[Range, ...]:
        """The ranges that more than one rank holds, in order."""
        return self._shared

    def owned(self, rank: int) -> tuple[Range, ...]:
        """Local ranges of the rows that no rank before ``rank`` holds: each row is owned once."""
        return self._owned[rank]

    def overlaps(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """Where ``rank`` holds shared rows: (start here, start among the shared rows, rows)."""
        where = []
        for at, (start, stop) in placed(self.cells[rank]):
            base = 0
            for first, last in self._shared:
                if first <= start < last:
                    where.append((at, base + start - first, stop - start))
                base += last - first
        return tuple(where)


def own_part(whole: torch.Tensor, placement: Placement, rank: int, tp: int) -> torch.Tensor:
    """What a rank has of a tensor that is cut evenly, or by rows; a copy."""
    if isinstance(placement, Rows):
        return placement.take(whole, rank)
    assert isinstance(placement, Shard)
    each = whole.size(placement.dim) // tp
    return whole.narrow(placement.dim, rank * each, each).clone()


def _cells(pieces: Sequence[Sequence[Range]]) -> tuple[tuple[Range, ...], ...]:
    marks = sorted({end for ranges in pieces for piece in ranges for end in piece})
    index = {mark: i for i, mark in enumerate(marks)}
    return tuple(
        tuple(
            cell
            for start, stop in ranges
            for cell in itertools.pairwise(marks[index[start] : index[stop] + 1])
        )
        for ranges in pieces
    )


def _firsts(cells: Sequence[Sequence[Range]]) -> tuple[tuple[Range, ...], ...]:
    """For every rank, the local ranges of the cells that no rank before it holds."""
    result, seen = [], set[Range]()
    for own in cells:
        here = [(at, at + cell[1] - cell[0]) for at, cell in placed(own) if cell not in seen]
        result.append(_joined(here))
        seen.update(own)
    return tuple(result)


def placed(ranges: Sequence[Range]) -> list[tuple[int, Range]]:
    """Each range with the place at which it begins where they lie one after the other."""
    lengths = (stop - start for start, stop in ranges)
    return list(zip(itertools.accumulate(lengths, initial=0), ranges, strict=False))


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Neighbouring ranges as one; the order stays."""
    result: list[Range] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        elif stop > start:
            result.append((start, stop))
    return tuple(result)


@dataclass(frozen=True)
class Part:
    """A part of a packed projection: ``size`` rows that are ``units`` heads of equal size."""

    name: str
    size: int
    units: int


class MisfitError(ValueError):
    """Parts that cannot be shared out among that many ranks."""


NOTHING = "its weight holds no numbers, so that there is nothing to share out"


def rows_of(parts: Sequence[Part], repeat: int, tp: int, dim: int = 0, fixed: bool = False) -> Rows:
    """The rows of each rank, where ``repeat`` blocks of ``parts`` are stored one after the other.

    Whole blocks are dealt out while there are enough; then the heads of each block, and when there
    are fewer heads of a part than ranks, several ranks hold the same one: rank r of t holds head
    r·units // t.

    Args:
        fixed: the model's code counts on ``repeat`` blocks: each rank gets as many, but smaller.

    Raises:
        MisfitError: where neither number divides the other.
    """
    block = sum(part.size for part in parts)
    if fixed and repeat > 1:
        return Rows(dim, [_fixed_blocks(parts, repeat, tp, rank) for rank in range(tp)])
    if repeat % tp == 0:
        rows = repeat // tp * block
        return Rows(dim, [[(r * rows, (r + 1) * rows)] for r in range(tp)])
    if tp % repeat:
        raise MisfitError(f"tp {tp} does not fit {repeat} blocks")
    sharers = tp // repeat
    pieces = []
    for rank in range(tp):
        start, index = rank // sharers * block, rank % sharers
        ranges = []
        for part in parts:
            first, last = _units(part, index, sharers)
            width = part.size // part.units
            ranges.append((start + first * width, start + last * width))
            start += part.size
        pieces.append(ranges)
    return Rows(dim, pieces)


def _fixed_blocks(parts: Sequence[Part], repeat: int, tp: int, rank: int) -> list[Range]:
    """The rank's heads, which follow each other, as ``repeat`` blocks of all parts."""
    block = sum(part.size for part in parts)
    ranges = []
    for index in range(repeat):
        start = (rank * repeat + index) // tp * block
        for part in parts:
            if part.units % tp:
                raise MisfitError(f"tp {tp} does not divide the {part.units} of '{part.name}'")
            rows = part.size // tp
            first = start + (rank * repeat + index) % tp * rows
            ranges.append((first, first + rows))
            start += part.size
    return ranges


def _units(part: Part, index: int, ranks: int) -> Range:
    if part.units % ranks == 0:
        each = part.units // ranks
        return index * each, (index + 1) * each
    if ranks % part.units == 0:
        unit = index * part.units // ranks
        return unit, unit + 1
    raise MisfitError(f"{ranks} ranks do not fit {part.units} of '{part.name}'")
