"""The conjugate operators of tensor and sequence parallelism, as autograd functions.

Each is the other's transpose: what one does forward its conjugate does backward. f and f* are of
Shoeybi et al., "Megatron-LM" (2019), section 3; g and g* of Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), section 4.2.2.

| function           | textbook | forward             | backward            |
|--------------------|----------|---------------------|---------------------|
| ``copy_in``        | f        | nothing             | all-reduce          |
| ``reduce_out``     | f*       | all-reduce          | nothing             |
| ``gather_in``      | g        | all-gather          | reduce-scatter      |
| ``scatter_out``    | g*       | reduce-scatter      | all-gather          |
| ``split``          |          | own slice           | all-gather          |
| ``join``           |          | all-gather          | own slice           |

``split`` and ``join`` are for tensors that every rank holds, and uses, whole. A backward that is
itself differentiated goes through the conjugate, so gradients of gradients are right as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tpplan.comm import deferred
from tpplan.comm.collectives import (
    Group,
    Site,
    alias_of,
    all_gather,
    all_reduce,
    chunk,
    local_slice,
    may_hold_sum,
    pad,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_all_reduce_,
    start_reduce_scatter,
)
from tpplan.compat import Function, differentiates_backward

# collectives of an element's backward, mostly: f, or g and g*, of its attention and of its MLP
_IN_TP, _IN_SP = 2, 4


@dataclass(frozen=True)
class Transition:
    """One boundary: the ranks it spans and the sites its two collectives are reported under."""

    group: Group
    forward: Site
    backward: Site

    def transposed(self) -> Transition:
        """The boundary as the conjugate operator crosses it."""
        return Transition(self.group, self.backward, self.forward)


def copy_in(x: torch.Tensor, transition: Transition) -> torch.Tensor:
    """f: a whole tensor enters a sharded region; its gradient is summed over the ranks."""
    return _CopyIn.apply(x, transition)  # type: ignore[no-any-return]


def reduce_out(x: torch.Tensor, transition: Transition, *, owned: bool = False) -> torch.Tensor:
    """f*: partial sums leave a sharded region as their sum, whole on every rank.

    ``owned``: nobody else has ``x``, nor has a backward kept it: the sum may lie in its memory.
    """
    return _ReduceOut.apply(x, transition, owned and may_hold_sum(x))  # type: ignore[no-any-return]


def gather_in(
    x: torch.Tensor,
    dim: int,
    length: int,
    transition: Transition,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """g: padded chunks along ``dim`` enter a sharded region whole, ``length`` long.

    ``dtype``: to gather and return, where that is not the dtype of ``x``; gradients are summed in
    the dtype of ``x``.
    """
    return _GatherIn.apply(x, dim, length, transition, dtype)  # type: ignore[no-any-return]


def scatter_out(
    x: torch.Tensor, dim: int, transition: Transition, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """g*: partial sums leave a sharded region as this rank's padded chunk of their sum.

    ``bias``: of the last dimension, added to the sum; its gradient is of this rank's chunk.
    """
    return _ScatterOut.apply(x, dim, transition, bias)  # type: ignore[no-any-return]


def split(x: torch.Tensor, dim: int, transition: Transition) -> torch.Tensor:
    """This rank's padded chunk of a tensor every rank holds whole."""
    return _Split.apply(x, dim, transition)  # type: ignore[no-any-return]


def join(x: torch.Tensor, dim: int, length: int, transition: Transition) -> torch.Tensor:
    """The whole tensor from its chunks, padded or not, for code that is the same on every rank."""
    return _Join.apply(x, dim, length, transition)  # type: ignore[no-any-return]


def divide_gradient(x: torch.Tensor, by: int) -> torch.Tensor:
    """``x``; its gradient, which ``by`` ranks have alike and will add up, is divided among them."""
    return _DivideGradient.apply(x, by)  # type: ignore[no-any-return]


def is_copied(x: torch.Tensor) -> bool:
    """Whether ``x`` is what ``copy_in`` gave: of its own gradient each rank may have a part."""
    return isinstance(x.grad_fn, _CopyIn._backward_cls)  # type: ignore[attr-defined]


def is_divided(x: torch.Tensor) -> bool:
    """Whether ``x`` is what ``divide_gradient`` gave."""
    return isinstance(x.grad_fn, _DivideGradient._backward_cls)  # type: ignore[attr-defined]


class _DivideGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: int) -> torch.Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad / ctx.by, None


class _CopyIn(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transition: Transition) -> torch.Tensor:
        ctx.transition = transition
        if not torch.compiler.is_compiling():
            transition.group.ledger.share(x, transition.forward)
        return alias_of(x)  # a view could not be changed in place by a model's code

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        transition = ctx.transition
        if differentiates_backward():
            return reduce_out(grad, transition.transposed()), None
        handle = start_all_reduce(grad, transition.group, transition.backward)
        deferred.work(_IN_TP)
        return handle.wait(), None


class _ReduceOut(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transition: Transition, in_place: bool) -> torch.Tensor:
        ctx.transition = transition
        if not in_place:
            return all_reduce(x, transition.group, transition.forward)
        ctx.mark_dirty(x)
        start_all_reduce_(x, transition.group, transition.forward).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if differentiates_backward():
            grad = copy_in(grad, ctx.transition.transposed())
        return grad, None, None


class _GatherIn(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dim: int,
        length: int,
        transition: Transition,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.dim, ctx.transition, ctx.dtype = dim, transition, None
        if dtype is not None and dtype != x.dtype:
            ctx.dtype, x = x.dtype, x.to(dtype)
        return all_gather(x, dim, length, transition.group, transition.forward)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return scattered(grad, ctx.dim, ctx.transition, ctx.dtype), None, None, None, None


class _ScatterOut(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, transition: Transition, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.dim, ctx.length, ctx.transition = dim, x.size(dim), transition
        ctx.bias_dtype = None if bias is None else bias.dtype
        return reduce_scatter(x, dim, transition.group, transition.forward, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        whole = shift = None
        if ctx.needs_input_grad[0]:  # else only the bias is trained
            whole = gathered(grad, ctx.dim, ctx.length, ctx.transition)
        if ctx.needs_input_grad[3]:
            shift = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return whole, None, None, shift


def scattered(
    grad: torch.Tensor, dim: int, transition: Transition, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The gradient of chunks that were gathered, of ``dtype``, beside what is deferred."""
    if differentiates_backward():
        grad = grad if dtype is None else grad.to(dtype)
        return scatter_out(grad, dim, transition.transposed())
    handle = start_reduce_scatter(grad, dim, transition.group, transition.backward, dtype=dtype)
    deferred.work(_IN_SP)
    return handle.wait()


def gathered(grad: torch.Tensor, dim: int, length: int, transition: Transition) -> torch.Tensor:
    """The gradient of a whole tensor that was scattered, beside what is deferred."""
    if differentiates_backward():
        return gather_in(grad, dim, length, transition.transposed())
    handle = start_all_gather(grad, dim, length, transition.group, transition.backward)
    deferred.work(_IN_SP)
    return handle.wait()


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, transition: Transition) -> torch.Tensor:
        ctx.dim, ctx.length, ctx.transition = dim, x.size(dim), transition
        if not torch.compiler.is_compiling():
            transition.group.ledger.share(x, transition.forward)
        return local_slice(x, dim, transition.group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        transition = ctx.transition
        if differentiates_backward():
            whole = join(grad, ctx.dim, ctx.length, transition.transposed())
        else:
            # it may be the gradient of what the user gave, who may send it on (pipelines do)
            whole = gathered(grad, ctx.dim, ctx.length, transition).contiguous()
        return whole, None, None


class _Join(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, length: int, transition: Transition
    ) -> torch.Tensor:
        ctx.dim, ctx.rows, ctx.transition = dim, x.size(dim), transition
        padded = pad(x, dim, chunk(length, transition.group.size))
        return all_gather(padded, dim, length, transition.group, transition.forward)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if differentiates_backward():
            part = split(grad, ctx.dim, ctx.transition.transposed())
        else:
            part = local_slice(grad, ctx.dim, ctx.transition.group)
        return part.narrow(ctx.dim, 0, ctx.rows), None, None, None
