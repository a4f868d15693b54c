"""The ranks that share a model: of the mesh a user gives, or of torchrun's world."""

from __future__ import annotations

import os
import weakref
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpplan import compat
from tpplan.comm.meshes import known, part_of, tp_of

T = TypeVar("T")

# all models of a world are on one mesh, which holds the process group and is not kept for it
_Worlds = weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[DeviceMesh]]
_WORLDS: _Worlds = weakref.WeakKeyDictionary()


def own_mesh(mesh: DeviceMesh | None) -> tuple[DeviceMesh | None, DeviceMesh | None, int]:
    """The ranks that share the model, (tp), (ep) or (ep, tp); those of tp; how many are of ep.

    Args:
        mesh: the user's; None for the whole world.

    Raises:
        ValueError: where its dimensions are of other names, or in another order.
    """
    if mesh is None:
        world = world_mesh()
        return world, world, 1
    names = mesh.mesh_dim_names or ()
    own = tuple(n for n in names if n in ("ep", "tp"))
    if not own and mesh.ndim == 1:
        mesh = known(mesh)
        return mesh, mesh, 1
    if not own:
        raise ValueError(f"the mesh has no dimension named 'tp', only {names or 'unnamed ones'}")
    if own == ("tp", "ep"):
        raise ValueError("the mesh has 'tp' before 'ep'; name 'ep' first, and 'tp' last")
    own = tuple(n for n in own if mesh.size(names.index(n)) > 1) or own[-1:]
    ep = mesh.size(names.index("ep")) if "ep" in own else 1
    mesh = known(mesh) if own == names else part_of(mesh, own)
    return mesh, tp_of(mesh, ep), ep


def broadcast(value: T, mesh: DeviceMesh) -> T:
    """What the first rank of a mesh has, on all of them."""
    told: list[T] = [value]
    for dim in reversed(range(mesh.ndim)):  # along the first row, from there to all
        dist.broadcast_object_list(told, group=mesh.get_group(dim), group_src=0)
    return told[0]


def world_mesh() -> DeviceMesh | None:
    """The whole world as one tp group, started if torchrun asks for it; None in one process."""
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return None
        _start()
    on_gpus = torch.cuda.is_available() and "nccl" in dist.get_backend()
    device = "cuda" if on_gpus else "cpu"
    group = dist.group.WORLD
    assert group is not None
    mesh = _WORLDS[group]() if group in _WORLDS else None
    if mesh is None:
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
        _WORLDS[group] = weakref.ref(mesh)
    return mesh


def _start() -> None:
    if not torch.cuda.is_available():
        with compat.gloo_in_order():
            dist.init_process_group("gloo")
        return
    if torch.cuda.current_device() == 0 and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
