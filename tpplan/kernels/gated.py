"""SwiGLU and GeGLU: y = act(gate) * up (Shazeer 2020, "GLU variants improve transformer").

act is SiLU, u * sigmoid(u), or GeLU, by erf or by tanh. It is rounded to the dtype of the gate
before the product, as the model's own two ops do, so that results are the same.
Backward: dgate = dy * up * act'(gate) and dup = dy * act(gate), both computed from the gate anew.
The two may be halves of one tensor, which then has one gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tpplan.kernels.gelu import gelu_slope, gelu_value, sigmoid_slope
from tpplan.kernels.launch import (
    blocks,
    differentiably,
    fused,
    jit,
    launch,
    rows_of,
    tile,
    tl,
    wide,
)
from tpplan.kernels.operator import operator

Kind = Literal["silu", "gelu", "gelu_tanh"]

ACTIVATIONS: dict[Kind, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}
_SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": lambda grad, gate: torch.ops.aten.gelu_backward(grad, gate, approximate="tanh"),
}


@jit
def _forward(
    gate, up, y, g_row, u_row, rows, h,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(h, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (columns < h)
    u = tl.load(gate + row * g_row + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * u_row + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        value = u / (1.0 + tl.exp2(-1.4426950408889634 * u))
    else:
        value = gelu_value(u, KIND == "gelu_tanh", gate.dtype.element_ty != tl.float32)
    value = value.to(gate.dtype.element_ty).to(tl.float32)
    tl.store(y + row * h + columns, value * factor, mask=inside)


@jit
def _backward_both(
    dy, gate, up, dgate, dup, dy_row, g_row, u_row, dg_row, du_row, rows, h,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(h, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (columns < h)
    grad = tl.load(dy + row * dy_row + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate + row * g_row + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * u_row + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        share, density = sigmoid_slope(1.4426950408889634 * u)
        value = u * share
        slope = share + u * density
    else:
        value, slope = gelu_slope(u, KIND == "gelu_tanh", gate.dtype.element_ty != tl.float32)
    value = value.to(gate.dtype.element_ty).to(tl.float32)
    tl.store(dgate + row * dg_row + columns, grad * factor * slope, mask=inside)
    tl.store(dup + row * du_row + columns, grad * value, mask=inside)


def reference(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """What the kernel computes, by PyTorch's own ops."""
    return ACTIVATIONS[kind](gate) * up  # type: ignore[index]


def _halves(x: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    """The gate and the other half of what holds both, as views."""
    first, second = x.tensor_split(2, -1)
    return (first, second) if gate_first else (second, first)


def _multiply(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    if not fused(gate, up):
        return reference(gate, up, kind).contiguous()
    g, u, h = rows_of(gate), rows_of(up), gate.shape[-1]
    y = gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    high, columns = tile(h, 2048)
    launch(_forward, (blocks(g.shape[0], high) * blocks(h, columns),))(
        g, u, y, g.stride(0), u.stride(0), g.shape[0], h,
        KIND=kind, ROWS=high, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return y


def _gradients(dy: Tensor, gate: Tensor, up: Tensor, kind: str, dgate: Tensor, dup: Tensor) -> None:
    """Writes the gradients of ``gate`` and ``up`` to two tensors of their shape."""
    if not fused(dy, gate, up):
        top, factor = wide(gate), wide(up)
        dgate.copy_(_SLOPES[kind](dy.to(top.dtype) * factor, top))
        dup.copy_(dy * ACTIVATIONS[kind](gate))  # type: ignore[index]
        return
    grad, g, u, h = rows_of(dy), rows_of(gate), rows_of(up), gate.shape[-1]
    dg, du = dgate.view(-1, h), dup.view(-1, h)
    high, columns = tile(h, 2048)
    launch(_backward_both, (blocks(g.shape[0], high) * blocks(h, columns),))(
        grad, g, u, dg, du, grad.stride(0), g.stride(0), u.stride(0), dg.stride(0), du.stride(0),
        g.shape[0], h, KIND=kind, ROWS=high, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@operator("tpplan::gated")
def _gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return _multiply(gate, up, kind)


@_gated.register_fake
def _gated_fake(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@operator("tpplan::gated_backward")
def _gated_backward(dy: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    dgate, dup = _like(gate), _like(up)
    _gradients(dy, gate, up, kind, dgate, dup)
    return dgate, dup


_gated_backward.register_fake(lambda dy, gate, up, kind: (_like(gate), _like(up)))


@operator("tpplan::gated_packed")
def _packed(x: Tensor, kind: str, gate_first: bool) -> Tensor:
    return _multiply(*_halves(x, gate_first), kind)


_packed.register_fake(lambda x, *_: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))


@operator("tpplan::gated_packed_backward")
def _packed_backward(dy: Tensor, x: Tensor, kind: str, gate_first: bool) -> Tensor:
    dx = _like(x)
    _gradients(dy, *_halves(x, gate_first), kind, *_halves(dx, gate_first))
    return dx


_packed_backward.register_fake(lambda dy, x, *_: _like(x))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    gate, up = ctx.saved_tensors
    if torch.is_grad_enabled():
        both = differentiably(lambda g, u: reference(g, u, ctx.kind), (gate, up), dy)
        return *both, None
    return *_gated_backward(dy, gate, up, ctx.kind), None


def _setup_packed(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.kind, ctx.gate_first = inputs
    ctx.save_for_backward(x)


def _backward_packed(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():
        (dx,) = differentiably(lambda x: reference(*_halves(x, ctx.gate_first), ctx.kind), (x,), dy)
        return dx, None, None
    return _packed_backward(dy, x, ctx.kind, ctx.gate_first), None, None


_gated.register_autograd(_backward, setup_context=_setup)
_packed.register_autograd(_backward_packed, setup_context=_setup_packed)


def gated(gate: Tensor, up: Tensor, *, kind: Kind) -> Tensor:
    """``act(gate) * up`` for two tensors of one shape (..., h).

    Args:
        kind: act, with ``gelu_tanh`` the approximation by tanh.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate and up differ in shape: {(*gate.shape,)} and {(*up.shape,)}")
    return _gated(gate, up, _known(kind))  # type: ignore[no-any-return]


def gated_packed(x: Tensor, *, kind: Kind, gate_first: bool = True) -> Tensor:
    """``act(gate) * up``, of shape (..., h), for one tensor (..., 2h) that holds both.

    Args:
        kind: as for ``gated``.
        gate_first: whether it is [gate | up], else [up | gate].
    """
    if x.shape[-1] % 2:
        raise ValueError(f"{x.shape[-1]} columns are not two halves")
    return _packed(x, _known(kind), gate_first)  # type: ignore[no-any-return]


def _known(kind: str) -> str:
    if kind not in ACTIVATIONS:
        raise ValueError(f"no activation {kind!r}: it is one of {', '.join(ACTIVATIONS)}")
    return kind
