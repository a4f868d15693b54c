"""Slices of stacked parameters: where their gradients are, and the whole of all ranks' parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.layout import Rows
from tpplan.observe.numbers import largest

_TOLERANCE = 1e-9


def together(
    parts: Sequence[torch.Tensor], placed: Placement | None, whole: torch.Tensor
) -> torch.Tensor:
    """The gradient that the ranks' own make."""
    if placed is None:
        return torch.stack(list(parts)).sum(0)
    if isinstance(placed, Shard):
        return torch.cat(list(parts), placed.dim)
    assert isinstance(placed, Rows)
    made = torch.zeros_like(whole)
    for rank, part in enumerate(parts):
        placed.put(made, part, rank)
    return made


def hit(gradient: torch.Tensor) -> torch.Tensor:
    """For which of the first dimension there is a gradient at all."""
    return gradient.flatten(1).ne(0).any(1) if gradient.dim() > 1 else gradient != 0


def slice_of(support: torch.Tensor, hit: torch.Tensor) -> tuple[int | None, list[int]] | None:
    """Along which dimension, and where, a gradient is there; (None, []) where it is everywhere.

    None where it is no slice.
    """
    support = support[hit]
    if bool(support.all()):
        return None, []
    for dim in range(1, support.dim()):
        others = [d for d in range(support.dim()) if d != dim]
        some, every = support.any(dim=others), support.all(dim=others)
        if bool((some == every).all()):
            return dim, some.nonzero().flatten().tolist()
    return None


def placement(dim: int, rows: Sequence[Sequence[int]], size: int) -> Placement:
    """Where a parameter goes of which rank r has ``rows[r]`` of the ``size`` of a dimension."""
    each = size // len(rows)
    if all(list(own) == list(range(r * each, (r + 1) * each)) for r, own in enumerate(rows)):
        return Shard(dim)
    pieces = []
    for own in rows:
        starts = [i for i in own if i - 1 not in own]
        stops = [i + 1 for i in own if i + 1 not in own]
        pieces.append(list(zip(starts, stops, strict=True)))
    return Rows(dim, pieces)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they differ by what float64 rounds."""
    near = _TOLERANCE * max(largest(other), 1e-30)
    return bool(torch.allclose(one, other, rtol=0, atol=near))
