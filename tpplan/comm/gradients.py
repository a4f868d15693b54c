"""From DTensor parameters to the local tensors that computation runs on, and back for gradients.

One autograd function serves a whole group of parameters: one for each of them costs more.
It takes the parameters themselves, so they stay ordinary members of the graph (hooks, freezing,
``autograd.grad``), and runs once every consumer of the group has contributed. That is why the
gradients of replicated parameters that saw only part of the work can be summed here, all of them
in one collective, without callbacks into the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tpplan import compat
from tpplan.comm.collectives import Group, Site, all_reduce, untransformed
from tpplan.comm.conjugates import Transition, reduce_out
from tpplan.comm.deferred import ACCOUNT, Account
from tpplan.comm.placements import is_whole, ranges_of
from tpplan.comm.rows import RowsTensor, rows_like


def localize(
    parameters: Sequence[DTensor],
    summed: Sequence[bool],
    group: Group,
    site: Site,
    divided: Sequence[bool] = (),
    means: Sequence[int] = (),
    deferring: bool = True,
) -> tuple[torch.Tensor, ...]:
    """The local tensors of ``parameters``, some of which need gradients; differentiable.

    All of them are then in the graph: where each rank uses another one of several, the graphs of
    the ranks are alike, whichever of these is trained.

    Args:
        parameters: leaves on one mesh.
        summed: for each, whether its gradient is to be summed over the ranks of ``group``.
        site: what the summing collective is reported under.
        divided: for each, whether it is of a module that only some of the ranks run (one for each
            head); the others take part in its sum with zeros.
        means: for each, of how many ranks with tokens of their own its gradient holds the sum,
            of which it is to be the mean.
        deferring: whether products may leave their weights' gradients to this function.
    """
    trained = tuple(p.requires_grad for p in parameters)
    known = tuple(summed), trained, tuple(divided) if any(divided) else (), tuple(means)
    account = None if torch.compiler.is_compiling() or not deferring else Account()
    made: tuple[torch.Tensor, ...] = _Localize.apply(known, group, site, account, *parameters)
    if account is not None:
        for index, local in enumerate(made):
            if trained[index]:
                setattr(local, ACCOUNT, (account, index))
    return made


def coalesced_sum(tensors: Sequence[torch.Tensor], group: Group, site: Site) -> list[torch.Tensor]:
    """Sum each tensor over the ranks, with one all-reduce for each dtype among them.

    The results are contiguous tensors of their own: a view into the common buffer has a storage
    offset, and a DTensor around such a view cannot be deep-copied.
    """
    results: list[torch.Tensor | None] = [None] * len(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        indices = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        if len(indices) == 1:
            results[indices[0]] = all_reduce(tensors[indices[0]].contiguous(), group, site)
            continue
        flat = all_reduce(torch.cat([tensors[i].reshape(-1) for i in indices]), group, site)
        parts = flat.split([tensors[i].numel() for i in indices])
        for i, part in zip(indices, parts, strict=True):
            results[i] = part.clone().view(tensors[i].shape)
    return [r for r in results if r is not None]


class _Localize(compat.Function):
    @staticmethod
    def forward(
        ctx: Any,
        known: tuple[tuple[bool, ...], tuple[bool, ...], tuple[bool, ...], tuple[int, ...]],
        group: Group,
        site: Site,
        account: Account | None,
        *parameters: DTensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.summed, ctx.trained, ctx.divided, ctx.means = known
        ctx.group, ctx.site, ctx.account = group, site, account
        ctx.specs = specs = [compat.spec_of(p) for p in parameters]
        ctx.whole = [is_whole(spec) for spec in specs]
        ctx.by_rows = [ranges_of(spec) is not None for spec in specs]
        if torch.compiler.is_compiling():  # which cannot make their gradients from the specs
            ctx.save_for_backward(*(p for p in parameters if isinstance(p, RowsTensor)))
        locals_ = compat.shards_of(parameters)
        if ctx.divided:
            ctx.zeros = [
                t.new_zeros(()).expand(t.shape) if divided else None
                for t, divided in zip(locals_, ctx.divided, strict=True)
            ]
        return tuple(locals_)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.account is not None:
            grads = ctx.account.settle(grads)
        if not torch.compiler.is_compiling():
            untransformed(next((g for g in grads if g is not None), None), ctx.site.module)
        if ctx.divided:
            grads = _alike(grads, ctx)
        if compat.differentiates_backward():
            return (None, None, None, None, *_differentiably(ctx, grads))
        local = list(grads) if True not in ctx.summed else _with_sums(grads, ctx)
        for i in _shared(local, ctx):
            local[i] = local[i].clone(memory_format=torch.contiguous_format)  # type: ignore[union-attr]
        for grad, ranks in zip(local, ctx.means, strict=False):
            if grad is not None and ranks > 1:
                grad.div_(ranks)  # nobody else's, as of now
        if torch.compiler.is_compiling():
            made = _traced(local, ctx.specs, ctx.by_rows, ctx.saved_tensors)
            return (None, None, None, None, *made)
        return (None, None, None, None, *_wrapped(local, ctx))


def _wrapped(grads: Sequence[torch.Tensor | None], ctx: Any) -> list[DTensor | None]:
    """The gradients as the parameters are, one for each in every step: a frame more would count."""
    around = compat.gradient_around
    return [
        None if g is None else RowsTensor.around(g, spec) if rows else around(g, spec)
        for g, spec, rows in zip(grads, ctx.specs, ctx.by_rows, strict=True)
    ]


def _with_sums(grads: Sequence[torch.Tensor | None], ctx: Any) -> list[torch.Tensor | None]:
    """The gradients, those over the ranks that are to be summed."""
    local = list(grads)
    due = [(i, g) for i, g in enumerate(grads) if g is not None and ctx.summed[i]]
    specs, by_rows, group = ctx.specs, ctx.by_rows, ctx.group
    parts = [_summed_part(g, specs[i], group) if by_rows[i] else g for i, g in due]
    for (i, g), total in zip(due, coalesced_sum(parts, group, ctx.site), strict=True):
        local[i] = _with_sum(g, total, specs[i], group) if by_rows[i] else total
    return local


def _alike(grads: Sequence[torch.Tensor | None], ctx: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradients that every rank has: all must sum the same parameters in the same order.

    What a rank does not use may be used by another, which no rank knows of the others: so all take
    part, with zeros where there is nothing.
    """
    every = (z if g is None else g for g, z in zip(grads, ctx.zeros, strict=True))
    return tuple(g if t else None for g, t in zip(every, ctx.trained, strict=True))


def _shared(grads: Sequence[torch.Tensor | None], ctx: Any) -> list[int]:
    """Which of the gradients may be the memory of more than their own parameter.

    Autograd takes a DTensor that it is given over as the parameter's gradient, and adds to it in
    place. But what is in it may be the gradient of another parameter as well (x + a + b), or one
    number that stands for all of them (sum). Only the gradient of a whole parameter can be that
    of an activation, which anybody may hold.
    """
    found: list[int] = []
    seen: set[int] = set()
    compiling = torch.compiler.is_compiling()
    for i, (grad, summed, whole) in enumerate(zip(grads, ctx.summed, ctx.whole, strict=True)):
        if grad is None or summed:
            continue
        if whole:
            found.append(i)
        elif not compiling:
            memory = compat.memory_of(grad)
            if memory in seen or compat.is_held_elsewhere(grad) or 0 in grad.stride():
                found.append(i)
            seen.add(memory)
    return found


def _traced(
    grads: Sequence[torch.Tensor | None],
    specs: Sequence[compat.DTensorSpec],
    by_rows: Sequence[bool],
    origins: Sequence[DTensor],
) -> list[DTensor | None]:
    wrapped: list[DTensor | None] = []
    seen = 0
    for grad, spec, rows in zip(grads, specs, by_rows, strict=True):
        if grad is None:
            wrapped.append(None)
        elif rows:
            wrapped.append(rows_like(grad, origins[seen]))
        else:
            wrapped.append(compat.dtensor(grad, spec))
        seen += rows
    return wrapped


def _summed_part(grad: torch.Tensor, spec: compat.DTensorSpec, group: Group) -> torch.Tensor:
    """What of a gradient the ranks sum: all of it, or the rows that several of them hold.

    Those lie in the order of the whole parameter, with zeros for the rows of other ranks.
    """
    rows = ranges_of(spec)
    if rows is None:
        return grad
    shape = list(grad.shape)
    shape[rows.dim] = sum(stop - start for start, stop in rows.shared())
    part = grad.new_zeros(shape)
    for here, there, length in rows.overlaps(group.rank):
        part.narrow(rows.dim, there, length).copy_(grad.narrow(rows.dim, here, length))
    return part


def _with_sum(
    grad: torch.Tensor, total: torch.Tensor, spec: compat.DTensorSpec, group: Group
) -> torch.Tensor:
    rows = ranges_of(spec)
    if rows is None:
        return total
    grad = grad.clone(memory_format=torch.contiguous_format)
    for here, there, length in rows.overlaps(group.rank):
        grad.narrow(rows.dim, here, length).copy_(total.narrow(rows.dim, there, length))
    return grad


def _differentiably(ctx: Any, grads: Sequence[torch.Tensor | None]) -> list[DTensor | None]:
    transition = Transition(ctx.group, ctx.site, ctx.site)
    made: list[torch.Tensor | None] = []
    means = ctx.means or (1,) * len(grads)
    for grad, summed, spec, ranks in zip(grads, ctx.summed, ctx.specs, means, strict=True):
        if grad is not None and summed:
            part = reduce_out(_summed_part(grad, spec, ctx.group), transition)
            grad = _with_sum(grad, part, spec, ctx.group)
        made.append(grad / ranks if grad is not None and ranks > 1 else grad)
    return _wrapped(made, ctx)
