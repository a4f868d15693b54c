"""Products in pieces, beside the collectives that bring their input or take their result away.

What is gathered is multiplied piece by piece as it arrives, and what is reduced is sent piece by
piece as it is made (Wang et al. 2023, "Overlap communication with dependent computation via
decomposition in large deep learning models", ASPLOS). A piece has the same rows of every rank's
part of the sequence, so that rows stay in order for any batch, length and number of pieces; where
nothing is scattered it is any rows. Backward is in one piece: what it sends is hidden by the
weights' gradients (see ``deferred``), and pieces would cost their copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tpplan.comm.collectives import (
    all_gather_products,
    chunk,
    may_hold_sum,
    pad,
    product_reduce_scatter,
    start_all_reduce,
    start_all_reduce_,
    start_reduce_scatter_stacked,
    start_stacked,
    unviewed,
)
from tpplan.comm.conjugates import Transition, copy_in, gathered, scattered
from tpplan.comm.deferred import ACCOUNT, Account, Later, defer, weight_gradient
from tpplan.comm.products import READY, Again, Ready, Recipe, differentiable, given, origin
from tpplan.compat import Function, differentiates_backward


class Projecting(NamedTuple):
    """A product that is to come: of a weight (out, in), or ``transposed``, and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    transposed: bool

    def takes(self, x: torch.Tensor) -> bool:
        """Whether ``x`` is as wide as it needs."""
        inner = 0 if self.transposed else 1
        return self.weight.dim() == 2 and self.weight.size(inner) == x.size(-1)


def gather_products(
    rows: torch.Tensor,
    dim: int,
    length: int,
    transition: Transition,
    projecting: Sequence[Projecting],
    pieces: int,
    dtype: torch.dtype | None = None,
    again: Again | None = None,
) -> torch.Tensor:
    """``gather_in``, beside the products that are to be made of what is gathered.

    ``product`` finds them on the result.

    Args:
        pieces: about how many; 0: torch's fused op decides.
        again: how it is gathered in backward for the weights' gradients, where it is not kept.
    """
    recipe, of = (None, (rows,)) if again is None else origin(rows)
    ranks, found = transition.group.size, spans(rows.size(dim), pieces)
    at = _Cut(transition, dim, length, ranks, found, _Many.of(projecting), dtype, again, recipe)
    tensors = [*(p.weight for p in projecting), *(p.bias for p in projecting)]
    whole, *made = _Gathered.apply(rows, at, of, *tensors)
    ready = [Ready.of(whole, *p, y) for p, y in zip(projecting, made, strict=True)]
    setattr(whole, READY, ready)
    return whole  # type: ignore[no-any-return]


def product_scattered(
    x: torch.Tensor, by: Projecting, dim: int, transition: Transition, pieces: int
) -> torch.Tensor:
    """``scatter_out`` of the product of ``x``, each piece sent as soon as it is made.

    ``by.bias`` is added to the sum.
    """
    ranks = transition.group.size
    found = spans(chunk(x.size(dim), ranks), pieces)
    recipe, of = origin(x)
    at = _Cut(transition, dim, x.size(dim), ranks, found, _Many.of([by]), recipe=recipe)
    return _Scattered.apply(x, at, of, by.weight, by.bias)  # type: ignore[no-any-return]


def product_reduced(
    x: torch.Tensor, by: Projecting, transition: Transition, pieces: int
) -> torch.Tensor:
    """``reduce_out`` of the product of ``x``, each piece sent as soon as it is made; no bias."""
    rows = x.numel() // x.size(-1)
    recipe, of = origin(x)
    at = _Cut(transition, 0, rows, 1, spans(rows, pieces), _Many.of([by]), recipe=recipe)
    return _Reduced.apply(x, at, of, by.weight)  # type: ignore[no-any-return]


def spans(rows: int, pieces: int) -> list[tuple[int, int]]:
    """Where each of about so many pieces begins and ends; none of 0."""
    if not pieces:
        return []
    each = chunk(rows, min(pieces, rows))
    return [(start, min(start + each, rows)) for start in range(0, rows, each)]


@dataclass(frozen=True)
class _Many:
    """The products of one input: which weights are (in, out), and who gives their gradients."""

    transposed: tuple[bool, ...]
    accounts: tuple[tuple[Account, int] | None, ...]

    @classmethod
    def of(cls, projecting: Sequence[Projecting]) -> _Many:
        accounts = [getattr(p.weight, ACCOUNT, None) for p in projecting]
        return cls(tuple(p.transposed for p in projecting), tuple(accounts))

    def matrices(
        self, weights: Sequence[torch.Tensor], dtype: torch.dtype, backward: bool = False
    ) -> list[torch.Tensor]:
        """(in, out) each, or for ``backward`` (out, in)."""
        # autocast makes products of another dtype than the weights'
        each = zip(weights, self.transposed, strict=True)
        return [(w.t() if t is backward else w).to(dtype) for w, t in each]

    def gradient(
        self,
        grads: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor],
        of_input: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Of the input: the sum of what all products, and others, give."""
        total: torch.Tensor | None = None
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            one = _Many((self.transposed[i],), ())
            (matrix,) = one.matrices([weights[i]], grad.dtype, backward=True)
            if total is None:
                total = grad @ matrix
            elif differentiates_backward():
                total = total + grad @ matrix
            else:
                _flat(total).addmm_(_flat(grad), matrix)
        if total is None or of_input is None:
            return of_input if total is None else total
        return total + of_input

    def of_weights(
        self,
        grads: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor],
        x: torch.Tensor | Later | None,
    ) -> list[torch.Tensor | None]:
        """Their gradients, but for those that are deferred.

        ``x``: the input, or what makes it; None where none is due.
        """
        found: list[torch.Tensor | None] = []
        each = zip(grads, weights, self.transposed, self.accounts, strict=True)
        for grad, weight, transposed, account in each:
            if grad is None or x is None or not weight.requires_grad:
                found.append(None)
            elif account is None or differentiates_backward():
                whole = x.whole() if isinstance(x, Later) else x
                found.append(weight_gradient(grad, whole, transposed).to(weight.dtype))
            else:
                defer(*account, (grad, x, transposed, weight))
                found.append(None)
        return found


@dataclass(frozen=True)
class _Cut:
    """How a tensor is cut, and what becomes of it.

    Attributes:
        dim: the sequence's; length: of all of it; ranks: that have its parts.
        spans: of the pieces, in each rank's part.
        dtype: that is sent, where that is another.
        again, recipe: how the input is gathered, or computed, again for weights' gradients.
    """

    transition: Transition
    dim: int
    length: int
    ranks: int
    spans: list[tuple[int, int]]
    many: _Many
    dtype: torch.dtype | None = None
    again: Again | None = None
    recipe: Recipe | None = None

    def apart(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """These rows of each rank's part of (..., sequence, ...), as (ranks, ..., rows, ...)."""
        dim, rows = self.dim, chunk(self.length, self.ranks)
        x = pad(x, dim, rows * self.ranks)
        parts = x.unflatten(dim, (self.ranks, rows)).narrow(dim + 1, start, stop - start)
        return parts.movedim(dim, 0)  # type: ignore[no-any-return]

    def empty(self, piece: torch.Tensor, width: int) -> torch.Tensor:
        """Of all padded rows."""
        shape = list(piece.shape[1:])
        shape[self.dim] = chunk(self.length, self.ranks) * self.ranks
        return piece.new_empty([*shape[:-1], width])

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Without what was padded, in one piece for who views it."""
        return unviewed(whole.narrow(self.dim, 0, self.length).contiguous())

    def input(
        self,
        of: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor],
    ) -> torch.Tensor | Later | None:
        """The input of the products, or what makes it; None where no weight's gradient is due.

        What is gathered has to be waited for: torch holds on to it until then.
        """
        each = zip(grads, weights, strict=True)
        if not any(grad is not None and weight.requires_grad for grad, weight in each):
            return None
        how: Any = differentiable if differentiates_backward() else given
        return how(of, self.again, self.recipe)  # type: ignore[no-any-return]


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.size(-1))


def _times(
    rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """(..., in) times (in, out), and a bias: one product, which reads the matrix once."""
    flat = _flat(rows)
    if bias is None:
        return torch.mm(flat, matrix).view(*rows.shape[:-1], matrix.size(-1))
    return torch.addmm(bias.to(matrix.dtype), flat, matrix).view(*rows.shape[:-1], matrix.size(-1))


class _Gathered(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        at: _Cut,
        of: tuple[torch.Tensor | None, ...],
        *tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.at, ctx.dtype = at, rows.dtype
        rows = rows if at.dtype is None else rows.to(at.dtype)
        count = len(tensors) // 2
        weights: list[Any] = list(tensors[:count])
        matrices = at.many.matrices(weights, rows.dtype)
        group, site = at.transition.group, at.transition.forward
        found: list[torch.Tensor] = []
        if not at.spans:
            found = all_gather_products(rows, matrices, at.dim, group, site)
            for y, bias in zip(found[1:], tensors[count:], strict=True):
                if bias is not None:
                    y.add_(bias.to(y.dtype))
        handles = [start_stacked(rows.narrow(at.dim, a, b - a), group, site) for a, b in at.spans]
        for (a, b), handle in zip(at.spans, handles, strict=True):
            piece = handle.wait()
            pieces = [piece, *map(_times, [piece] * count, matrices, tensors[count:])]
            found = found or [at.empty(part, part.size(-1)) for part in pieces]
            for all_of_it, part in zip(found, pieces, strict=True):
                at.apart(all_of_it, a, b).copy_(part)
        whole, *made = map(at.cut, found)
        ctx.save_for_backward(*weights, *((whole,) if at.again is None else of))
        return whole, *made

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_whole: torch.Tensor | None, *grads: torch.Tensor | None
    ) -> tuple[Any, ...]:
        at: _Cut = ctx.at
        saved = ctx.saved_tensors  # once: checkpointing gives them no second time
        weights, of = saved[: len(grads)], saved[len(grads) :]
        part = None
        x = at.input(of, grads, weights)
        if ctx.needs_input_grad[0]:
            total = at.many.gradient(grads, weights, of_whole)
            for_weights = at.many.of_weights(grads, weights, x)
            if total is not None:
                part = scattered(total, at.dim, at.transition, ctx.dtype)
        else:
            for_weights = at.many.of_weights(grads, weights, x)
        first = 3 + len(grads)
        due = zip(grads, ctx.needs_input_grad[first : first + len(grads)], strict=True)
        for_biases = [None if g is None or not asked else _flat(g).sum(0) for g, asked in due]
        return part, None, None, *for_weights, *for_biases


class _Scattered(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        at: _Cut,
        of: tuple[torch.Tensor | None, ...],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.at, ctx.bias_dtype = at, None if bias is None else bias.dtype
        ctx.save_for_backward(weight, *of)
        group, site = at.transition.group, at.transition.forward
        (matrix,) = at.many.matrices([weight], x.dtype)
        if at.spans:
            handles = [
                start_reduce_scatter_stacked(_times(at.apart(x, a, b), matrix), group, site)
                for a, b in at.spans
            ]
            out = torch.cat([handle.wait() for handle in handles], at.dim)
        else:
            padded = pad(x, at.dim, chunk(at.length, at.ranks) * at.ranks)
            out = unviewed(product_reduce_scatter(padded, matrix, at.dim, group, site))
        # to its dtype: autocast, which casts a Linear's bias
        return out if bias is None else out.add_(bias.to(out.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 5
        at: _Cut = ctx.at
        shift = None
        if ctx.needs_input_grad[4]:
            shift = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):
            return None, None, None, None, shift
        whole = gathered(grad, at.dim, at.length, at.transition)
        for_x, for_weight = _of_product(ctx, whole)
        return for_x, None, None, for_weight, shift


class _Reduced(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        at: _Cut,
        of: tuple[torch.Tensor | None, ...],
        weight: torch.Tensor,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.at = at
        ctx.save_for_backward(weight, *of)
        group, site = at.transition.group, at.transition.forward
        (matrix,) = at.many.matrices([weight], x.dtype)
        rows = _flat(x)
        parts = (torch.mm(rows[a:b], matrix) for a, b in at.spans)
        handles = [
            (start_all_reduce_ if may_hold_sum(part) else start_all_reduce)(part, group, site)
            for part in parts
        ]
        out = torch.cat([handle.wait() for handle in handles])
        return unviewed(out.view(*x.shape[:-1], out.size(-1)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 4
        if differentiates_backward():
            grad = copy_in(grad, ctx.at.transition.transposed())
        for_x, for_weight = _of_product(ctx, grad)
        return for_x, None, None, for_weight


def _of_product(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of the input and of the weight, by that of the whole product."""
    at: _Cut = ctx.at
    weight, *of = ctx.saved_tensors
    for_x = at.many.gradient([grad], [weight]) if ctx.needs_input_grad[0] else None
    (for_weight,) = at.many.of_weights([grad], [weight], at.input(of, [grad], [weight]))
    return for_x, for_weight
