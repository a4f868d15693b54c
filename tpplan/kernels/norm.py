"""LayerNorm and RMSNorm, alone or with the residual addition before them.

LayerNorm: y = (x - mean) / sqrt(var + eps) * w + b (Ba et al. 2016). RMSNorm leaves out the mean
(Zhang and Sennrich 2019). Statistics and sums are float32, the variance is of what is centred. A
mean is kept as two numbers, itself and what its rounding left: far from zero the rounding of one
would be more than that of the values.
Backward, with u = (x - mean) * rstd and g = dy * w: dx = rstd * (g - mean(g) - u * mean(g * u)),
without mean(g) for RMSNorm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpplan.kernels.launch import (
    blocks,
    differentiably,
    fused,
    groups_of,
    launch,
    processors,
    rows_of,
    tile,
    vector,
    wide,
)
from tpplan.kernels.norm_bodies import (
    CHUNK,
    backward_columns,
    backward_sums,
    backward_whole,
    plan_backward,
    plan_forward,
)
from tpplan.kernels.operator import operator


def reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    offset: float,
    early: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel computes, by PyTorch's own ops: the norm, and each row's statistics."""
    top = wide(x)
    means = top.new_empty(0)
    if centred:
        mean = top.mean(-1, keepdim=True)
        rest = (top - mean).mean(-1, keepdim=True)
        top, means = top - mean - rest, torch.cat([mean, rest], -1).flatten()
    rstd = torch.rsqrt(top.square().mean(-1, keepdim=True) + eps)
    unit = top * rstd
    if early:
        unit = unit.to(x.dtype).to(top.dtype)
    if weight is not None:
        unit = unit * (weight.to(top.dtype) + offset)
    if bias is not None:
        unit = unit + bias.to(top.dtype)
    return unit.to(_result(x, weight, early)), means, rstd.flatten()


def _result(x: Tensor, weight: Tensor | None, early: bool) -> torch.dtype:
    # what is cast before it is scaled takes part in PyTorch's promotion
    return torch.promote_types(x.dtype, weight.dtype) if early and weight is not None else x.dtype


@operator("tpplan::norm")
def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    offset: float,
    early: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not fused(x, residual, weight, bias):
        total = x if residual is None else x + residual
        found = reference(total, weight, bias, eps, centred, offset, early)
        return found[0], x.new_empty(0) if residual is None else total, found[1], found[2]
    matrix, h = rows_of(x), x.shape[-1]
    more = matrix if residual is None else rows_of(residual)
    rows = matrix.shape[0]
    y = x.new_empty(x.shape, dtype=_result(x, weight, early))
    total = x.new_empty(0 if residual is None else x.shape)
    means = x.new_empty(2 * rows if centred else 0, dtype=torch.float32)
    rstds = x.new_empty(rows, dtype=torch.float32)
    kernel, block, warps = plan_forward(h, x.element_size())
    launch(kernel, (rows,))(
        matrix, more, vector(weight), vector(bias), y, total, means, rstds, matrix.stride(0),
        more.stride(0), h, eps, OFFSET=offset, CENTRED=centred, EARLY=early,
        ADDS=residual is not None, SCALES=weight is not None, SHIFTS=bias is not None,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y, total, means, rstds


@_norm.register_fake
def _norm_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    _, _, centred, _, early = rest
    rows = x.numel() // max(x.shape[-1], 1)
    statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.new_empty(x.shape, dtype=_result(x, weight, early)),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(2 * rows if centred else 0, dtype=statistics),
        x.new_empty(rows, dtype=statistics),
    )


@operator("tpplan::norm_backward")
def _norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    means: Tensor,
    rstds: Tensor,
    dtotal: Tensor | None,
    offset: float,
    early: bool,
    scales: bool,
    shifts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    centred, h = means.numel() > 0, x.shape[-1]
    if not fused(dy, x, weight, dtotal):
        return _reference_backward(
            dy, x, weight, means, rstds, dtotal, offset, early, scales, shifts
        )
    grad, matrix = rows_of(dy), rows_of(x)
    more = grad if dtotal is None else rows_of(dtotal)
    strides, rows = (grad.stride(0), matrix.stride(0), more.stride(0)), matrix.shape[0]
    scale, dx = vector(weight), x.new_empty(x.shape)
    plan = plan_backward(h, x.element_size())
    choices: dict[str, Any] = {
        "OFFSET": offset, "CENTRED": centred, "EARLY": early, "ADDS": dtotal is not None,
        "SCALES": weight is not None, "DW": scales, "DB": shifts,
    }  # fmt: skip

    def partial(n: int) -> list[Tensor]:
        wanted = (n if scales else 0, n if shifts else 0)
        return [torch.empty((k, h), dtype=torch.float32, device=x.device) for k in wanted]

    if plan is not None:
        block, warps, each = plan
        programs = min(rows, each * processors(x.device))
        dws, dbs = partial(programs)
        launch(backward_whole, (programs,))(
            grad, matrix, scale, means, rstds, more, dx, dws, dbs, *strides, rows, h,
            **choices, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    else:
        sums = torch.empty(2 * rows, dtype=torch.float32, device=x.device)
        launch(backward_sums, (rows,))(
            grad, matrix, scale, means, rstds, sums, *strides[:2], h, OFFSET=offset,
            CENTRED=centred, SCALES=weight is not None, BLOCK=CHUNK, num_warps=4,
        )  # fmt: skip
        high, columns = tile(h, 2048)
        across = blocks(h, columns)
        groups = groups_of(rows, high, across, x.device)
        dws, dbs = partial(groups)
        launch(backward_columns, (groups * across,))(
            grad, matrix, scale, means, rstds, sums, more, dx, dws, dbs, *strides, rows, h,
            **choices, ROWS=high, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return dx, dws.sum(0) if scales else dws[0:0, 0], dbs.sum(0) if shifts else dbs[0:0, 0]


def _reference_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    means: Tensor,
    rstds: Tensor,
    dtotal: Tensor | None,
    offset: float,
    early: bool,
    scales: bool,
    shifts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    centred, rstd, unit = means.numel() > 0, rstds.reshape(*x.shape[:-1], 1), wide(x)
    if centred:
        pairs = means.reshape(*x.shape[:-1], 2)
        unit = unit - pairs[..., :1] - pairs[..., 1:]
    unit = unit * rstd
    grad = dy.to(unit.dtype)
    scaled = grad if weight is None else grad * (weight.to(unit.dtype) + offset)
    dx = scaled - unit * (scaled * unit).mean(-1, keepdim=True)
    if centred:
        dx = dx - scaled.mean(-1, keepdim=True)
    dx = dx * rstd
    if dtotal is not None:
        dx = dx + dtotal
    if early:
        unit = unit.to(x.dtype).to(unit.dtype)
    nothing = unit.new_empty(0)
    h = x.shape[-1]
    dw = (grad * unit).reshape(-1, h).sum(0) if scales else nothing
    return dx.to(x.dtype), dw, grad.reshape(-1, h).sum(0) if shifts else nothing


@_norm_backward.register_fake
def _norm_backward_fake(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, rstds, _, _, _, *wanted = rest  # of the weight's gradient and the bias's, which
    return x.new_empty(x.shape), *(rstds.new_empty(x.shape[-1] if w else 0) for w in wanted)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, weight, bias, ctx.eps, ctx.centred, ctx.offset, ctx.early = inputs
    _, total, means, rstds = output
    ctx.adds = residual is not None
    ctx.mark_non_differentiable(means, rstds)
    if not ctx.adds:
        ctx.mark_non_differentiable(total)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total if ctx.adds else x, weight, bias, means, rstds)


def _backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, weight, bias, means, rstds = ctx.saved_tensors
    if dy is None:
        dx, dw, db = dtotal, None, None
    elif torch.is_grad_enabled():
        dx, dw, db = differentiably(
            lambda x, w, b: reference(x, w, b, ctx.eps, ctx.centred, ctx.offset, ctx.early)[0],
            (x, weight, bias),
            dy,
        )
        if ctx.adds and dx is not None and dtotal is not None:
            dx = dx + dtotal
    else:
        more = dtotal if ctx.adds else None
        needed = zip((weight, bias), ctx.needs_input_grad[2:4], strict=True)
        scale, shift = (t if need else None for t, need in needed)
        wanted = scale is not None, shift is not None
        dx, dw, db = _norm_backward(
            dy, x, weight, means, rstds, more, ctx.offset, ctx.early, *wanted
        )
        dw, db = (None if t is None else g.to(t.dtype) for g, t in ((dw, scale), (db, shift)))
    return dx, dx if ctx.adds else None, dw, db, None, None, None, None


_norm.register_autograd(_backward, setup_context=_setup)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float,
    centred: bool,
    offset: float = 0.0,
    early: bool = False,
) -> Tensor:
    """LayerNorm (``centred``) or RMSNorm of the last dimension of ``x``, of any shape.

    Args:
        weight, bias: of shape (h,), or None.
        offset: is added to the weight (Gemma stores it less one).
        early: whether what is normalised is rounded to the dtype of ``x`` before it is scaled
            (Llama); the result then is of the dtype that PyTorch promotes both to.
    """
    return _norm(x, None, weight, bias, eps, centred, offset, early)[0]  # type: ignore[no-any-return]


def residual_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float,
    centred: bool,
    offset: float = 0.0,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and that sum, which the stream goes on with; see ``norm``."""
    y, total, _, _ = _norm(x, residual, weight, bias, eps, centred, offset, early)
    return y, total
