"""Vocab-parallel cross entropy: what one rank computes of its own logits, in one pass each way.

Statistics, for a row x of a rank's logits: m = max(x) and Σ exp(x - m) by the online softmax, which
rescales the sum as the maximum grows (Milakov and Gimelshein 2018), the target's logit, and for
label smoothing Σ w (x - m), kept relative to the maximum as well: a sum of logits far from zero
would lose what tells them apart. What the ranks then tell one another is in
``comm/cross_entropy.py``.
Gradient of a·log Σ exp + b·x[target] + c·Σ w x, sums over all ranks' classes, a, b and c of each
row: a·softmax(x) + b·onehot + c·w. Nothing as wide as the vocabulary is held in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tpplan.compat import is_traced
from tpplan.kernels.launch import blocks, fused, jit, launch, power, rows_of, tl, vector, warps
from tpplan.kernels.operator import operator

_CHUNK = 8192  # columns of a row that are read at once
_GRADIENT = 4096  # columns of one program
_REFERENCE = 2**24  # elements of a temporary of the reference: rows are worked on in blocks


@jit
def _statistics_kernel(
    x, target, weight, largest, total, chosen, every, x_row, v, start,
    SMOOTH: tl.constexpr, WEIGHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    top = float("-inf")
    pivot = 0.0  # the maximum, where there is one: -inf less itself is no number
    summed = 0.0
    relative = 0.0
    share = 0.0
    for begin in range(0, v, BLOCK):
        columns = begin + lanes
        inside = columns < v
        values = tl.load(x + row * x_row + columns, mask=inside, other=float("-inf"))
        values = values.to(tl.float32)
        before = top
        last = pivot
        top = tl.maximum(before, tl.max(values, 0))
        pivot = tl.where(top == float("-inf"), 0.0, top)
        summed = summed * tl.exp(before - pivot) + tl.sum(tl.exp(values - pivot), 0)
        if SMOOTH:
            terms = tl.where(inside, values - pivot, 0.0)
            if WEIGHS:
                scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
                relative += share * (last - pivot) + tl.sum(terms * scale, 0)
                share += tl.sum(scale, 0)
            else:
                relative += begin * (last - pivot) + tl.sum(terms, 0)
    tl.store(largest + row, top)
    tl.store(total + row, summed)
    if SMOOTH:
        tl.store(every + row, relative)
    own = tl.load(target + row) - start
    here = (own >= 0) & (own < v)
    tl.store(chosen + row, tl.load(x + row * x_row + own, mask=here, other=0.0).to(tl.float32))


@jit
def _gradient_kernel(
    x, target, weight, largest, log_sum, of_sum, of_target, of_every, dx, x_row, v, start, blocks,
    SMOOTH: tl.constexpr, WEIGHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < v
    values = tl.load(x + row * x_row + columns, mask=inside, other=float("-inf")).to(tl.float32)
    # one number for both would round off what is small beside the largest
    values = values - tl.load(largest + row) - tl.load(log_sum + row)
    grad = tl.exp(values) * tl.load(of_sum + row)
    own = tl.load(target + row) - start
    own = tl.where((own >= 0) & (own < v), own, -1).to(tl.int32)
    grad += tl.where(columns == own, tl.load(of_target + row), 0.0)
    if SMOOTH:
        each = tl.load(of_every + row)
        if WEIGHS:
            each *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        grad += each
    tl.store(dx + row * v + columns, grad, mask=inside)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _blocks(x: Tensor) -> Iterator[slice]:
    if is_traced():  # a compiler makes its own, of any number of rows
        yield slice(None)
        return
    rows = max(1, _REFERENCE // max(1, x.size(1)))
    for begin in range(0, x.size(0), rows):
        yield slice(begin, begin + rows)


def located(target: Tensor, start: int, v: int) -> tuple[Tensor, Tensor]:
    """The columns of the targets, zero where they are on no column here, and where they are."""
    index = target - start
    here = (index >= 0) & (index < v)
    return index.masked_fill(~here, 0).unsqueeze(1), here


def reference_statistics(
    logits: Tensor, target: Tensor, start: int, weight: Tensor | None, smooth: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the kernel computes, by PyTorch's own ops; see ``statistics``."""
    v, kind = logits.size(1), _wide(logits.dtype)
    largest = logits.new_full((logits.size(0),), -torch.inf, dtype=kind)
    total, chosen = torch.zeros_like(largest), torch.zeros_like(largest)
    every = torch.zeros_like(largest) if smooth else largest.new_empty(0)
    if v == 0:
        return largest, total, chosen, every
    largest = logits.amax(1).to(kind)
    pivot = largest.masked_fill(largest == -torch.inf, 0)
    index, here = located(target, start, v)
    chosen = logits.gather(1, index).squeeze(1).to(kind).masked_fill_(~here, 0)
    for block in _blocks(logits):
        shifted = logits[block].to(kind, copy=True).sub_(pivot[block].unsqueeze(1))
        if smooth:
            every[block] = (shifted if weight is None else shifted * weight).sum(1)
        total[block] = shifted.exp_().sum(1)
    return largest, total, chosen, every


def reference_gradient(
    logits: Tensor,
    target: Tensor,
    start: int,
    weight: Tensor | None,
    largest: Tensor,
    log_sum: Tensor,
    of_sum: Tensor,
    of_target: Tensor,
    of_every: Tensor | None,
) -> Tensor:
    """What the kernel computes, by PyTorch's own ops; see ``gradient``."""
    result = torch.empty_like(logits)
    index, here = located(target, start, logits.size(1))
    for block in _blocks(logits):
        grad = logits[block].to(_wide(logits.dtype), copy=True)
        grad = grad.sub_(largest[block].unsqueeze(1)).sub_(log_sum[block].unsqueeze(1))
        grad = grad.exp_().mul_(of_sum[block].unsqueeze(1))
        each = None if of_every is None else of_every[block]
        result[block] = add_rest(grad, index[block], here[block], of_target[block], each, weight)
    return result


def add_rest(
    grad: Tensor,
    index: Tensor,
    here: Tensor,
    of_target: Tensor,
    of_every: Tensor | None,
    weight: Tensor | None,
) -> Tensor:
    """Add to ``grad`` what flows to the targets' logits and to the sums of all logits."""
    if grad.size(1):
        grad.scatter_add_(1, index, of_target.masked_fill(~here, 0).unsqueeze(1))
    if of_every is not None:
        each = of_every.unsqueeze(1)
        grad.add_(each if weight is None else each * weight)
    return grad


@operator("tpplan::cross_entropy_statistics")
def _statistics(
    logits: Tensor, target: Tensor, start: int, weight: Tensor | None, smooth: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not fused(logits, weight):
        return reference_statistics(logits, target, start, weight, smooth)
    matrix = rows_of(logits)
    rows, v = matrix.shape
    largest, total, chosen, every = (
        logits.new_empty(rows if wanted else 0, dtype=torch.float32)
        for wanted in (True, True, True, smooth)
    )
    block = min(power(v), _CHUNK)
    launch(_statistics_kernel, (rows,))(
        matrix, vector(target), vector(weight), largest, total, chosen, every, matrix.stride(0), v,
        start, SMOOTH=smooth, WEIGHS=weight is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return largest, total, chosen, every


@_statistics.register_fake
def _statistics_fake(logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rows, smooth = logits.shape[0], rest[-1]
    sizes = (rows, rows, rows, rows if smooth else 0)
    return tuple(logits.new_empty(size, dtype=_wide(logits.dtype)) for size in sizes)


@operator("tpplan::cross_entropy_gradient")
def _gradient(
    logits: Tensor,
    target: Tensor,
    start: int,
    weight: Tensor | None,
    largest: Tensor,
    log_sum: Tensor,
    of_sum: Tensor,
    of_target: Tensor,
    of_every: Tensor | None,
) -> Tensor:
    if not fused(logits, weight):
        return reference_gradient(
            logits, target, start, weight, largest, log_sum, of_sum, of_target, of_every
        ).contiguous()
    matrix = rows_of(logits)
    rows, v = matrix.shape
    dx = logits.new_empty(logits.shape)
    block = min(power(v), _GRADIENT)
    across = blocks(v, block)
    launch(_gradient_kernel, (rows * across,))(
        matrix, vector(target), vector(weight), vector(largest), vector(log_sum), vector(of_sum),
        vector(of_target), vector(of_every), dx, matrix.stride(0), v, start, across,
        SMOOTH=of_every is not None, WEIGHS=weight is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return dx


_gradient.register_fake(lambda logits, *_: logits.new_empty(logits.shape))


def statistics(
    logits: Tensor,
    target: Tensor,
    start: int,
    weight: Tensor | None = None,
    *,
    smooth: bool,
    fuse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a rank knows of each row's loss; not differentiable by itself.

    Args:
        logits: (rows, v), of the classes from ``start`` on.
        target: (rows,) int64 class indices; negative where there is none.
        weight: (v,) of these classes, for the last result.
        smooth: whether the last result is needed.
        fuse: whether the kernel does it, or else PyTorch's own ops.

    Returns:
        Four of (rows,), float32 or float64: the largest logit m (-inf where there are none),
        Σ exp(x - m), the target's logit (0 where it is not here), and Σ w (x - m), which is of
        no elements where it is not needed.
    """
    if fuse:
        return _statistics(logits, target, start, weight, smooth)  # type: ignore[no-any-return]
    return reference_statistics(logits, target, start, weight, smooth)


def gradient(
    logits: Tensor,
    target: Tensor,
    start: int,
    weight: Tensor | None,
    largest: Tensor,
    log_sum: Tensor,
    of_sum: Tensor,
    of_target: Tensor,
    of_every: Tensor | None,
    *,
    fuse: bool,
) -> Tensor:
    """The gradient of a rank's logits, (rows, v) of their dtype.

    Args:
        logits, target, start, weight, fuse: as of ``statistics``.
        largest, log_sum: (rows,) of all ranks' logits: the largest, and log Σ exp of what they
            are above it.
        of_sum, of_target, of_every: (rows,) gradients of the log-sum-exp, of the target's logit
            and of the (weighted) sum of all logits, None where that was not needed.
    """
    given = (logits, target, start, weight, largest, log_sum, of_sum, of_target, of_every)
    return _gradient(*given) if fuse else reference_gradient(*given)  # type: ignore[no-any-return]
