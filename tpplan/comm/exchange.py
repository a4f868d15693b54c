"""Rows that are sent to the ranks that work on them, and their results back.

An all-to-all is its own conjugate: the gradient of a row goes to where the row came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpplan.comm.collectives import all_to_all, packed
from tpplan.comm.conjugates import Transition
from tpplan.compat import Function, differentiates_backward

_Rows = tuple[torch.Tensor, ...]


def exchange(
    tensors: Sequence[torch.Tensor], sent: list[int], received: list[int], transition: Transition
) -> _Rows:
    """The rows that the ranks have for this one, in their order; differentiable.

    Args:
        tensors: each (rows, columns) or (rows,), with as many rows, first those for rank 0; all
            of a row travel in one message.
        sent, received: how many rows go to each rank, and come from it.
    """
    return _Exchange.apply(sent, received, transition, *tensors)  # type: ignore[no-any-return]


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        sent: list[int],
        received: list[int],
        transition: Transition,
        *tensors: torch.Tensor,
    ) -> _Rows:
        ctx.sent, ctx.received, ctx.transition = sent, received, transition
        return _exchanged(tensors, sent, received, transition)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        back = ctx.received, ctx.sent, ctx.transition.transposed()
        made = exchange(grads, *back) if differentiates_backward() else _exchanged(grads, *back)
        return None, None, None, *made


def _exchanged(
    tensors: Sequence[torch.Tensor], sent: list[int], received: list[int], transition: Transition
) -> _Rows:
    how = sent, received, transition.group, transition.forward
    flat = [t[:, None] if t.dim() == 1 else t for t in tensors]
    if len({t.dtype for t in flat}) > 1:  # numbers of several kinds, as the bytes that they are
        flat = [t.contiguous().view(torch.uint8) for t in flat]
    whole = all_to_all(torch.cat(flat, 1) if len(flat) > 1 else flat[0], *how)
    parts = whole.split([t.shape[1] for t in flat], 1) if len(flat) > 1 else [whole]
    made = []
    for part, t in zip(parts, tensors, strict=True):
        # a copy even of a single row, which is contiguous wherever it lies
        own = (packed(part) if len(flat) > 1 else part.contiguous()).view(t.dtype)
        # not views for autograd: modules may change them in place
        shape = [own.shape[0], *t.shape[1:]]
        made.append(torch.ops.aten._unsafe_view(own, shape))
    return tuple(made)
