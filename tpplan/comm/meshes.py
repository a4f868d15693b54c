"""The ranks among which a model is shared: those of ``tp``, those of ``ep``, or both."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh


def tp_of(mesh: DeviceMesh, ep: int) -> DeviceMesh | None:
    """The tensor-parallel ranks of a mesh (tp), (ep) or (ep, tp); None where it has none.

    Args:
        ep: how many ranks share whole experts.
    """
    if mesh.ndim == 2:
        return mesh[mesh.mesh_dim_names[1]]  # type: ignore[index]
    return None if ep > 1 else mesh


def ep_of(mesh: DeviceMesh, ep: int) -> DeviceMesh | None:
    """The ranks of a mesh (tp), (ep) or (ep, tp) that share whole experts; None without such."""
    if mesh.ndim == 2:
        return mesh[mesh.mesh_dim_names[0]]  # type: ignore[index]
    return mesh if ep > 1 else None
