"""Random numbers, noted as they are drawn: by every rank of its own where each has a part of them.

To a proof all draws are one number. What must not be the same on all ranks, and what must, is told
by their shapes: of what the ranks share out none draws as many as the unsharded model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tpplan.comm.randomness import draws_own
from tpplan.compat import local_of
from tpplan.observe.channels import drawn_by


@dataclass(frozen=True)
class Drawn:
    """Numbers of a shape, and whether from a rank's own sequence."""

    shape: tuple[int, ...]
    own: bool


_noted: ContextVar[list[Drawn] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noting() -> Iterator[list[Drawn]]:
    """What is drawn within it."""
    found: list[Drawn] = []
    before = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(before)


def note(numbers: torch.Tensor, dropout: Any = None) -> None:
    """That as many are drawn; of a single one there is nothing to share out.

    Args:
        dropout: the function that drops out of them.
    """
    found = _noted.get()
    local = local_of(numbers) if isinstance(numbers, DTensor) else numbers
    if found is not None and local.dim():
        found.append(Drawn(drawn_by(dropout, tuple(local.shape)), draws_own()))


def misdrawn(due: Sequence[Drawn], got: Sequence[Drawn]) -> str | None:
    """What a rank draws otherwise than it must, of what the unsharded model drew."""
    if len(due) != len(got):
        return None  # of experts each rank runs some
    for whole, ours in zip(due, got, strict=True):
        if ours.own == (ours.shape == whole.shape):
            alike = "all ranks need the same" if ours.own else "each rank needs its own"
            return f"the drawing of random numbers {whole.shape}, of which {alike},"
    return None
