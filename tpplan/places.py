"""Where the tensors are in what a module is given and gives, and how one is exchanged."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of a module's forward, by name and, where it has one, by position.

    Attributes:
        place: of a tensor inside of it, where.
    """

    name: str
    index: int | None
    place: Place = ()

    def __str__(self) -> str:
        return self.name + "".join(
            f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
            for key in self.place
        )


@dataclasses.dataclass(frozen=True)
class Kept:
    """An attribute of a module, in which it keeps something: at the beginning of a place.

    Attributes:
        path: from the module that the place is of.
    """

    path: str
    name: str


Place = tuple[Any, ...]
"""The indices, keys and names of fields on the way to something inside a result; () is itself."""


def tensors_in(value: Any, place: Place = ()) -> Iterator[tuple[Place | None, torch.Tensor]]:
    """Every tensor of ``value`` with its place; None for what only torch's pytrees look into."""
    if isinstance(value, torch.Tensor):
        yield place, value
        return
    items = items_of(value)
    if items is None:
        yield from ((None, x) for x in tree_leaves(value) if isinstance(x, torch.Tensor))
        return
    for key, item in items:
        yield from tensors_in(item, (*place, key))


def items_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The keys, and what is there, of what has some; None of what is not looked into."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple | list):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return None


def at(value: Any, place: Place) -> Any:
    """What is at a place of ``value``."""
    for key in place:
        value = value[key] if isinstance(value, Mapping | tuple | list) else getattr(value, key)
    return value


def given_at(made: Any, place: Place) -> torch.Tensor | None:
    """The tensor at a place of what a module gives; None where this call was not asked for it."""
    try:
        found = at(made, place)
    except (KeyError, IndexError, AttributeError, TypeError):
        return None
    return found if isinstance(found, torch.Tensor) else None


def with_at(value: Any, place: Place, new: Any) -> Any:
    """A copy of ``value`` with something else at a place; the rest of it is the same objects."""
    if not place:
        return new
    key, *rest = place
    if isinstance(value, tuple | list):
        items = list(value)
        items[key] = with_at(items[key], tuple(rest), new)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    inner = with_at(at(value, (key,)), tuple(rest), new)
    if type(value) is dict:
        return {**value, key: inner}
    twin: Any = copy.copy(value)
    if isinstance(value, Mapping):
        twin[key] = inner
    else:
        object.__setattr__(twin, key, inner)  # dataclasses may be frozen
    return twin


def taken(argument: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument of a call, or what is inside of it; None where it was not given."""
    value = None
    if argument.name in kwargs:
        value = kwargs[argument.name]
    elif argument.index is not None and argument.index < len(args):
        value = args[argument.index]
    return given_at(value, argument.place) if argument.place else value
