"""The layouts around sequence-parallel collectives, which know dimension 0 only.

With more than one sequence in the batch, what an all-gather returns is the ranks' chunks one
behind the other, (ranks, batch, chunk, ...), where the model wants (batch, length, ...); what a
reduce-scatter takes is the other way round, zeros behind the last chunk. Either is one copy here,
padding and cut included; the bias of a row-parallel layer and a cast take no pass of their own. A
chunk of one sequence is one run of memory in both layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpplan.compat import always
from tpplan.kernels.launch import FLOATS, blocks, fused, jit, launch, power, tl, vector, warps, wide
from tpplan.kernels.operator import operator

_BLOCK = 4096  # elements of one program


@jit
def _move_kernel(
    packed, whole, bias, batch, chunk, rows, length, width, blocks, share,
    PACKS: tl.constexpr, SHIFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0) // blocks  # of so many rows, of one rank and one sequence
    own = run // (chunk // rows)
    first = (own // batch).to(tl.int64) * chunk + run % (chunk // rows) * rows
    begin = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    filled = tl.minimum(tl.maximum(length - first, 0), rows) * width - begin
    size = (begin * 0 + rows) * width - begin  # wide, whatever Triton makes of one that is 1
    packed += run.to(tl.int64) * rows * width + begin
    whole += ((own % batch).to(tl.int64) * length + first) * width + begin
    lanes = tl.arange(0, BLOCK)
    if PACKS:
        values = tl.load(whole + lanes, mask=lanes < filled, other=0.0)
        if SHIFTS:
            shift = tl.load(bias + begin + lanes, mask=lanes < size, other=0.0).to(tl.float32)
            values = values.to(tl.float32) + shift * share
        tl.store(packed + lanes, values, mask=lanes < size)
    else:
        values = tl.load(packed + lanes, mask=lanes < filled)
        tl.store(whole + lanes, values, mask=lanes < filled)


def _move(packed: Tensor, whole: Tensor, packs: bool, bias: Tensor | None = None) -> None:
    ranks, batch, chunk, width = packed.shape
    rows = chunk if bias is None else 1  # where a program has a bias, it has columns of one row
    block = min(power(rows * width), _BLOCK)
    across = blocks(rows * width, block)
    launch(_move_kernel, (ranks * batch * (chunk // rows) * across,))(
        packed, whole, vector(bias), batch, chunk, rows, whole.shape[1], width, across, 1 / ranks,
        PACKS=packs, SHIFTS=bias is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip


def reference_unpack(packed: Tensor, length: int) -> Tensor:
    """What the kernel computes, by PyTorch's own ops: (ranks, b, c, h) to (b, length, h)."""
    chunk = packed.shape[2]
    parts = [
        part[:, : min(max(length - rank * chunk, 0), chunk)]
        for rank, part in enumerate(packed.unbind(0))
    ]
    return torch.cat(parts, 1)


def reference_pack(
    whole: Tensor, bias: Tensor | None, ranks: int, chunk: int, dtype: torch.dtype
) -> Tensor:
    """What the kernel computes, by PyTorch's own ops: (b, s, h) to (ranks, b, chunk, h)."""
    batch, length, width = whole.shape
    padded = F.pad(whole, (0, 0, 0, ranks * chunk - length))
    if bias is not None:
        padded = wide(padded) + wide(bias) / ranks
    split = padded.reshape(batch, ranks, chunk, width).transpose(0, 1)
    return split.to(dtype).clone(memory_format=torch.contiguous_format)


@operator("tpplan::unpack")
def _unpack(packed: Tensor, length: int) -> Tensor:
    if not fused(packed) or length == 0:
        return reference_unpack(packed, length)
    out = packed.new_empty((packed.shape[1], length, packed.shape[3]))
    _move(packed.contiguous(), out, packs=False)
    return out


@_unpack.register_fake
def _unpack_fake(packed: Tensor, length: int) -> Tensor:
    return packed.new_empty((packed.shape[1], length, packed.shape[3]))


@operator("tpplan::pack")
def _pack(whole: Tensor, bias: Tensor | None, ranks: int, chunk: int, dtype: torch.dtype) -> Tensor:
    if not fused(whole, bias) or dtype not in FLOATS:
        return reference_pack(whole, bias, ranks, chunk, dtype)
    out = whole.new_empty((ranks, whole.shape[0], chunk, whole.shape[2]), dtype=dtype)
    _move(out, whole.contiguous(), packs=True, bias=bias)
    return out


@_pack.register_fake
def _pack_fake(
    whole: Tensor, bias: Tensor | None, ranks: int, chunk: int, dtype: torch.dtype
) -> Tensor:
    return whole.new_empty((ranks, whole.shape[0], chunk, whole.shape[2]), dtype=dtype)


def _setup_unpack(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.ranks, _, ctx.chunk, _ = inputs[0].shape


def _backward_unpack(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _pack(grad, None, ctx.ranks, ctx.chunk, grad.dtype), None


def _setup_pack(ctx: Any, inputs: Any, output: Any) -> None:
    whole, bias, ctx.ranks, _, _ = inputs
    ctx.length, ctx.dtype = whole.shape[1], whole.dtype
    ctx.shift = None if bias is None else bias.dtype


def _backward_pack(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    shift = None
    if ctx.shift is not None:
        shift = (wide(grad).sum((0, 1, 2)) / ctx.ranks).to(ctx.shift)
    return _unpack(grad, ctx.length).to(ctx.dtype), shift, None, None, None


# each is the other's transpose, so gradients of gradients are right as well
_unpack.register_autograd(_backward_unpack, setup_context=_setup_unpack)
_pack.register_autograd(_backward_pack, setup_context=_setup_pack)


def unpack(gathered: Tensor, dim: int, length: int) -> Tensor:
    """The whole tensor, ``length`` along ``dim``, of all ranks' padded chunks.

    A view where that is one, as it is for a batch of one.

    Args:
        gathered: (ranks, *shape of a chunk), which has ``dim`` of ``shape``.
    """
    ranks, *shape = gathered.shape
    batch, chunk = math.prod(shape[:dim]), shape[dim]
    final = [*shape[:dim], length, *shape[dim + 1 :]]
    if batch == 1:
        together = [*shape[:dim], ranks * chunk, *shape[dim + 1 :]]
        return gathered.reshape(together).narrow(dim, 0, length)
    rows = gathered.reshape(ranks, batch, chunk, math.prod(shape[dim + 1 :]))
    return _unpack(rows, length).reshape(final)  # type: ignore[no-any-return]


def is_view(shape: Sequence[int], dim: int, ranks: int) -> bool:
    """Whether the chunks along ``dim`` lie one behind the other as they are."""
    return math.prod(shape[:dim]) == 1 and always(shape[dim] % ranks == 0)


def pack(
    whole: Tensor,
    dim: int,
    ranks: int,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The chunks along ``dim`` of ``ranks`` ranks, one behind the other, the last ones padded.

    A view where that is one, as it is for a batch of one of which all chunks are full.

    Args:
        bias: of the last dimension, ``dim`` being the one before, of which an equal share for each
            rank is added, so that the sum over the ranks has it once, padding included.
        dtype: of the result, that of ``whole`` if None.

    Returns:
        (ranks, *shape of a chunk), whose ``dim`` is an equal share, rounded up.
    """
    shape = list(whole.shape)
    dtype = dtype or whole.dtype
    chunk = -(-shape[dim] // ranks)
    final = [ranks, *shape[:dim], chunk, *shape[dim + 1 :]]
    if bias is None and is_view(shape, dim, ranks):
        return whole.reshape(final).to(dtype)
    if bias is not None and bias.shape != tuple(shape[dim + 1 :]):
        raise ValueError(f"a bias of {tuple(bias.shape)} is not what one row has: {shape}, {dim}")
    rows = whole.reshape(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))
    return _pack(rows, bias, ranks, chunk, dtype).reshape(final)  # type: ignore[no-any-return]
