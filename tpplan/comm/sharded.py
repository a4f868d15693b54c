"""Tensors of which each rank holds its rows along one dimension, and that compute as if whole.

Code that nobody may edit runs on them: the model's between the modules of the stream and behind
the head, the user's, and autograd's. Ops act on the values a whole tensor would have, so gradients
of any order follow from them. An op that is known to give, on a rank's rows, that rank's rows of
the result (``comm.rowwise``) runs there and sends nothing; sums add up what the ranks have; every
other op runs on the whole tensors and answers with a plain one. Which of these is decided by the
op and by global shapes alone, the same on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map

from tpplan import compat
from tpplan.comm.collectives import Group, Site, all_reduce, pad
from tpplan.comm.conjugates import join, split
from tpplan.comm.placements import dim_of, is_cut, is_whole
from tpplan.comm.randomness import Randomness
from tpplan.comm.rowwise import DRAWING, Call, Rowwise, rowwise
from tpplan.comm.source import SENT, Rooted, Source, Whole, wrapped
from tpplan.compat import local_of


class Sharded(Rooted):
    """A DTensor sharded along one dimension, for code that was written for whole tensors."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return computed(func, args, kwargs or {})

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> DTensor:
        return compat.unflattened(Sharded, inner, context, size, stride)

    @functools.cached_property
    def _tpplan_source(self) -> Source:  # type: ignore[override]
        return source_on(self.device_mesh, type(self))  # of one that torch.compile put together

    @staticmethod
    def __metadata_guard__(known: Any, given: Any) -> bool:
        """Whether a graph that torch.compile made for one tensor serves another.

        As torch has it, the sizes must be the same; they are inputs of the graph, and guarded.
        """
        return all(map(_alike_but_for_sizes, known, given))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank; differentiable."""
        dim = dim_of(self)
        return join(rows_of(self), dim, self.size(dim), self._tpplan_source.transition)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's rows; differentiable."""
        if self._tpplan_writes is not None:
            self._tpplan_writes.ahead()
        if grad_placements is not None:
            return super().to_local(grad_placements=grad_placements)
        return rows_of(self)


def _alike_but_for_sizes(a: object, b: object) -> bool:
    if isinstance(a, compat.TensorMeta) and isinstance(b, compat.TensorMeta):
        return a.dtype == b.dtype
    return a == b


class Parted(Sharded):
    """What is no stream: something else that leaves the model, of which each rank has a part."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> DTensor:
        return compat.unflattened(Parted, inner, context, size, stride)


class Window(DTensor):
    """A view of some rows of a ``Sharded``: the same, and whole, on every rank.

    It is a view of the gathered tensor. What is written to one of the two is found in the other by
    the op that reads it next.
    """

    _tpplan_whole: Whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return computed(func, args, kwargs or {})

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The values, as a plain tensor; differentiable."""
        return self.clone()

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The values, as a plain tensor; differentiable."""
        return self.clone()


@functools.cache
def source_on(mesh: DeviceMesh, kind: type[Sharded] = Sharded) -> Source:
    """Of tensors of a kind that do not know theirs."""
    group = Group.of(mesh)
    site = Site("", "a sharded tensor, gathered")
    return Source(group, site, Randomness(group.rank, mesh.device_type), kind)


def window(view: torch.Tensor, whole: Whole) -> Window:
    """``view`` of ``whole.tensor`` as a view of what that was gathered from."""
    mesh = whole.source.mesh
    spec = compat.dtensor_spec(mesh, (Replicate(),), view.shape, view.dtype, view.stride())
    x = compat.dtensor(view, spec, Window)
    x._tpplan_whole = whole  # type: ignore[attr-defined]
    return x  # type: ignore[return-value]


def whole_of(rows: torch.Tensor, source: Source, length: int, dim: int) -> Sharded:
    """The tensor of ``length`` along ``dim`` of which this rank has ``rows``; differentiable."""
    return _WholeOf.apply(rows, source, length, dim)  # type: ignore[no-any-return]


def _made(rows: torch.Tensor, source: Source, length: int, dim: int) -> Sharded:
    return wrapped(source.unpadded(rows, length, dim), source, source.spec(rows, length, dim))  # type: ignore[return-value]


def rows_of(x: DTensor, count: int | None = None, source: Source | None = None) -> torch.Tensor:
    """This rank's rows of ``x``, followed by zeros up to ``count``; differentiable.

    ``source``: to be given where ``x`` is torch's own DTensor, and so is to be its gradient.
    """
    return _RowsOf.apply(x, count, source)  # type: ignore[no-any-return]


def rows_in(grad: torch.Tensor, dim: int, count: int, source: Source) -> torch.Tensor:
    """The rows, padded to ``count``, of whatever a gradient came as; differentiable."""
    if isinstance(grad, DTensor):
        ours = isinstance(grad, Sharded) or compat.mesh_of(grad) == source.mesh
        if ours and is_cut(grad, dim):
            # one that users made of their rows as well: torch cuts as ``Source.rows`` does
            rows = grad.to_local() if compat.differentiates_backward() else local_of(grad)
            return pad(rows, dim, count)
        grad = grad.full_tensor()
    return split(grad, dim, source.transition).narrow(dim, 0, count)


class _RowsOf(compat.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, count: int | None, source: Source | None) -> torch.Tensor:
        local, dim = local_of(x), dim_of(x)
        ctx.source = source or x._tpplan_source  # type: ignore[attr-defined]
        ctx.torchs, ctx.dim, ctx.length = source is not None, dim, x.size(dim)
        if count is None or count == local.size(dim):
            return local.view_as(local)
        return pad(local, dim, count)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        source, length, dim = ctx.source, ctx.length, ctx.dim
        if ctx.torchs:
            spec = source.spec(grad, length, dim)
            return compat.dtensor(source.unpadded(grad, length, dim), spec), None, None
        make = whole_of if compat.differentiates_backward() else _made
        return make(grad, source, length, dim), None, None


class _WholeOf(compat.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, source: Source, length: int, dim: int) -> Sharded:
        ctx.source, ctx.dim, ctx.count = source, dim, rows.size(dim)
        return _made(rows, source, length, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return rows_in(grad, ctx.dim, ctx.count, ctx.source), None, None, None


# --- ops


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """An op of which an argument is ``Sharded`` or a ``Window``."""
    if func.namespace == "tpplan":
        return _converted(func, *args)
    if compat.is_composite(func):  # in inference mode, where autograd does not take it apart
        return func.decompose(*args, **kwargs)
    op = _Op(func, args, kwargs)
    if op.sharded and (done := op.on_rows()) is not None:
        return done[0]
    return op.on_whole()


def on_rows(func: Any, *args: Any) -> Any:
    """What an op makes of this rank's rows alone; None where it is not known to."""
    done = _Op(func, args, {}).on_rows()
    return None if done is None else done[0]


def _converted(func: Any, x: Any, *options: Any) -> torch.Tensor:
    """The ops of ``comm.traced``.

    Each copies, also where it need not: graphs that differ by more than a padding would have
    common collectives merged on some of the ranks only.
    """
    if func is torch.ops.tpplan.rows_of.default:
        dim, count = options
        return rows_in(x, dim, count, x._tpplan_source).clone()
    like, dim, length = options
    source = like._tpplan_source
    rows = source.unpadded(x, length, dim).clone()
    shape = list(x.shape)
    shape[dim] = length
    return wrapped(rows, source, compat.dtensor_spec(source.mesh, (Shard(dim),), shape, rows.dtype))


class _Op:
    """One op while it runs.

    Attributes:
        args, kwargs: with plain tensors in place of all DTensors that are not sharded.
        sharded: those of the arguments that are.
        written: the arguments that it changes.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func = func
        self.name: str = func._schema.name.removeprefix("aten::")
        self._origins: dict[int, tuple[torch.Tensor, DTensor]] = {}
        self.args, self.kwargs = tree_map(self._settled, args), tree_map(self._settled, kwargs)
        leaves = tree_leaves((self.args, self.kwargs))
        self.sharded = [t for t in leaves if isinstance(t, Sharded)]
        self.written = compat.written_by(func, self.args, self.kwargs)

    def _settled(self, t: Any) -> Any:
        if not isinstance(t, DTensor) or isinstance(t, Sharded):
            return t
        if isinstance(t, Window):
            t._tpplan_whole.refresh(self.name)
            plain = local_of(t)
        else:
            plain = local_of(t) if is_whole(t) else t.full_tensor()
        self._origins[id(plain)] = plain, t
        return plain

    def _given(self, t: Any) -> Any:
        """The argument that a result is, where it is one."""
        return self._origins[id(t)][1] if id(t) in self._origins else t

    # on rows

    def on_rows(self) -> tuple[Any] | None:
        """The result, where the op runs on the ranks' rows; None where it does not."""
        x = self.sharded[0]
        source, length = x._tpplan_source, x.size(dim_of(x))
        if self.name == "is_same_size":
            return (self.args[0].shape == self.args[1].shape,)
        if any(t.size(dim_of(t)) != length for t in self.sharded):
            return None
        if self.name in DRAWING and not source.randomness.on_own:
            return None
        if not all(isinstance(t, Sharded) for t in self.written):
            return None
        held = {id(t): dim_of(t) for t in self.sharded}
        call = Call(self.func, self.args, self.kwargs, held, length, *source.rows(length))
        plan = rowwise(call)
        if plan is None:
            return None
        whole = self._described(*(plan.like or (self.args, self.kwargs)))
        made = [t for t in tree_leaves(whole) if isinstance(t, torch.Tensor)]
        if not made or not all(self._fits(t, plan, length) for t in made):
            return None
        known = [t._tpplan_writes for t in self.written if t._tpplan_writes is not None]
        for writes in known:
            writes.ahead()
        out = (plan.func or self.func)(*plan.args, **plan.kwargs)
        if plan.summed:
            site = replace(source.site, reason=f"{source.site.reason}: {self.name}")
            out = tree_map(lambda t: all_reduce(t, source.group, site), out)
        for writes in known:
            writes.count += 1
        if self.written:
            return (self.written[0] if len(self.written) == 1 else tuple(self.written),)
        if plan.at is None:
            return (out,)
        return (tree_map(lambda rows, t: self._answered(rows, t, plan, x), out, whole),)

    def _described(self, args: Any, kwargs: Any) -> Any:
        """The result's shapes, strides and dtypes, were all tensors whole."""
        with compat.unobserved():
            args, kwargs = tree_map(_described, (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs["device"] = "meta"
            return self.func(*args, **kwargs)

    @staticmethod
    def _fits(t: torch.Tensor, plan: Rowwise, length: int) -> bool:
        if plan.summed:
            return t.dtype in SENT
        if plan.at is None:
            return True
        at = plan.at(t.dim())
        return 0 <= at < t.dim() and t.size(at) == length

    def _answered(self, rows: Any, whole: Any, plan: Rowwise, x: Sharded) -> Any:
        if not isinstance(rows, torch.Tensor):
            return rows
        assert plan.at is not None
        at, mesh = plan.at(whole.dim()), x.device_mesh
        # of a trace that knows these sizes: it knows none that was worked out beside it
        shape = list(rows.shape)
        shape[at] = x.size(dim_of(x))
        spec = compat.dtensor_spec(mesh, (Shard(at),), shape, whole.dtype, whole.stride())
        made = wrapped(rows, x._tpplan_source, spec)
        if compat.is_view(self.func):
            made._tpplan_writes = x._tpplan_writable()
        return made

    # on whole tensors

    def on_whole(self) -> Any:
        """The result, of whole tensors; what is written to sharded ones, each rank's rows take."""
        given = tree_leaves((self.args, self.kwargs))
        # the gradient of one may need the other: of a prediction, the target
        trained = any(isinstance(t, torch.Tensor) and t.requires_grad for t in given)
        again = trained and torch.is_grad_enabled()
        wholes = {id(t): Whole.of(t, self.name, again) for t in self.sharded}
        copies = {id(t): wholes[id(t)].tensor.clone() for t in self.written if id(t) in wholes}

        def whole(t: Any) -> Any:
            if id(t) in copies:
                return copies[id(t)]
            return wholes[id(t)].tensor if id(t) in wholes else t

        args, kwargs = tree_map(whole, self.args), tree_map(whole, self.kwargs)
        with self._alike():
            out = self.func(*args, **kwargs)
        for t in self.written:
            self._write_back(t, copies.get(id(t)))
        back = {id(copies[id(t)]): t for t in self.written if id(t) in copies}
        view = compat.is_view(self.func) and not self.written and not compat.is_traced()
        viewed = self._viewed(wholes) if view else None

        def answer(t: Any) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            if viewed is not None:
                return window(t, viewed)
            return back[id(t)] if id(t) in back else self._given(t)

        return tree_map(answer, out)

    def _alike(self) -> contextlib.AbstractContextManager[None]:
        """Every rank draws the same."""
        if self.sharded and torch.Tag.nondeterministic_seeded in self.func.tags:
            return self.sharded[0]._tpplan_source.randomness.shared()
        return contextlib.nullcontext()

    def _write_back(self, t: torch.Tensor, copy: torch.Tensor | None) -> None:
        origin = self._given(t)
        if isinstance(origin, Window):
            origin._tpplan_whole.write_back()
        elif isinstance(t, Sharded) and copy is not None:
            if copy.shape != t.shape:
                raise NotImplementedError(f"{self.func} would change the shape of a sharded tensor")
            writes = t._tpplan_writable()
            writes.ahead()
            local_of(t).copy_(t._tpplan_source.own(copy, dim_of(t)))
            writes.count += 1

    def _viewed(self, wholes: dict[int, Whole]) -> Whole | None:
        """What a view is one of."""
        x = next(t for t in tree_leaves(self.args) if isinstance(t, torch.Tensor))
        origin = self._given(x)
        return origin._tpplan_whole if isinstance(origin, Window) else wholes.get(id(x))


def _described(t: Any) -> Any:
    if not isinstance(t, torch.Tensor):
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
