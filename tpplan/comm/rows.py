"""DTensors placed by ``Rows``: packed projections and shared key-value heads.

Optimizers, clipping and conversions work on the local rows as they are; a norm counts every row
once, however many ranks hold it; all else sees the whole tensor in its original order. What writes
to the whole tensor, or to a view of it, writes its rows back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map

from tpplan import compat
from tpplan.comm.chunked import Chunked
from tpplan.comm.parts import cut, gathered
from tpplan.comm.placements import (
    block,
    is_placed_as,
    is_whole,
    number,
    part_of,
    ranges_of,
    tp_rank,
)
from tpplan.comm.view import Gathered, as_views
from tpplan.layout import Rows

_LOCAL = frozenset(
    {
        "detach", "alias", "clone", "copy_", "_to_copy", "zero_", "fill_", "contiguous",
        "zeros_like", "ones_like", "empty_like", "full_like", "is_same_size", "lift_fresh",
    }
)  # fmt: skip
_NORMS = frozenset({"linalg_vector_norm", "norm", "_foreach_norm", "_foreach_powsum"})
_WHOLE_LISTS = frozenset({"_foreach_max", "_foreach_mm"})  # they mix the rows of a tensor
_FACTORIES = frozenset({"new_empty", "new_zeros", "new_ones", "new_full"})
_RESHAPES = frozenset({"view", "_unsafe_view", "expand", "reshape"})
# torch.compile cannot trace the constructor of a DTensor's subclass, but an op that it handles
_library = torch.library.Library("tpplan", "FRAGMENT")
_library.define("rows_like(Tensor local, Tensor origin) -> Tensor")


class RowsTensor(Chunked):
    """A DTensor that ``Rows`` places over the tensor-parallel ranks.

    Its other placements are FSDP2's: they cut the rows of a tensor-parallel rank further.
    """

    @staticmethod
    def wrap(local: torch.Tensor, mesh: DeviceMesh, rows: Rows, shape: Sequence[int]) -> RowsTensor:
        """The tensor of global ``shape`` of which this rank holds ``local``; outside autograd."""
        return compat.dtensor(  # type: ignore[return-value]
            local, compat.dtensor_spec(mesh, (rows,), shape, local.dtype), RowsTensor
        )

    @staticmethod
    def around(local: torch.Tensor, spec: compat.DTensorSpec) -> RowsTensor:
        """The tensor of that spec of which this rank holds ``local``; differentiable."""
        if torch.is_grad_enabled() and local.requires_grad:
            return _Around.apply(local, spec)  # type: ignore[no-any-return]
        return compat.dtensor(local, spec, RowsTensor)  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func is torch.ops.tpplan.rows_like.default:
            return _like(*args)
        if name in _NORMS and _counts_once(args, kwargs):
            return func(*tree_map(_owned, args), **tree_map(_owned, kwargs))
        if name in _FACTORIES and tuple(args[1]) == tuple(args[0].shape):
            # async checkpoints copy tensors with it
            local = compat.local_of(args[0])
            return _like(func(local, local.shape, *args[2:], **kwargs), args[0])
        if torch.Tag.nondeterministic_seeded not in func.tags:
            if name in _RESHAPES and tuple(args[1]) == tuple(args[0].shape):
                return _like(compat.local_of(args[0]).view_as(compat.local_of(args[0])), args[0])
            if _is_list_op(name):
                return _on_lists(func, args, kwargs)
            if torch.Tag.pointwise in func.tags or name in _LOCAL:
                origin = _target(func, args, kwargs)
                if origin is not None:
                    return _on_rows(func, args, kwargs, origin)
        return _on_whole(func, args, kwargs)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> DTensor:
        return compat.unflattened(RowsTensor, inner, context, size, stride)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor in its original order, on every rank; differentiable."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Full.apply(self)  # type: ignore[no-any-return]
        return gathered(self)

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **rest: Any,
    ) -> DTensor:
        """Through the whole tensor, to any placements torch has."""
        if placements is None or tuple(placements) == self.placements:
            return self
        mesh = device_mesh or self.device_mesh
        whole = [Replicate()] * mesh.ndim
        replica = DTensor.from_local(self.full_tensor(), mesh, whole, run_check=False)
        return replica.redistribute(mesh, placements, **rest)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The rows of this rank; differentiable."""
        if not torch.is_grad_enabled() or not self.requires_grad:
            return compat.local_of(self)
        return _Local.apply(self)  # type: ignore[no-any-return]


def _settable_data() -> None:
    """``parameter.data = value``, of whatever else has the values of all ranks as well."""
    plain = vars(DTensor)["data"]

    def set_data(self: RowsTensor, value: torch.Tensor) -> None:
        alike = isinstance(value, RowsTensor) and value.placements == self.placements
        if not alike and value.shape == self.shape:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            value = taken(whole.detach(), compat.spec_of(self))
        plain.__set__(self, value)

    RowsTensor.data = property(plain.__get__, set_data)  # type: ignore[assignment, method-assign]


_settable_data()
torch.serialization.add_safe_globals([RowsTensor, Rows])  # torch.load, as for other DTensors


def rows_like(local: torch.Tensor, origin: DTensor) -> RowsTensor:
    """``local`` in place of the rows of ``origin``; outside autograd."""
    if torch.compiler.is_compiling():
        return torch.ops.tpplan.rows_like(local, origin)  # type: ignore[no-any-return]
    return _like(local, origin)  # type: ignore[arg-type]


def taken(whole: torch.Tensor, spec: compat.DTensorSpec) -> DTensor:
    """The DTensor of that spec whose values every rank has in ``whole``; differentiable."""
    return _Taken.apply(whole, spec)  # type: ignore[no-any-return]


# --- which ops work on what


def _counts_once(args: Any, kwargs: Any) -> bool:
    """Whether a norm is one of all elements, to which those that are zero add nothing."""
    options = [*args[1:], *kwargs.values()]
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if any(isinstance(o, list | tuple | torch.Tensor) for o in options):  # dimensions, out=
        return False
    return order is None or order >= 0


def _is_list_op(name: str) -> bool:
    if name.startswith("_fused_"):
        return name.endswith("_")
    return name.startswith(("_foreach_", "_amp_foreach_")) and name not in _WHOLE_LISTS | _NORMS


def _target(func: Any, args: Any, kwargs: Any) -> RowsTensor | None:
    """The tensor with whose rows a pointwise op may work, or None: it needs the whole tensors."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    targets = [t for t in compat.written_by(func, args, kwargs) if isinstance(t, torch.Tensor)]
    targets = targets or [t for t in tensors if isinstance(t, RowsTensor)]
    origin = targets[0]
    if not isinstance(origin, RowsTensor):
        return None
    for t in tensors:
        fits = isinstance(t, DTensor) and t.shape == origin.shape
        if not fits and (isinstance(t, RowsTensor) or t.dim() > 0):
            return None
    return origin


# --- the three ways


def _on_rows(func: Any, args: Any, kwargs: Any, origin: RowsTensor) -> Any:
    """A pointwise op, on the local rows."""
    back: dict[int, tuple[DTensor, DTensor]] = {}

    def local(t: Any) -> Any:
        if not isinstance(t, DTensor) or t.shape != origin.shape:
            return number(t)
        twin = _twin(t, origin)
        back[id(twin)] = twin, t
        return twin

    def wrapped(t: Any) -> Any:
        if id(t) in back:
            return back[id(t)][1]
        return _like(compat.local_of(t), origin) if isinstance(t, DTensor) else t

    out = func(*tree_map(local, args), **tree_map(local, kwargs))
    twin = next(iter(back.values()))[0]
    if not all(is_placed_as(t, twin) for t in tree_leaves(out)):
        return _on_whole(func, args, kwargs)
    return tree_map(wrapped, out)


def _on_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """A ``_foreach`` or ``_fused`` op: the tensors of all lists follow those of the first."""
    first = list(args[0])
    twins = [_twin(t, t) if isinstance(t, RowsTensor) else t for t in first]

    def aligned(given: Any) -> Any:
        if given is args[0]:
            return twins
        if not isinstance(given, list | tuple) or len(given) != len(first):
            return number(given)
        return [_matched(t, origin) for t, origin in zip(given, first, strict=True)]

    given = [aligned(a) for a in args]
    named = {key: aligned(value) for key, value in kwargs.items()}
    if any(isinstance(t, RowsTensor) for t in tree_leaves((given, named))):
        # beside one of another shape, or a plain one, of which torch says that it does not mix them
        return _on_whole(func, args, kwargs)
    out = func(*given, **named)
    if not isinstance(out, list | tuple):
        return out
    made = list(zip(out, twins, first, strict=True))
    if not all(is_placed_as(t, twin) for t, twin, o in made if isinstance(o, RowsTensor)):
        return _on_whole(func, args, kwargs)
    return [
        o if t is twin else _like(compat.local_of(t), o) if isinstance(o, RowsTensor) else t
        for t, twin, o in made
    ]


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Any other op, on the whole tensors; what it wrote to or drew is cut into rows again."""
    wholes: dict[int, tuple[DTensor, RowsTensor]] = {}

    def whole(t: Any) -> Any:
        if not isinstance(t, RowsTensor):
            return t
        made = next((w for w, known in wholes.values() if known is t), None)
        if made is None:
            made = _replicated(t)
            wholes[id(made)] = made, t
        return made

    args, kwargs = tree_map(whole, args), tree_map(whole, kwargs)
    written = [t for t in compat.written_by(func, args, kwargs) if id(t) in wholes]
    out = func(*args, **kwargs)
    drawn = torch.Tag.nondeterministic_seeded in func.tags
    for t in written:
        origin, now = wholes[id(t)][1], compat.local_of(t)
        # of what is replicated: since torch 2.14 the wrapper keeps its shape where an op changes it
        if now.shape != origin.shape:
            raise NotImplementedError(f"{func} would change the shape of a {type(origin).__name__}")
        compat.local_of(origin).copy_(cut(now, origin, synchronized=drawn))

    def back(t: Any) -> Any:
        if id(t) in wholes:
            return wholes[id(t)][1]
        origin = next(iter(wholes.values()))[1]
        if drawn and isinstance(t, DTensor) and t.shape == origin.shape:
            return _like(cut(compat.local_of(t), origin, synchronized=True), origin)
        return t

    out = tree_map(back, out)
    seen = compat.is_view(func) and not written
    return as_views(out, Gathered(*next(iter(wholes.values())))) if seen else out


def _matched(t: Any, origin: Any) -> Any:
    """``t`` as it meets ``origin``, whose place it has in another list."""
    if not isinstance(t, DTensor) or not isinstance(origin, DTensor) or t.shape != origin.shape:
        return number(t) if isinstance(origin, RowsTensor) else t
    if isinstance(origin, RowsTensor):
        return _twin(t, origin)
    if isinstance(t, RowsTensor):
        return t.redistribute(origin.device_mesh, origin.placements)
    return t


def _twin(t: DTensor, origin: RowsTensor) -> DTensor:
    """The rows of ``t`` that ``origin`` has, as an ordinary shard."""
    if isinstance(t, RowsTensor) and t.placements == origin.placements:
        return _as_shard(t, compat.local_of(t))
    if is_whole(t):
        return _as_shard(origin, cut(compat.local_of(t), origin))
    return _as_shard(origin, cut(t.full_tensor(), origin))


def _like(local: torch.Tensor, origin: RowsTensor) -> RowsTensor:
    """``local`` in place of the rows of ``origin``."""
    spec = compat.spec_of(origin)
    assert spec.tensor_meta is not None
    if spec.tensor_meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return compat.dtensor(local, spec, RowsTensor)  # type: ignore[return-value]


def _as_shard(t: RowsTensor, local: torch.Tensor) -> DTensor:
    """``local`` as an ordinary shard, of a tensor that is as long as all ranks' rows together."""
    mesh, shape = t.device_mesh, list(local.shape)
    kinds: list[Placement] = []
    for i, kind in enumerate(t.placements):
        if kind.is_replicate():
            kinds.append(Replicate())
            continue
        dim = t.rows.dim if isinstance(kind, Rows) else kind.dim  # type: ignore[attr-defined]
        kinds.append(Shard(dim))
        shape[dim] *= mesh.size(i)
    return compat.dtensor(local, compat.dtensor_spec(mesh, kinds, shape, local.dtype))


def _owned(t: Any) -> Any:
    """A ``RowsTensor`` as a shard in which rows that another rank counts are zero."""
    if isinstance(t, list | tuple):
        return [_owned(x) for x in t]
    if not isinstance(t, RowsTensor):
        return t
    local, dim = compat.local_of(t), t.rows.dim
    if t.rows.shared():
        kept = torch.zeros_like(local)
        first, last = block(t)[dim]
        for start, stop in t.rows.owned(tp_rank(t)):
            start, stop = max(start, first) - first, min(stop, last) - first
            if start < stop:
                kept.narrow(dim, start, stop - start).copy_(local.narrow(dim, start, stop - start))
        local = kept
    return _as_shard(t, local)


# --- from rows to whole and back


def _replicated(t: RowsTensor) -> DTensor:
    kinds = [Replicate()] * t.device_mesh.ndim
    return compat.dtensor(gathered(t), compat.dtensor_spec(t.device_mesh, kinds, t.shape, t.dtype))


# what is forward in one is backward in the other, so gradients of gradients are right as well


class _Full(compat.Function):
    @staticmethod
    def forward(ctx: Any, t: RowsTensor) -> torch.Tensor:
        ctx.spec = compat.spec_of(t)
        return gathered(t)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RowsTensor:  # type: ignore[override]
        return taken(grad, ctx.spec)  # type: ignore[return-value]


class _Taken(compat.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, spec: compat.DTensorSpec) -> DTensor:
        ctx.set_materialize_grads(False)  # of a parameter that is not used there is none
        kind = DTensor if ranges_of(spec) is None else RowsTensor
        local = part_of(whole, compat.dtensor(whole.new_empty(()), spec, kind))
        spec = compat.dtensor_spec(spec.mesh, spec.placements, whole.shape, whole.dtype)
        return compat.dtensor(local, spec, kind)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        return None if grad is None else grad.full_tensor(), None


class _Local(compat.Function):
    @staticmethod
    def forward(ctx: Any, t: RowsTensor) -> torch.Tensor:
        ctx.spec = compat.spec_of(t)
        local = compat.local_of(t)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RowsTensor:  # type: ignore[override]
        return RowsTensor.around(grad, ctx.spec)


class _Around(compat.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: compat.DTensorSpec) -> RowsTensor:
        ctx.spec = spec
        return compat.dtensor(local, spec, RowsTensor)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if grad.placements != ctx.spec.placements:
            grad = taken(grad.full_tensor(), ctx.spec)
        return grad.to_local(), None
