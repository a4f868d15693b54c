"""What a replay compares: what modules were given and gave in the whole model, and on a rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Shard

from tpplan.language import Position
from tpplan.layout import Rows, own_part
from tpplan.observe.numbers import largest
from tpplan.planner.stops import Stop

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Failure:
    """Where a rank's run departs from the whole model's, and how.

    Attributes:
        rank: None where the whole model cannot be run either.
        stop: what its code stopped at; None where it ran on, with other numbers.
        place: the line of the model's code.
    """

    path: str
    rank: int | None
    message: str
    stop: Stop | None = None
    place: Position | None = None


@dataclass
class Event:
    """A call of a module in the whole model, and what ranks gave in its place.

    Attributes:
        given, made: its first input, and what it gave.
        parts: of ranks 0, 1, ..., what each gave of what is summed.
    """

    path: str
    given: torch.Tensor
    made: torch.Tensor
    parts: list[torch.Tensor] = field(default_factory=list)

    def share(self, last: bool, generator: torch.Generator) -> torch.Tensor:
        """A part of what was given, which adds up to it over the ranks; they take turns."""
        if last:
            return self.made - sum(self.parts)
        self.parts.append(self.made * torch.rand(self.made.shape, generator=generator))
        return self.parts[-1].clone()


class Departed(Exception):
    """A rank has something else than its part of what the whole model has, at ``path``."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path, self.message = path, message


def own_columns(whole: torch.Tensor, rows: Rows | None, rank: int, tp: int) -> torch.Tensor:
    """What a rank has of the last dimension, cut evenly or as a weight's rows are."""
    last = whole.dim() - 1
    placed = Shard(last) if rows is None else Rows(last, rows.pieces)
    return own_part(whole, placed, rank, tp)


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The first tensor of a call."""
    values = (*args, *kwargs.values())
    return next(value for value in values if isinstance(value, torch.Tensor))


def compare(path: str, due: torch.Tensor, given: torch.Tensor, message: str) -> None:
    """Whether a rank has what is due.

    Raises:
        Departed: where it has not; with the message.
    """
    if due.shape != given.shape:
        shapes = f"shape {tuple(given.shape)}, not {tuple(due.shape)}"
        raise Departed(path, f"{message} ({shapes})")
    if torch.equal(due, given):  # most are, to the bit; to ask how close they are takes far longer
        return
    if not given.is_floating_point():
        raise Departed(path, message)
    near = _TOLERANCE * largest(due)  # of what is finite: all is near to an infinity
    if not torch.allclose(due, given, rtol=_TOLERANCE, atol=near, equal_nan=True):
        raise Departed(path, message)


def own_numbers(given: torch.Tensor) -> torch.Tensor:
    """A copy of an input, in the numbers of the stand-in."""
    return given.to(torch.float32, copy=True) if given.is_floating_point() else given.clone()
