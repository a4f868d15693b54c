"""The experts of a mixture as one op of which only sizes are known.

Which rows an expert multiplies depends on numbers, and so does their count. Where no numbers are,
in a trace or a simulated step, all of it is one op: a result as large as its input, the products
of all chosen (token, expert) pairs, and the memory that their backward needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import register_flop_formula


def _experts(
    x: Tensor, others: Sequence[Tensor], parameters: Sequence[Tensor], slots: int
) -> tuple[Tensor, Tensor]:
    # a result of no meaning, for code that runs on
    return torch.zeros_like(x), x.new_zeros(_kept(x, parameters, slots))


def _fake(
    x: Tensor, others: Sequence[Tensor], parameters: Sequence[Tensor], slots: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(_kept(x, parameters, slots))


def _kept(x: Tensor, parameters: Sequence[Tensor], slots: int) -> int:
    """How many numbers the backward keeps: each chosen row of ``x``, and what becomes of it."""
    width = x.shape[-1]
    made = sum(math.prod(p.shape[1:]) // width for p in parameters if p.dim() == 3)
    return x.numel() // width * slots * (width + made)


def _experts_backward(
    grad: Tensor,
    kept: Tensor,
    x: Tensor,
    others: Sequence[Tensor],
    parameters: Sequence[Tensor],
    slots: int,
) -> list[Tensor]:
    return [torch.zeros_like(t) for t in (x, *others, *parameters) if t.is_floating_point()]


def _fake_backward(
    grad: Tensor,
    kept: Tensor,
    x: Tensor,
    others: Sequence[Tensor],
    parameters: Sequence[Tensor],
    slots: int,
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (x, *others, *parameters) if t.is_floating_point()]


_op: Any = torch.library.custom_op("tpplan::experts", _experts, mutates_args=())
_op.register_fake(_fake)
_backward_op: Any = torch.library.custom_op(
    "tpplan::experts_backward", _experts_backward, mutates_args=()
)
_backward_op.register_fake(_fake_backward)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, others, parameters, ctx.slots = inputs
    ctx.count = len(others)
    ctx.save_for_backward(output[1], x, *others, *parameters)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    kept, x, *rest = ctx.saved_tensors
    others, parameters = rest[: ctx.count], rest[ctx.count :]
    made = iter(_backward_op(grad, kept, x, others, parameters, ctx.slots))
    each = [next(made) if t.is_floating_point() else None for t in (x, *others, *parameters)]
    return each[0], each[1 : 1 + ctx.count], each[1 + ctx.count :], None


_op.register_autograd(_differentiate, setup_context=_setup)


def _rows_times(x: Any, parameters: Any, slots: int) -> int:
    rows = math.prod(x[:-1]) * slots
    each = sum(math.prod(p[1:]) for p in parameters if len(p) == 3)
    return int(2 * rows * each)


@register_flop_formula(torch.ops.tpplan.experts)
def _flops(x: Any, others: Any, parameters: Any, slots: int, **_: Any) -> int:
    return _rows_times(x, parameters, slots)


@register_flop_formula(torch.ops.tpplan.experts_backward)
def _flops_backward(
    grad: Any, kept: Any, x: Any, others: Any, parameters: Any, slots: int, **_: Any
) -> int:
    return 2 * _rows_times(x, parameters, slots)


def of_sizes(given: Any, parameters: Sequence[Tensor]) -> Tensor:
    """What a module of experts gives for ``given``, its arguments: a tensor like the first one.

    Whole numbers among the arguments are choices of experts, (tokens, chosen ones).
    """
    x, *others = (t for t in tree_leaves(given) if isinstance(t, Tensor))
    chosen = [t.shape[-1] for t in others if not t.is_floating_point() and t.dim()]
    result: Tensor = _op(x, others, list(parameters), max(chosen, default=1))[0]
    return result
