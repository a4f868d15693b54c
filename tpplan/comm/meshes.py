"""The ranks among which a model is shared: those of ``tp``, those of ``ep``, or both.

Parameters are then on several meshes, and plain ones on none; torch's ops on lists of tensors take
those of one mesh at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tpplan import compat

_KNOWN: list[weakref.ref[DeviceMesh]] = []


def known(mesh: DeviceMesh) -> DeviceMesh:
    """The object that stood for this part of a mesh before, or ``mesh`` for one that is new.

    ``mesh["tp"]`` is another object whenever it is asked for. Torch keeps what it has worked out
    for one under all that equal it, and where a graph of torch.compile met both, of a second
    model, it took them for two.
    """
    root = compat.root_of(mesh)
    for reference in [*_KNOWN]:
        before = reference()
        if before is not None and before == mesh and compat.root_of(before) is root:
            return before
    _KNOWN.append(weakref.ref(mesh, _KNOWN.remove))
    return mesh


def part_of(mesh: DeviceMesh, names: str | tuple[str, ...]) -> DeviceMesh:
    """Some dimensions of a mesh, by their names: the same object each time."""
    return known(mesh[names])


def tp_of(mesh: DeviceMesh, ep: int) -> DeviceMesh | None:
    """The tensor-parallel ranks of a mesh (tp), (ep) or (ep, tp); None where it has none.

    Args:
        ep: how many ranks share whole experts.
    """
    if mesh.ndim == 2:
        return part_of(mesh, mesh.mesh_dim_names[1])  # type: ignore[index]
    return None if ep > 1 else mesh


def ep_of(mesh: DeviceMesh, ep: int) -> DeviceMesh | None:
    """The ranks of a mesh (tp), (ep) or (ep, tp) that share whole experts; None without such."""
    if mesh.ndim == 2:
        return part_of(mesh, mesh.mesh_dim_names[0])  # type: ignore[index]
    return mesh if ep > 1 else None


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of a model, those of one mesh together: as groups for an optimizer.

    ``torch.optim.AdamW([{"params": group} for group in by_mesh(model.parameters())])`` can step
    on all of a group at once, which it cannot on parameters of several meshes.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """torch's ``clip_grad_norm_``, of parameters on several meshes, and of plain ones.

    Returns the norm of all gradients together, the same on every rank: gradients that are cut
    count with all parts.

    Raises:
        ValueError: where there is no such norm.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type {norm_type}: it must be above 0, or infinity")
    groups = by_mesh(p for p in parameters if p.grad is not None)
    if len(groups) == 1:
        alone: torch.Tensor = nn.utils.clip_grad_norm_(groups[0], max_norm, norm_type)
        return alone
    norms = []
    for group in groups:
        norm = nn.utils.get_total_norm([p.grad for p in group], norm_type)  # type: ignore[misc]
        norms.append(_whole(norm) if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.tensor(0.0)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _whole(norm: DTensor) -> torch.Tensor:
    """A norm over all ranks, one dimension after the other: torch warns of several at once."""
    kinds = list(norm.placements)
    for dim in reversed(range(len(kinds))):
        kinds[dim] = Replicate()
        norm = norm.redistribute(placements=kinds)
    return norm.to_local()
