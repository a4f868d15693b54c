"""Which part of a whole tensor this rank holds of a DTensor, FSDP2's cuts included.

The last placement is along the tensor-parallel ranks, those before it are FSDP2's: they cut what a
tensor-parallel rank holds further.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from tpplan.layout import Rows, placed


def tp_mesh(t: DTensor) -> DeviceMesh:
    """The mesh of the tensor-parallel ranks."""
    mesh = t.device_mesh
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]  # type: ignore[index]


def tp_rank(t: DTensor) -> int:
    """This rank's place among them."""
    return t.device_mesh.get_local_rank(t.device_mesh.ndim - 1)


def block(t: DTensor) -> list[tuple[int, int]]:
    """For each dimension, from where to where this rank's part reaches.

    Of the whole tensor; under ``Rows``, of what its tensor-parallel rank holds.
    """
    *outer, last = enumerate(t.placements)
    lengths = list(t.shape)
    if isinstance(last[1], Rows):
        lengths[last[1].dim] = last[1].length(tp_rank(t))
        cuts: list[tuple[int, Placement]] = outer
    else:
        cuts = [last, *outer]
    ranges = [(0, length) for length in lengths]
    for i, kind in cuts:
        if not kind.is_replicate():
            start, stop = ranges[kind.dim]  # type: ignore[attr-defined]
            rows = -(-(stop - start) // t.device_mesh.size(i))
            first = min(start + rows * t.device_mesh.get_local_rank(i), stop)
            ranges[kind.dim] = first, min(first + rows, stop)  # type: ignore[attr-defined]
    return ranges


def part_of(whole: torch.Tensor, t: DTensor) -> torch.Tensor:
    """What this rank holds of ``whole`` under the placements of ``t``: a copy, differentiable."""
    rows = t.placements[-1]
    if isinstance(rows, Rows):
        return narrowed(rows.take(whole, tp_rank(t)), t)
    part = narrowed(whole, t)
    return part.clone() if part is whole else part


def narrowed(local: torch.Tensor, t: DTensor) -> torch.Tensor:
    """This rank's block of what its tensor-parallel rank holds; a copy where that is less."""
    part = local
    for dim, (start, stop) in enumerate(block(t)):
        if stop - start != local.size(dim):
            part = part.narrow(dim, start, stop - start)
    return part if part is local else part.clone(memory_format=torch.contiguous_format)


def chunks(t: DTensor) -> list[tuple[list[int], list[int], int]]:
    """What this rank holds under ``Rows``: offsets and sizes within the whole tensor, and the
    first local row."""
    rows = t.placements[-1]
    assert isinstance(rows, Rows)
    ranges, found = block(t), []
    if any(start == stop for start, stop in ranges):
        return []
    first, last = ranges[rows.dim]
    for at, (start, stop) in placed(rows.cells[tp_rank(t)]):
        begin, end = max(at, first), min(at + stop - start, last)
        if begin < end:
            offsets = [start for start, _ in ranges]
            sizes = [stop - start for start, stop in ranges]
            offsets[rows.dim], sizes[rows.dim] = start + begin - at, end - begin
            found.append((offsets, sizes, begin - first))
    return found
