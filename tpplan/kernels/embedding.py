"""Vocab-parallel look-up: a rank's rows of an embedding, zeros for ids that are on other ranks.

Shoeybi et al., "Megatron-LM" (2019), section 3: summed over the ranks the result is the whole
look-up. No mask is written: a program that has no row to copy writes zeros.
The gradient of a row of the weight is the sum of what its id's places got. One program adds up
each row over the places, which are sorted by id: float32 throughout, the same on every run, and
nothing but the gradient itself is as large as the weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpplan.kernels.launch import (
    blocks,
    differentiably,
    fused,
    jit,
    launch,
    power,
    rows_of,
    tl,
    vector,
    warps,
)
from tpplan.kernels.operator import operator

_COPIED, _SUMMED = 4096, 1024  # columns of one program
_PLACES_AT_ONCE = 8  # rows of the gradient that a program adds up at once


@jit
def _look_up_kernel(ids, weight, out, w_row, h, v, start, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    place = (program // blocks).to(tl.int64)
    columns = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < h
    row = tl.load(ids + place).to(tl.int64) - start
    # no columns of a row that is elsewhere (a block of masks & one mask: not in every Triton)
    live = columns < tl.where((row >= 0) & (row < v), h, 0)
    values = tl.load(weight + row * w_row + columns, mask=live, other=0.0)
    tl.store(out + place * h + columns, values, mask=inside)


@jit
def _add_up_kernel(
    dy, places, bounds, dw, dy_row, h, padding, blocks, PLACES: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < h
    first = tl.load(bounds + row)
    last = tl.where(row == padding, first, tl.load(bounds + row + 1))
    sums = tl.zeros((BLOCK,), tl.float32)
    for begin in range(first, last, PLACES):
        lanes = begin + tl.arange(0, PLACES)
        live = lanes < last
        place = tl.load(places + lanes, mask=live, other=0)
        both = live[:, None] & inside[None, :]
        grad = tl.load(dy + place[:, None] * dy_row + columns[None, :], mask=both, other=0.0)
        sums += tl.sum(grad.to(tl.float32), 0)
    tl.store(dw + row * h + columns, sums, mask=inside)


def _local(padding_idx: int | None, start: int, v: int) -> int:
    """The row of the padding; -1 where it is not here."""
    row = -1 if padding_idx is None else padding_idx - start
    return row if 0 <= row < v else -1


def reference(
    ids: Tensor, weight: Tensor, start: int, padding_idx: int | None, known: Tensor | None = None
) -> Tensor:
    """What the kernel computes, by PyTorch's own ops; see ``look_up``.

    Args:
        known: which ids are on some rank, for the others to raise as in PyTorch's own look-up.
    """
    v = weight.shape[0]
    if v == 0:
        return weight.sum(0).expand(*ids.shape, -1).clone()
    row = ids - start
    elsewhere = (row < 0) | (row >= v)
    padding = _local(padding_idx, start, v)
    others = elsewhere if known is None else elsewhere & known
    found = F.embedding(row.masked_fill(others, 0), weight, None if padding < 0 else padding)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


@operator("tpplan::look_up")
def _look_up(ids: Tensor, weight: Tensor, start: int, padding_idx: int | None) -> Tensor:
    if not fused(weight) or ids.numel() == 0:
        return reference(ids, weight, start, padding_idx)
    matrix, (v, h) = rows_of(weight), weight.shape
    out = weight.new_empty((*ids.shape, h))
    block = min(power(h), _COPIED)
    across = blocks(h, block)
    launch(_look_up_kernel, (ids.numel() * across,))(
        vector(ids), matrix, out, matrix.stride(0), h, v, start, across, BLOCK=block,
        num_warps=warps(block),
    )  # fmt: skip
    return out


_look_up.register_fake(lambda ids, weight, *_: weight.new_empty((*ids.shape, weight.shape[1])))


@operator("tpplan::look_up_backward")
def _look_up_backward(
    dy: Tensor, ids: Tensor, v: int, start: int, padding_idx: int | None
) -> Tensor:
    h, padding = dy.shape[-1], _local(padding_idx, start, v)
    row = ids.flatten().long() - start
    if not fused(dy) or v == 0:
        kind = torch.promote_types(dy.dtype, torch.float32)
        counts = (row >= 0) & (row < v) & (row != padding)
        grad, sums = dy.reshape(-1, h)[counts].to(kind), dy.new_zeros((v, h), dtype=kind)
        return sums.index_add_(0, row[counts], grad).to(dy.dtype)
    grad = rows_of(dy)
    row, places = row.sort(stable=True)
    # the places of row n are places[bounds[n] : bounds[n + 1]]
    bounds = torch.searchsorted(row, torch.arange(v + 1, device=row.device), out_int32=True)
    dw = dy.new_empty((v, h))
    block = min(power(h), _SUMMED)
    across = blocks(h, block)
    launch(_add_up_kernel, (v * across,))(
        grad, places, bounds, dw, grad.stride(0), h, padding, across, PLACES=_PLACES_AT_ONCE,
        BLOCK=block, num_warps=max(block // 128, 1),
    )  # fmt: skip
    return dw


_look_up_backward.register_fake(lambda dy, ids, v, *_: dy.new_empty((v, dy.shape[-1])))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ids, weight, *ctx.where = inputs
    ctx.save_for_backward(ids, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    ids, weight = ctx.saved_tensors
    if torch.is_grad_enabled():
        (dw,) = differentiably(lambda w: reference(ids, w, *ctx.where), (weight,), dy)
    else:
        dw = _look_up_backward(dy, ids, weight.shape[0], *ctx.where)
    return None, dw, None, None


_look_up.register_autograd(_backward, setup_context=_setup)


def look_up(ids: Tensor, weight: Tensor, start: int, padding_idx: int | None = None) -> Tensor:
    """A rank's part of an embedding: (*ids.shape, h), zeros where an id is on another rank.

    Args:
        ids: int32 or int64 of any shape. One that is on no rank at all is not noticed.
        weight: (v, h), the rows of the ids from ``start`` on.
        padding_idx: the id whose row gets no gradient, wherever it is.
    """
    return _look_up(ids, weight, start, padding_idx)  # type: ignore[no-any-return]
