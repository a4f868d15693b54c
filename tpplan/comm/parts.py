"""Parameters placed by ``Rows``, sent: from one rank to all, and from all ranks whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpplan import compat
from tpplan.comm.chunked import Chunked
from tpplan.comm.collectives import Group, Site, all_gather
from tpplan.comm.placements import around_tp, narrowed, part_of, tp_mesh
from tpplan.layout import Rows

_GATHER = Site("", "a packed or shared parameter, gathered")


def scattered(
    value: torch.Tensor, mesh: DeviceMesh, rows: Rows, source: int | None
) -> torch.Tensor:
    """This rank's rows of ``value``: of rank ``source``'s value, or (None) of its own; a copy."""
    rank = mesh.get_local_rank()
    if source is None or value.is_meta:
        local = rows.take(value, rank)
        return local if value.is_meta else local.to(mesh.device_type)
    shards = None
    if rank == source:
        shards = [rows.take(value, r).to(mesh.device_type) for r in range(mesh.size())]
    shape = list(value.shape)
    shape[rows.dim] = rows.length(rank)
    local = value.new_empty(shape, device=mesh.device_type) if shards is None else shards[rank]
    dist.scatter(local, shards, group=mesh.get_group(), group_src=source)
    return local


def gathered(t: Chunked) -> torch.Tensor:
    """The whole tensor in its original order, on every rank; without autograd."""
    local, rows = compat.local_of(t).detach(), t.rows
    shape = list(t.shape)
    length = shape[rows.dim] = rows.length()
    if t.device_mesh.ndim > 1:
        spec = compat.dtensor_spec(*around_tp(t), shape, local.dtype)
        local = compat.dtensor(local, spec).full_tensor()
    tp = tp_mesh(t)
    everyone = all_gather(local, rows.dim, length * tp.size(), Group.of(tp), _GATHER)
    whole = local.new_empty(t.shape)
    for rank in range(tp.size()):
        rows.put(whole, everyone.narrow(rows.dim, rank * length, length), rank)
    return whole


def cut(whole: torch.Tensor, origin: Chunked, synchronized: bool = False) -> torch.Tensor:
    """What this rank holds of ``whole``; ``synchronized``: of the first tp rank's."""
    if synchronized:
        return narrowed(scattered(whole, tp_mesh(origin), origin.rows, 0), origin)
    return part_of(whole, origin)
