"""From a whole tensor to a DTensor, whatever its placement."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tpplan import compat
from tpplan.comm.blocks import part_of
from tpplan.comm.rows import RowsTensor, scattered
from tpplan.layout import Rows


def distributed(
    value: torch.Tensor, mesh: DeviceMesh, placement: Placement, source: int | None
) -> DTensor:
    """``value`` as a DTensor on ``mesh``, with the values of rank ``source`` of the group.

    ``source`` None trusts each rank's own. The result never keeps the storage of ``value`` alive.
    """
    if not isinstance(placement, Rows):
        if placement.is_replicate():
            value = value.clone()  # a replica is broadcast into a copy
        result = distribute_tensor(value, mesh, [placement], src_data_rank=source)
        local = compat.local_of(result)
        if source is None and not placement.is_replicate() and local._is_view():
            result = compat.dtensor(local.clone(), compat.spec_of(result))
        return result
    compat.kept_by_fsdp(Rows, RowsTensor)
    local = scattered(value, mesh, placement, source)
    return RowsTensor.wrap(local, mesh, placement, value.shape)


def taken(value: torch.Tensor, like: DTensor) -> DTensor:
    """``value``, which every rank has whole, placed as ``like`` is, FSDP2's cuts included."""
    local = part_of(value.detach(), like).to(like.device)
    mesh, placements = like.device_mesh, like.placements
    spec = compat.dtensor_spec(mesh, placements, value.shape, value.dtype)
    return compat.dtensor(local, spec, RowsTensor if isinstance(like, RowsTensor) else DTensor)


def placed(value: torch.Tensor, spec: compat.DTensorSpec) -> DTensor:
    """``value``, a DTensor or the same on every rank, placed as ``spec`` says; differentiable."""
    mesh, (kind,) = spec.mesh, spec.placements
    if isinstance(kind, Rows):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return RowsTensor.taken(whole, spec)
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return value.redistribute(mesh, [kind])
