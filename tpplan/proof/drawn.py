"""Random numbers, noted as they are drawn: by every rank of its own where each has a part of them.

To a proof all draws are one number. What must not be the same on all ranks, and what must, is told
by their shapes: of what the ranks share out none draws as many as the unsharded model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tpplan.comm.randomness import draws_own
from tpplan.compat import local_of
from tpplan.observe.channels import drawn_by
from tpplan.proof.noted import Misstep, now


@dataclass(frozen=True)
class Drawn:
    """Numbers of a shape, whether from a rank's own sequence, and the module that draws them."""

    shape: tuple[int, ...]
    own: bool
    path: str = ""


def note(numbers: torch.Tensor, dropout: Any = None, generator: Any = None) -> None:
    """That as many are drawn; of a single one there is nothing to share out.

    Args:
        dropout: the function that drops out of them.
        generator: that of the code itself, which all ranks have alike.
    """
    notes = now()
    local = local_of(numbers) if isinstance(numbers, DTensor) else numbers
    if notes is None or not local.dim():
        return
    own = generator is None and draws_own()
    notes.drawn.append(Drawn(drawn_by(dropout, tuple(local.shape)), own, notes.path()))


def misdrawn(
    due: Sequence[Drawn], got: Sequence[Drawn], tp: int, length: int | None = None
) -> Misstep | None:
    """What a rank draws otherwise than it must, of what the unsharded model drew.

    Args:
        length: of the sequence.
    """
    if len(due) != len(got):
        return None  # of experts each rank runs some
    for whole, ours in zip(due, got, strict=True):
        numbers = f"draws random numbers of shape {whole.shape}"
        if not ours.own and ours.shape != whole.shape:
            return Misstep(
                ours.path,
                f"{numbers}, of which each rank needs its own, from a sequence that all ranks "
                "share",
                "draw them with nn.Dropout or rand_like, and without a generator of your own; or "
                "leave that module out of the plan",
            )
        if ours.own and ours.shape == whole.shape:
            return Misstep(
                ours.path,
                f"{numbers}, of which all ranks need the same, from a sequence of each rank's own",
                "let them meet what is sharded in the shape they are drawn in; or leave that "
                "module out of the plan",
            )
        if ours.own and _is_held_twice(whole.shape, ours.shape, tp, length):
            return Misstep(
                ours.path,
                f"{numbers} for parts that several ranks hold alike, from a sequence of each "
                "rank's own",
                "draw for heads after they are repeated, or use no more ranks than there are of "
                "them; or leave that module out of the plan",
            )
    return None


def _is_held_twice(
    whole: tuple[int, ...], ours: tuple[int, ...], tp: int, length: int | None
) -> bool:
    """Whether several ranks must have the same part; less too much is padding."""
    if math.prod(ours) * tp < 2 * math.prod(whole):
        return False
    # of very few rows some ranks have padding alone
    cut = [w for w, o in zip(whole, ours, strict=False) if w != o]
    return length is None or length not in cut or 2 * length > tp
