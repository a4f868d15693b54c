"""GeLU, with the bias that is added before it (Hendrycks and Gimpel 2016).

With u = x + bias: y = u * cdf(u), the normal distribution's cdf(u) = (1 + erf(u / sqrt 2)) / 2, or
its approximation (1 + tanh(z / 2)) / 2 = sigmoid(z) for z = sqrt(8 / pi) * (u + 0.044715 * u^3).
u is float32 and not rounded to the dtype of x, as a matrix product adds its bias before it rounds.
Backward: dx = dy * (cdf(u) + u * cdf'(u)), and the sum of that over all rows for the bias.
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
    groups_of,
    jit,
    launch,
    rows_of,
    tile,
    tl,
    vector,
    wide,
)
from tpplan.kernels.operator import operator


@jit
def sigmoid_slope(z):
    # of z * log2(e): the sigmoid and its derivative, neither as a difference, which would have no
    # digits left soon
    small = tl.exp2(-tl.abs(z))
    inverse = 1.0 / (1.0 + small)
    return tl.where(z < 0, small * inverse, inverse), small * inverse * inverse


@jit
def _tail(u, bell):
    # 1 - cdf(|u|) to 7.5e-8 by Abramowitz and Stegun 26.2.17, for bell = exp(-u^2 / 2); theirs over
    # sqrt(2 pi) are the factors
    t = 1.0 / (1.0 + 0.2316419 * tl.abs(u))
    series = ((0.5307027143 * t - 0.7265760131) * t + 0.7107068707) * t - 0.1422483683
    return (series * t + 0.1274147959) * t * bell


@jit
def gelu_value(u, TANH: tl.constexpr, SHORT: tl.constexpr):
    # SHORT: of a 16-bit dtype. With tl.erf it is 39 instructions a value on sm_90, more than fit
    # into the time that memory takes
    if TANH:
        # z times log2(e)
        value = u / (1.0 + tl.exp2(u * (-2.302208198 - 0.1029432397 * (u * u))))
    elif SHORT:
        tail = _tail(u, tl.exp2(-0.7213475204444817 * (u * u)))
        value = tl.maximum(u, 0.0) - tl.abs(u) * tail
    else:
        value = u * (0.5 + 0.5 * tl.erf(u * 0.7071067811865476))
    return value


@jit
def gelu_slope(u, TANH: tl.constexpr, SHORT: tl.constexpr):
    # the value, and its derivative
    if TANH:
        cdf, density = sigmoid_slope(u * (2.302208198 + 0.1029432397 * (u * u)))
        # in this order large values stay zero: u * density is zero before the square is infinite
        slope = cdf + (u * density) * (1.5957691216057308 + 0.2140644858 * (u * u))
    else:
        bell = tl.exp2(-0.7213475204444817 * (u * u))
        if SHORT:
            tail = _tail(u, bell)
            cdf = tl.where(u < 0, tail, 1.0 - tail)
        else:
            cdf = 0.5 + 0.5 * tl.erf(u * 0.7071067811865476)
        slope = cdf + u * (0.3989422804014327 * bell)
    return u * cdf, slope


@jit
def _forward(
    x, bias, y, x_row, rows, h,
    SHIFTS: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(h, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (columns < h)
    values = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    if SHIFTS:
        values += tl.load(bias + columns, mask=columns < h, other=0.0).to(tl.float32)
    value = gelu_value(values, TANH, x.dtype.element_ty != tl.float32)
    tl.store(y + row * h + columns, value, mask=inside)


@jit
def _backward_rows(
    dy, x, bias, dx, dbs, dy_row, x_row, rows, h,
    SHIFTS: tl.constexpr, TANH: tl.constexpr, DB: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(h, COLUMNS)
    group = tl.program_id(0) // across
    stride = tl.num_programs(0) // across * ROWS
    lanes = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    columns = lanes[None, :]
    if SHIFTS:
        shift = tl.load(bias + columns, mask=columns < h, other=0.0).to(tl.float32)
    # summed over its rows once, at the end: they are in several warps
    db = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(tl.cdiv(rows - group * ROWS, stride)):
        row = (group * ROWS + step * stride).to(tl.int64) + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (columns < h)
        grad = tl.load(dy + row * dy_row + columns, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
        if SHIFTS:
            values += shift
        _, slope = gelu_slope(values, TANH, x.dtype.element_ty != tl.float32)
        grad *= slope
        tl.store(dx + row * h + columns, grad, mask=inside)
        if DB:
            db += grad
    if DB:
        tl.store(dbs + group.to(tl.int64) * h + lanes, tl.sum(db, 0), mask=lanes < h)


def reference(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """What the kernel computes, by PyTorch's own ops."""
    return F.gelu(_sum(x, bias), approximate=_name(tanh)).to(x.dtype)


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    top = wide(x)
    return top if bias is None else top + bias.to(top.dtype)


def _name(tanh: bool) -> str:
    return "tanh" if tanh else "none"


@operator("tpplan::gelu")
def _gelu(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    if not fused(x, bias):
        return reference(x, bias, tanh).contiguous()
    matrix, h = rows_of(x), x.shape[-1]
    rows = matrix.shape[0]
    y = x.new_empty(x.shape)
    high, columns = tile(h, 4096)
    launch(_forward, (blocks(rows, high) * blocks(h, columns),))(
        matrix, vector(bias), y, matrix.stride(0), rows, h,
        SHIFTS=bias is not None, TANH=tanh, ROWS=high, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return y


_gelu.register_fake(lambda x, *_: x.new_empty(x.shape))


@operator("tpplan::gelu_backward")
def _gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, shifts: bool
) -> tuple[Tensor, Tensor]:
    if not fused(dy, x, bias):
        return _reference_backward(dy, x, bias, tanh, shifts)
    grad, matrix, h = rows_of(dy), rows_of(x), x.shape[-1]
    rows = matrix.shape[0]
    high, columns = tile(h, 2048)
    # rows that are not aligned need an address for each element, and registers for them
    warps = 4 if h % 16 == 0 else 8
    across = blocks(h, columns)
    groups = groups_of(rows, high, across, x.device)
    dx = x.new_empty(x.shape)
    dbs = x.new_empty((groups if shifts else 0, h), dtype=torch.float32)
    launch(_backward_rows, (groups * across,))(
        grad, matrix, vector(bias), dx, dbs, grad.stride(0), matrix.stride(0), rows, h,
        SHIFTS=bias is not None, TANH=tanh, DB=shifts, ROWS=high, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip
    return dx, dbs.sum(0) if shifts else dbs[:, 0]


def _reference_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, shifts: bool
) -> tuple[Tensor, Tensor]:
    top = _sum(x, bias)
    dx = torch.ops.aten.gelu_backward(dy.to(top.dtype), top, approximate=_name(tanh))
    # one more dimension, as a sum over none of them would be one over all
    db = dx[None].sum(tuple(range(x.dim()))) if shifts else dx.new_empty(0)
    return dx.to(x.dtype).contiguous(), db


@_gelu_backward.register_fake
def _gelu_backward_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, shifts: bool
) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty(x.shape[-1] if shifts else 0, dtype=sums)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, bias = ctx.saved_tensors
    if torch.is_grad_enabled():
        dx, db = differentiably(lambda x, b: reference(x, b, ctx.tanh), (x, bias), dy)
        return dx, db, None
    shifts = bias is not None and ctx.needs_input_grad[1]
    dx, db = _gelu_backward(dy, x, bias, ctx.tanh, shifts)
    return dx, db.to(bias.dtype) if shifts else None, None


_gelu.register_autograd(_backward, setup_context=_setup)


def gelu(x: Tensor, bias: Tensor | None = None, *, tanh: bool) -> Tensor:
    """GeLU of ``x + bias``, in the shape (..., h) and the dtype of ``x``.

    Args:
        bias: of shape (h,), or None.
        tanh: whether it is the approximation by tanh.
    """
    return _gelu(x, bias, tanh)  # type: ignore[no-any-return]
