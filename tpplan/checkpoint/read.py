"""Parts of stored tensors, by their byte ranges."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence

import torch

from tpplan.checkpoint.files import Stored
from tpplan.checkpoint.parts import bytes_of

_AT_ONCE = 2**30  # some systems read no more than 2 GiB in one call


def part_of(stored: Stored, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The block of a stored tensor that begins at ``offsets``; nothing else of it is read.

    Raises:
        OSError: where the file ends before it.
    """
    part = torch.empty(tuple(sizes), dtype=stored.dtype)
    read_into(part, stored, offsets)
    return part


def read_into(part: torch.Tensor, stored: Stored, offsets: Sequence[int]) -> None:
    """The same, into a contiguous tensor of that dtype on the CPU.

    Raises:
        OSError: where the file ends before it.
    """
    if not part.numel():
        return
    memory = bytes_of(part)
    with stored.path.open("rb", buffering=0) as file:
        at = 0
        for start, length in runs(stored, offsets, part.shape):
            _fill(file.fileno(), memory[at : at + length], start)
            at += length


def runs(stored: Stored, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The byte ranges of a block in the file, in the order of its numbers: (start, length)."""
    shape, item = stored.shape, stored.dtype.itemsize
    # the last dimensions of which it has all lie in one piece, with the next one before them
    first = len(shape)
    while first and sizes[first - 1] == shape[first - 1]:
        first -= 1
    first = max(first - 1, 0)
    strides = [math.prod(shape[d + 1 :]) * item for d in range(len(shape))]
    length = math.prod(sizes[first:]) * item
    origin = stored.start + sum(o * s for o, s in zip(offsets, strides, strict=True))
    for index in itertools.product(*(range(n) for n in sizes[:first])):
        yield origin + sum(i * s for i, s in zip(index, strides, strict=False)), length


def _fill(file: int, memory: memoryview, start: int) -> None:
    at = 0
    while at < len(memory):
        read = os.preadv(file, [memory[at : at + _AT_ONCE]], start + at)
        if not read:
            raise OSError("the file ends before its tensors do: it was changed while it was read")
        at += read
