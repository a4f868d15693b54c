"""The experts of a mixture as one op of which only sizes are known.

Which rows an expert multiplies depends on numbers, and so does their count. Where no numbers are,
in a trace or a simulated step, all of it is one op: a result as large as its input, the products
of all chosen (token, expert) pairs, and the memory that their backward needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def _experts(
    x: Tensor, others: Sequence[Tensor], parameters: Sequence[Tensor], slots: int, among: int
) -> tuple[Tensor, Tensor]:
    # a result of no meaning, for code that runs on, with numbers or without
    return torch.zeros_like(x), x.new_zeros(_kept(x, parameters, slots, among))


def _kept(x: Tensor, parameters: Sequence[Tensor], slots: int, among: int) -> int:
    """How many numbers the backward keeps: each chosen row of ``x``, and what becomes of it."""
    width = x.shape[-1]
    made = sum(math.prod(p.shape[1:]) // width for p in parameters if p.dim() == 3)
    return -(-(x.numel() // width * slots) // among) * (width + made)


def _experts_backward(
    grad: Tensor,
    kept: Tensor,
    x: Tensor,
    others: Sequence[Tensor],
    parameters: Sequence[Tensor],
    slots: int,
    among: int,
) -> list[Tensor]:
    return [torch.zeros_like(t) for t in (x, *others, *parameters) if t.is_floating_point()]


_op: Any = torch.library.custom_op("tpplan::experts", _experts, mutates_args=())
_op.register_fake(_experts)
_backward_op: Any = torch.library.custom_op(
    "tpplan::experts_backward", _experts_backward, mutates_args=()
)
_backward_op.register_fake(_experts_backward)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, others, parameters, ctx.slots, ctx.among = inputs
    ctx.count = len(others)
    ctx.save_for_backward(output[1], x, *others, *parameters)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    kept, x, *rest = ctx.saved_tensors
    others, parameters = rest[: ctx.count], rest[ctx.count :]
    made = iter(_backward_op(grad, kept, x, others, parameters, ctx.slots, ctx.among))
    each = [next(made) if t.is_floating_point() else None for t in (x, *others, *parameters)]
    return each[0], each[1 : 1 + ctx.count], each[1 + ctx.count :], None, None


_op.register_autograd(_differentiate, setup_context=_setup)
OP, BACKWARD = torch.ops.tpplan.experts, torch.ops.tpplan.experts_backward


def of_sizes(given: Any, parameters: Sequence[Tensor], among: int = 1) -> Tensor:
    """What a module of experts gives for ``given``, its arguments: a tensor like the first one.

    Whole numbers among the arguments are choices of experts, (tokens, chosen ones).

    Args:
        among: of how many such modules, each with other experts, this one is.
    """
    x, *others = (t for t in tree_leaves(given) if isinstance(t, Tensor))
    chosen = [t.shape[-1] for t in others if not t.is_floating_point() and t.dim()]
    result: Tensor = _op(x, others, list(parameters), max(chosen, default=1), among)[0]
    return result


def of_own(forward: Callable[..., Tensor], given: Any, first: int, count: int) -> Tensor:
    """What ``count`` of the experts, from ``first`` on, add to what all of them give.

    Args:
        forward: of a module with these experts alone; it is given each token that chose one of
            them as a row of its own.
        given: the arguments: activations (tokens, width), and of the same shape (tokens, chosen)
            whole numbers that choose experts, and their factors.

    Raises:
        ValueError: where the arguments are others.
    """
    x, chosen, factors = chosen_in(given)
    rows, places = torch.where((chosen >= first) & (chosen < first + count))
    factor, expert = factors[rows, places], chosen[rows, places] - first
    if torch.compiler.is_compiling() or not rows.numel():
        # one more, times zero: all ranks take part in backward, and graphs have no such branch
        rows = torch.cat((rows, rows.new_zeros(1)))
        factor = torch.cat((factor, factors[0, :1] * 0))
        expert = torch.cat((expert, chosen[0, :1] * 0))
    own = {id(x): x[rows], id(chosen): expert[:, None], id(factors): factor[:, None]}
    args, kwargs = tree_map_only(Tensor, lambda t: own[id(t)], given)
    return torch.zeros_like(x).index_add(0, rows, forward(*args, **kwargs).to(x.dtype))


def held_in(parameters: Iterable[Tensor]) -> int | None:
    """How many experts have parameters of their own, where more may be chosen; else None.

    What is chosen beyond them is given back as it is (the zero-computation experts of
    LongCat-Flash, arXiv 2509.01322). One of the two matrices of each expert has a place for
    these, (experts and more, columns or twice as many, width), and the other one has none,
    (experts, width, columns).
    """
    stacks = [p for p in parameters if p.dim() == 3]
    if len(stacks) != 2:
        return None
    stacks.sort(key=len, reverse=True)
    (many, into, width), (count, out, columns) = (p.shape for p in stacks)
    more = many > count and width == out and into in (columns, 2 * columns)
    return int(count) if more else None


def of_held(given: Any, count: int) -> Any:
    """The arguments, with the factors of choices that are beyond ``count`` experts zero.

    Raises:
        ValueError: as ``chosen_in``.
    """
    _, chosen, factors = chosen_in(given)
    own = factors * (chosen < count)
    return tree_map_only(Tensor, lambda t: own if t is factors else t, given)


def chosen_in(given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The activations, choices and factors among the arguments of a module of experts.

    Raises:
        ValueError: where they are not these three.
    """
    tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    choices = [t for t in tensors if not t.is_floating_point()]
    if len(tensors) == 3 and len(choices) == 1:
        x, factors = (t for t in tensors if t.is_floating_point())
        chosen = choices[0]
        if x.dim() == chosen.dim() == 2 and factors.shape == chosen.shape:
            return x, chosen, factors
    raise ValueError("it is not given activations, choices of experts and their factors")
