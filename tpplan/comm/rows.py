"""DTensors placed by ``Rows``: packed projections and shared key-value heads.

Optimizers, clipping and conversions work on the local rows as they are; a norm counts every row
once, however many ranks hold it; all else sees the whole tensor in its original order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map

from tpplan import compat
from tpplan.comm.collectives import Group, Site, all_gather
from tpplan.layout import Range, Rows

_KEEPING = frozenset(
    {
        "detach", "alias", "clone", "copy_", "_to_copy", "to", "zero_", "fill_", "contiguous",
        "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "normal_",
        "uniform_", "is_same_size", "_fused_adamw_", "_fused_adam_", "_fused_sgd_",
        "_fused_adagrad_", "lift_fresh",
    }
)  # fmt: skip
_NORMS = frozenset({"linalg_vector_norm", "norm", "_foreach_norm", "_foreach_max"})
_GATHER = Site("", "a packed or shared parameter, gathered")


class RowsTensor(DTensor):
    """A DTensor on a 1-D mesh whose one placement is ``Rows``."""

    @staticmethod
    def wrap(local: torch.Tensor, mesh: DeviceMesh, rows: Rows, shape: Sequence[int]) -> RowsTensor:
        """The tensor of global ``shape`` of which this rank holds ``local``; outside autograd."""
        return compat.dtensor(  # type: ignore[return-value]
            local, compat.dtensor_spec(mesh, (rows,), shape, local.dtype), RowsTensor
        )

    @property
    def rows(self) -> Rows:
        """The placement."""
        return compat.spec_of(self).placements[0]  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = [t for t in tree_leaves((args, kwargs)) if isinstance(t, RowsTensor)]
        name = func._schema.name.removeprefix("aten::")
        if name in _NORMS:
            return func(*tree_map(_owned, args), **tree_map(_owned, kwargs))
        if not _keeps(func, name, ours, args):
            return func(*tree_map(_replicated, args), **tree_map(_replicated, kwargs))
        back: dict[int, RowsTensor] = {}

        def plain(t: Any) -> Any:
            if not isinstance(t, RowsTensor):
                return t
            twin = _as_shard(t, compat.local_of(t))
            back[id(twin)] = t
            return twin

        like = ours[0]

        def wrapped(t: Any) -> Any:
            if id(t) in back:
                return back[id(t)]
            if isinstance(t, DTensor) and t.dim() == like.dim():
                origin = next(
                    (o for o in ours if compat.local_of(o).shape == t._local_tensor.shape), like
                )
                return RowsTensor.wrap(
                    compat.local_of(t), origin.device_mesh, origin.rows, origin.shape
                )
            return t

        args, kwargs = tree_map(plain, args), tree_map(plain, kwargs)
        if name.startswith("_foreach_") and isinstance(args[0], list | tuple):
            return _listed(func, args, kwargs, [*tree_leaves(args[0])], back)
        return tree_map(wrapped, func(*args, **kwargs))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor in its original order, on every rank; differentiable."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Full.apply(self)  # type: ignore[no-any-return, no-untyped-call]
        return _gathered(self)

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **rest: Any,
    ) -> DTensor:
        """Through the whole tensor: to ``Rows`` again, or to any placement torch has."""
        if placements is None or tuple(placements) == self.placements:
            return self
        whole = self.full_tensor()
        mesh = device_mesh or self.device_mesh
        replica = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        return replica.redistribute(mesh, placements, **rest)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The rows of this rank; differentiable."""
        if not torch.is_grad_enabled() or not self.requires_grad:
            return compat.local_of(self)
        return _Local.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(compat.local_of(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        chunks = []
        for start, stop in self._pieces():
            offsets, sizes = [0] * self.dim(), list(self.shape)
            offsets[self.rows.dim], sizes[self.rows.dim] = start, stop - start
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        return chunks

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        dim, at = self.rows.dim, 0
        for start, stop in self._pieces():
            if index.offset is None or index.offset[dim] == start:
                return compat.local_of(self).narrow(dim, at, stop - start)
            at += stop - start
        raise ValueError(f"no rows of this rank begin at {index.offset}")

    def _pieces(self) -> tuple[Range, ...]:
        return self.rows.pieces[self.device_mesh.get_local_rank()]


def distributed(
    value: torch.Tensor, mesh: DeviceMesh, placement: Placement, source: int | None
) -> DTensor:
    """``value`` as a DTensor on ``mesh``, with the values of rank ``source`` of the group.

    ``source`` None trusts each rank's own values.
    """
    if not isinstance(placement, Rows):
        if placement.is_replicate():
            value = value.clone()  # a replica is broadcast into a copy
        return distribute_tensor(value, mesh, [placement], src_data_rank=source)
    rank = mesh.get_local_rank()
    local = placement.take(value, rank)
    if source is not None and not value.is_meta:
        local = local.to(mesh.device_type)
        shards = None
        if rank == source:
            shards = [placement.take(value, r).to(mesh.device_type) for r in range(mesh.size())]
        dist.scatter(local, shards, group=mesh.get_group(), group_src=source)
    elif not value.is_meta:
        local = local.to(mesh.device_type)
    return RowsTensor.wrap(local, mesh, placement, value.shape)


def _keeps(func: Any, name: str, ours: Sequence[RowsTensor], args: Any) -> bool:
    """Whether an op may run on the local rows as they are."""
    known = torch.Tag.pointwise in func.tags or name in _KEEPING or name.startswith("_foreach_")
    if not known:
        return False
    if name.startswith(("_foreach_", "_fused_")):
        return True
    like = ours[0]
    for t in tree_leaves(args):
        if isinstance(t, RowsTensor):
            if t.rows != like.rows or t.shape != like.shape:
                return False
        elif isinstance(t, torch.Tensor) and t.dim() > 0 and t.numel() > 1:
            return False
    return True


def _listed(
    func: Any, args: Any, kwargs: Any, first: Sequence[Any], back: dict[int, RowsTensor]
) -> Any:
    """A ``_foreach`` op: the results follow the tensors of its first list."""
    out = func(*args, **kwargs)
    if out is None:
        return None
    results = []
    for given, made in zip(first, out, strict=True):
        origin = back.get(id(given))
        if origin is None:
            results.append(made)
        elif id(made) in back:
            results.append(back[id(made)])
        else:
            local = compat.local_of(made)
            results.append(RowsTensor.wrap(local, origin.device_mesh, origin.rows, origin.shape))
    return results


def _as_shard(t: RowsTensor, local: torch.Tensor) -> DTensor:
    """``local`` as an ordinary shard, of a tensor that is as long as all ranks' rows together."""
    shape = list(t.shape)
    shape[t.rows.dim] = local.size(t.rows.dim) * t.device_mesh.size()
    spec = compat.dtensor_spec(t.device_mesh, (Shard(t.rows.dim),), shape, local.dtype)
    return compat.dtensor(local, spec)


def _owned(t: Any) -> Any:
    """A ``RowsTensor`` as a shard in which rows that another rank counts are zero."""
    if not isinstance(t, RowsTensor):
        return t
    local = compat.local_of(t)
    if t.rows.shared():
        kept = torch.zeros_like(local)
        for start, stop in t.rows.owned(t.device_mesh.get_local_rank()):
            rows = stop - start
            kept.narrow(t.rows.dim, start, rows).copy_(local.narrow(t.rows.dim, start, rows))
        local = kept
    return _as_shard(t, local)


def _replicated(t: Any) -> Any:
    if not isinstance(t, RowsTensor):
        return t
    spec = compat.dtensor_spec(t.device_mesh, (Replicate(),), t.shape, t.dtype)
    return compat.dtensor(_gathered(t), spec)


def _gathered(t: RowsTensor) -> torch.Tensor:
    local, rows = compat.local_of(t).detach(), t.rows
    size = t.device_mesh.size()
    length = local.size(rows.dim)
    everyone = all_gather(local, rows.dim, length * size, Group.of(t.device_mesh), _GATHER)
    whole = local.new_empty(t.shape)
    for rank in range(size):
        rows.put(whole, everyone.narrow(rows.dim, rank * length, length), rank)
    return whole


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: RowsTensor) -> torch.Tensor:
        ctx.mesh, ctx.rows, ctx.shape = t.device_mesh, t.rows, t.shape
        return _gathered(t)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RowsTensor:  # type: ignore[override]
        local = ctx.rows.take(grad, ctx.mesh.get_local_rank())
        return RowsTensor.wrap(local, ctx.mesh, ctx.rows, ctx.shape)


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: RowsTensor) -> torch.Tensor:
        ctx.mesh, ctx.rows, ctx.shape = t.device_mesh, t.rows, t.shape
        local = compat.local_of(t)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RowsTensor:  # type: ignore[override]
        return RowsTensor.wrap(grad, ctx.mesh, ctx.rows, ctx.shape)
