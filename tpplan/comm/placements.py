"""How a DTensor is placed over the tensor-parallel ranks, and which part of it this rank holds.

Its mesh may have further dimensions, FSDP2's: they cut what a tensor-parallel rank holds further.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.compat import DTensorSpec, StridedShard, local_of
from tpplan.layout import Rows

Placed = DTensor | DTensorSpec


def tp_dim(mesh: DeviceMesh) -> int:
    """The mesh dimension of the tensor-parallel ranks: of that name, or the last one."""
    names = mesh.mesh_dim_names or ()
    return names.index("tp") if "tp" in names else mesh.ndim - 1


def tp_mesh(t: Placed) -> DeviceMesh:
    """The mesh of the tensor-parallel ranks."""
    mesh = t.device_mesh
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[tp_dim(mesh)]]  # type: ignore[index]


def tp_rank(t: Placed) -> int:
    """This rank's place among them."""
    return t.device_mesh.get_local_rank(tp_dim(t.device_mesh))


def along_tp(t: Placed) -> Placement:
    """The placement over the tensor-parallel ranks."""
    kinds = t.placements
    return kinds[0] if len(kinds) == 1 else kinds[tp_dim(t.device_mesh)]


def around_tp(t: Placed) -> tuple[DeviceMesh, list[Placement]]:
    """The other dimensions of a mesh that has such, and the placements over them."""
    mesh, kinds = t.device_mesh, list(t.placements)
    names = list(mesh.mesh_dim_names or ())
    del names[tp_dim(mesh)], kinds[tp_dim(mesh)]
    return mesh[tuple(names)], kinds


def is_whole(t: Placed) -> bool:
    """Whether every rank holds all of it."""
    return all(kind.is_replicate() for kind in t.placements)


def is_placed_as(t: Any, twin: DTensor) -> bool:
    """Whether what an op made of ``twin`` is of the same part of it, if it is a DTensor."""
    if not isinstance(t, DTensor):
        return True
    return t.placements == twin.placements and local_of(t).shape == local_of(twin).shape


def number(t: Any) -> Any:
    """``t``; a single number of which ranks have parts, whole.

    torch makes of a shard and such a number a tensor of which each rank has a part of the sum.
    """
    if isinstance(t, DTensor) and t.dim() == 0 and not is_whole(t):
        return t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)
    return t


def is_cut(t: Placed, dim: int) -> bool:
    """Whether the tensor-parallel ranks hold equal parts along ``dim``."""
    kind = along_tp(t)
    if torch.compiler.is_compiling():
        return kind == Shard(dim)  # before torch 2.13 TorchDynamo does not know of what class it is
    return type(kind) is Shard and kind.dim == dim


def dim_of(t: Placed) -> int:
    """The dimension along which the tensor-parallel ranks hold equal parts."""
    kind = along_tp(t)
    assert isinstance(kind, Shard)
    return kind.dim


def ranges_of(t: Placed) -> Rows | None:
    """The ranges of rows that the tensor-parallel ranks hold, where parts are not equal."""
    kind = along_tp(t)
    return kind if isinstance(kind, Rows) else None


def block(t: DTensor) -> list[tuple[int, int]]:
    """For each dimension, from where to where this rank's part reaches.

    Of the whole tensor; under ``Rows``, of what its tensor-parallel rank holds.
    """
    cuts, lengths = list(enumerate(t.placements)), list(t.shape)
    rows = ranges_of(t)
    if rows is not None:
        del cuts[tp_dim(t.device_mesh)]
        lengths[rows.dim] = rows.length()
    # one after the other, but for what FSDP2 cut of what others had cut before
    later = [cut for cut in cuts if isinstance(cut[1], StridedShard)]
    cuts = [cut for cut in cuts if cut not in later] + later[::-1]
    ranges = [(0, length) for length in lengths]
    for i, kind in cuts:
        if not kind.is_replicate():
            start, stop = ranges[kind.dim]  # type: ignore[attr-defined]
            each = -(-(stop - start) // t.device_mesh.size(i))
            start = min(start + each * t.device_mesh.get_local_rank(i), stop)
            ranges[kind.dim] = start, min(start + each, stop)  # type: ignore[attr-defined]
    return ranges


def part_of(whole: torch.Tensor, t: DTensor) -> torch.Tensor:
    """What this rank holds of ``whole`` under the placements of ``t``: a copy, differentiable."""
    rows = ranges_of(t)
    if rows is not None:
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
