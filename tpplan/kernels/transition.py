"""The layouts around sequence-parallel collectives, which know dimension 0 only.

With more than one sequence in the batch, what an all-gather returns is the ranks' chunks one
behind the other, (ranks, batch, chunk, ...), where the model wants (batch, length, ...); what a
reduce-scatter takes is the other way round, zeros behind the last chunk. Either is one copy here,
padding and cut included. A chunk of one sequence is one run of memory in both layouts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tpplan.kernels.launch import fused, jit, launch, power, tl

_BLOCK = 4096  # elements of one program


@jit
def _move_kernel(
    packed, whole, batch, chunk, length, width, blocks, PACKS: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    run = program // blocks  # of one rank and one sequence
    first = (run // batch).to(tl.int64) * chunk
    begin = (program % blocks).to(tl.int64) * BLOCK
    filled = tl.minimum(tl.maximum(length - first, 0), chunk) * width - begin
    size = (begin * 0 + chunk) * width - begin  # wide, whatever Triton makes of one that is 1
    packed += run.to(tl.int64) * chunk * width + begin
    whole += ((run % batch).to(tl.int64) * length + first) * width + begin
    lanes = tl.arange(0, BLOCK)
    if PACKS:
        values = tl.load(whole + lanes, mask=lanes < filled, other=0.0)
        tl.store(packed + lanes, values, mask=lanes < size)
    else:
        values = tl.load(packed + lanes, mask=lanes < filled)
        tl.store(whole + lanes, values, mask=lanes < filled)


def plan(run: int) -> tuple[Any, int, int]:
    """The kernel for chunks of ``run`` elements, its block, and how many warps run it."""
    block = min(power(run), _BLOCK)
    return _move_kernel, block, max(block // 512, 1)


def _move(packed: torch.Tensor, whole: torch.Tensor, packs: bool) -> None:
    ranks, batch, chunk, width = packed.shape
    kernel, block, warps = plan(chunk * width)
    blocks = -(-chunk * width // block)
    launch(kernel, (ranks * batch * blocks,))(
        packed, whole, batch, chunk, whole.shape[1], width, blocks, PACKS=packs, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip


def reference_unpack(packed: torch.Tensor, length: int) -> torch.Tensor:
    """What the kernel computes, by PyTorch's own ops: (ranks, b, c, h) to (b, length, h)."""
    chunk = packed.shape[2]
    parts = [
        part[:, : min(max(length - rank * chunk, 0), chunk)]
        for rank, part in enumerate(packed.unbind(0))
    ]
    return torch.cat(parts, 1)


def reference_pack(whole: torch.Tensor, ranks: int, chunk: int) -> torch.Tensor:
    """What the kernel computes, by PyTorch's own ops: (b, s, h) to (ranks, b, chunk, h)."""
    batch, length, width = whole.shape
    padded = F.pad(whole, (0, 0, 0, ranks * chunk - length))
    split = padded.reshape(batch, ranks, chunk, width).transpose(0, 1)
    return split.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("tpplan::unpack", mutates_args=())
def _unpack(packed: torch.Tensor, length: int) -> torch.Tensor:
    if not fused(packed) or length == 0:
        return reference_unpack(packed, length)
    out = packed.new_empty((packed.shape[1], length, packed.shape[3]))
    _move(packed.contiguous(), out, packs=False)
    return out


@_unpack.register_fake
def _unpack_fake(packed: torch.Tensor, length: int) -> torch.Tensor:
    return packed.new_empty((packed.shape[1], length, packed.shape[3]))


@torch.library.custom_op("tpplan::pack", mutates_args=())
def _pack(whole: torch.Tensor, ranks: int, chunk: int) -> torch.Tensor:
    if not fused(whole):
        return reference_pack(whole, ranks, chunk)
    out = whole.new_empty((ranks, whole.shape[0], chunk, whole.shape[2]))
    _move(out, whole.contiguous(), packs=True)
    return out


@_pack.register_fake
def _pack_fake(whole: torch.Tensor, ranks: int, chunk: int) -> torch.Tensor:
    return whole.new_empty((ranks, whole.shape[0], chunk, whole.shape[2]))


def _setup_unpack(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.ranks, _, ctx.chunk, _ = inputs[0].shape


def _backward_unpack(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _pack(grad, ctx.ranks, ctx.chunk), None


def _setup_pack(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.length = inputs[0].shape[1]


def _backward_pack(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _unpack(grad, ctx.length), None, None


# each is the other's transpose, so gradients of gradients are right as well
_unpack.register_autograd(_backward_unpack, setup_context=_setup_unpack)
_pack.register_autograd(_backward_pack, setup_context=_setup_pack)


def unpack(gathered: torch.Tensor, dim: int, length: int) -> torch.Tensor:
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


def pack(whole: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """The chunks along ``dim`` of ``ranks`` ranks, one behind the other, the last ones padded.

    A view where that is one, as it is for a batch of one of which all chunks are full.

    Returns:
        (ranks, *shape of a chunk), whose ``dim`` is an equal share, rounded up.
    """
    shape = list(whole.shape)
    batch, length = math.prod(shape[:dim]), shape[dim]
    chunk = -(-length // ranks)
    final = [ranks, *shape[:dim], chunk, *shape[dim + 1 :]]
    if batch == 1 and length == ranks * chunk:
        return whole.reshape(final)
    rows = whole.reshape(batch, length, math.prod(shape[dim + 1 :]))
    return _pack(rows, ranks, chunk).reshape(final)  # type: ignore[no-any-return]
