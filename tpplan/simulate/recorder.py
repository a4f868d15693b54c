"""Every collective that is issued, with where it comes from and what it sends.

The same recorder serves an abstract execution and a real one: a dry run and a run are compared
collective by collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tpplan.comm import Observer, Site
from tpplan.simulate.steps import Collective, ring_bytes, worst_bytes

KINDS: Mapping[str, str] = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_reduce_coalesced": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter",
    "symm_mem::fused_all_gather_matmul": "all_gather",
    "symm_mem::fused_matmul_reduce_scatter": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
    "_dtensor::shard_dim_alltoall": "all_to_all",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
}
_OUTSIDE = Site("", "issued outside the rewritten modules")
_STEPPING = Site("", "norm of the gradients, or the optimizer's own")


class Recorder(Observer):
    """Records the collectives issued while it is active.

    ``phase`` names the phase that is running; see ``during``.
    """

    def __init__(self, dimensions: Mapping[str, str] | None = None) -> None:
        """``dimensions``: of a mesh, by the names of their process groups."""
        super().__init__()
        self._dimensions = dimensions or {}
        self.collectives: list[Collective] = []
        self.phase = "forward"
        self._site: Site | None = None

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Attribute what is issued to ``phase``."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    def at(self, site: Site) -> None:
        """The next collective comes from ``site``."""
        self._site = site

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with local tensors comes back here
        out = func(*args, **(kwargs or {}))
        kind = KINDS.get(func._schema.name)
        if kind is not None:
            self.collectives.append(self._collective(kind, func, args, kwargs or {}, out))
        return out

    def _collective(
        self, kind: str, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any
    ) -> Collective:
        group = group_of(func, args, kwargs)
        site, self._site = self._site, None
        named = dimension_of(group)
        if site is not None and named != "ep":
            named = "tp"  # of a mesh that the user gave another name, or none
        dimension = self._dimensions.get(group.group_name) or named
        if site is None:
            site = _STEPPING if self.phase == "optimizer" else _OUTSIDE
        ranks = dist.get_process_group_ranks(group)
        tensor = max(tensors_in((args, out)), key=torch.Tensor.numel)
        shape = tuple(int(n) for n in tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Collective(
            phase=site.phase or self.phase,
            module=site.module,
            kind=kind,
            shape=shape,
            dtype=dtype,
            bytes=ring_bytes(kind, len(ranks), shape, dtype),
            reason=site.reason,
            rule=site.rule,
            dimension=dimension,
            ranks=len(ranks),
            stride=ranks[1] - ranks[0] if len(ranks) > 1 else 1,
            worst_bytes=worst_bytes(len(ranks), shape, dtype) if site.routed else None,
            fused=site.fused,
        )


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors in ``values``, however nested."""
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


def dimension_of(group: dist.ProcessGroup) -> str:
    """The dimension of a mesh whose group it is."""
    of_mesh = group.group_desc.startswith("mesh_")
    return group.group_desc.removeprefix("mesh_") if of_mesh else "world"


def group_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    """The process group of a collective op."""
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "group_name" in given:
        return torch._C._distributed_c10d._resolve_process_group(given["group_name"])
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    group = dist.group.WORLD
    assert group is not None
    return group
