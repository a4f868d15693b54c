"""Which blocks of a tensor this rank holds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from tpplan import compat
from tpplan.comm.chunked import Chunked, chunks
from tpplan.comm.placements import block, tp_rank


def chunks_of(tensor: torch.Tensor) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """Where each block begins in the whole tensor, and the local numbers of it.

    Under ``Rows`` there may be several; ranks that share rows have the same blocks of these.
    """
    if not isinstance(tensor, DTensor):
        yield (0,) * tensor.dim(), tensor
        return
    local = compat.local_of(tensor)
    if isinstance(tensor, Chunked):
        dim = tensor.rows.dim
        for offsets, sizes, at in chunks(tensor):
            yield offsets, local.narrow(dim, at, sizes[dim])
        return
    yield [start for start, _ in block(tensor)], local


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, to read into or to write from."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def is_first_with(tensor: Chunked, offsets: Sequence[int]) -> bool:
    """Whether no tensor-parallel rank before this one has the block of rows that begins there."""
    row, before = offsets[tensor.rows.dim], tensor.rows.pieces[: tp_rank(tensor)]
    return not any(start <= row < stop for pieces in before for start, stop in pieces)
