"""What ranks do together to save a model; a process without others does it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """This process among all."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether it is the first of them."""
    return rank() == 0


def everyones(value: T) -> list[T]:
    """What each rank gives."""
    if not dist.is_initialized():
        return [value]
    told: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told  # type: ignore[return-value]


def from_first(value: T) -> T:
    """What the first rank gives."""
    return everyones(value)[0]


def together(work: Callable[[], None], failure: str, first_only: bool = False) -> None:
    """Do it, on every rank or the first, and raise on all of them what one of them raised.

    Args:
        failure: how the message of a ``ValueError`` begins.
    """
    problem: str | None = None
    if not first_only or is_first():
        try:
            work()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    for number, told in enumerate(everyones(problem)):
        if told is not None:
            raise ValueError(f"{failure}: rank {number} stopped with {told}")
