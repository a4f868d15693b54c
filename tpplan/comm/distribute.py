"""From a whole tensor to a DTensor, whatever its placement."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tpplan import compat
from tpplan.comm.meshes import ep_of, tp_of
from tpplan.comm.parts import scattered
from tpplan.comm.rows import RowsTensor, taken
from tpplan.layout import Rows, own_part


def distributed(
    value: torch.Tensor, mesh: DeviceMesh, placement: Placement, source: int | None
) -> DTensor:
    """``value`` as a DTensor on ``mesh``, with the values of rank ``source`` of the group.

    ``source`` None trusts each rank's own. The result never keeps the storage of ``value`` alive.
    """
    if not isinstance(placement, Rows):
        if source is None and _is_even(value, mesh, placement):
            # torch makes the parts of all ranks, and takes its own
            local = own_part(value, placement, mesh.get_local_rank(), mesh.size())
            local = local if local.is_meta else local.to(mesh.device_type)
            about = mesh, [placement], value.shape, value.dtype, value.stride()
            return compat.dtensor(local, compat.dtensor_spec(*about))
        if placement.is_replicate():
            value = value.clone()  # a replica is broadcast into a copy
        result = distribute_tensor(value, mesh, [placement], src_data_rank=source)
        local = compat.local_of(result)
        if source is None and not placement.is_replicate() and local._is_view():
            result = compat.dtensor(local.clone(), compat.spec_of(result))
        return result
    compat.kept_by_fsdp(Rows, RowsTensor)
    compat.full_states_by(Rows, taken)
    local = scattered(value, mesh, placement, source)
    return RowsTensor.wrap(local, mesh, placement, value.shape)


def _is_even(value: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> bool:
    """Whether each rank's part of it is as large."""
    if type(placement) is not Shard or placement.dim < 0:
        return False
    return value.size(placement.dim) % mesh.size() == 0


def distributed_over_ep(
    value: torch.Tensor, mesh: DeviceMesh, placement: Placement, source: int | None
) -> DTensor:
    """``value`` cut along its first dimension over the ranks of ep, and then as ``placement`` says.

    Args:
        mesh: of the ranks of ep, or of those and of the tensor-parallel ones.
    """
    ep, tp = ep_of(mesh, 2), tp_of(mesh, 2)
    assert ep is not None
    local, kind = compat.local_of(distributed(value, ep, Shard(0), source)), DTensor
    kinds: list[Placement] = [Shard(0)]
    if tp is not None:
        part = distributed(local, tp, placement, source)
        local, kinds, kind = compat.local_of(part), [Shard(0), placement], type(part)
    if local._is_view():
        local = local.clone()
    return compat.dtensor(local, compat.dtensor_spec(mesh, kinds, value.shape, value.dtype), kind)


def loaded(value: torch.Tensor, like: DTensor, assigned: bool = False) -> DTensor:
    """``value``, which every rank has whole, placed as ``like`` is, FSDP2's cuts included.

    ``assigned``: it takes the place of ``like``, which may have no memory.
    """
    placed = taken(value.detach(), compat.spec_of(like))
    device: torch.device | str = like.device
    if assigned and like.is_meta and not value.is_meta:
        device = like.device_mesh.device_type
    return compat.dtensor(compat.local_of(placed).to(device), compat.spec_of(placed), type(placed))


def placed(value: torch.Tensor, spec: compat.DTensorSpec) -> DTensor:
    """``value``, a DTensor or the same on every rank, placed as ``spec`` says; differentiable."""
    return taken(value.full_tensor() if isinstance(value, DTensor) else value, spec)
