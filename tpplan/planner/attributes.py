"""Numbers that a module's code reads from its attributes: found, read and changed by name.

A name is dotted: ``config.num_heads``, an item of a list or tuple by its place (``sizes.0``), of a
mapping, or of a list of pairs, by its key (``_axes_lengths.h`` of an einops layer).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

_DEEP = 3
_CONFIGS = ("config", "args", "cfg")
_TORCHS = frozenset(vars(nn.Module()))


def attribute(module: nn.Module, name: str) -> object:
    """An attribute by its dotted name; None where there is none."""
    value: object = module
    for step in name.split("."):
        value = dict(_items(value)).get(step) if _holds(value) else getattr(value, step, None)
    return value


def assign(module: nn.Module, name: str, value: int) -> Callable[[], None]:
    """Set an attribute by its dotted name; what is on the way is copied, not shared.

    Returns a function that undoes it.
    """
    first, *rest = name.split(".")
    present = getattr(module, first)
    object.__setattr__(module, first, _changed(present, rest, value))
    return lambda: object.__setattr__(module, first, present)


def integers(values: Mapping[str, object]) -> dict[str, int]:
    """Of some attributes those that are whole numbers."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int) and not isinstance(value, bool) and name.isidentifier()
    }


def named_in_code(module: nn.Module) -> dict[str, int]:
    """A module's whole numbers, and those of its configuration, that its class's code speaks of."""
    spoken: set[str] = set()
    for cls in type(module).__mro__:
        if cls is nn.Module:
            break
        codes = (getattr(value, "__code__", None) for value in vars(cls).values())
        spoken.update(name for code in codes if code is not None for name in code.co_names)
    found = {}
    for name, value in vars(module).items():
        if name in _CONFIGS:
            inner = integers(getattr(value, "__dict__", {}))
            found.update({f"{name}.{leaf}": n for leaf, n in inner.items() if leaf in spoken})
        elif name in spoken and name not in _TORCHS:
            found.update(_numbers(name, value, _DEEP))
    return found


def _numbers(name: str, value: object, deep: int) -> Iterator[tuple[str, int]]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield name, value
    elif deep and _holds(value):
        for step, item in _items(value):
            yield from _numbers(f"{name}.{step}", item, deep - 1)


def _holds(value: object) -> bool:
    return isinstance(value, list | tuple | Mapping)


def _items(value: Any) -> Iterator[tuple[str, object]]:
    """What a list, tuple or mapping holds, each under its step of a name."""
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
        return
    for index, item in enumerate(value):
        yield item if _is_pair(item) else (str(index), item)


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


def _changed(holder: Any, steps: list[str], value: int) -> Any:
    """A copy of ``holder`` with ``value`` at the end of ``steps``."""
    if not steps:
        return value
    step, *rest = steps
    if isinstance(holder, Mapping):
        key = next(key for key in holder if str(key) == step)
        twin: Any = copy.copy(holder)
        twin[key] = _changed(holder[key], rest, value)
        return twin
    if isinstance(holder, list | tuple):
        items = [
            (item[0], _changed(item[1], rest, value))
            if _is_pair(item) and item[0] == step
            else _changed(item, rest, value)
            if str(index) == step
            else item
            for index, item in enumerate(holder)
        ]
        return type(holder)(*items) if hasattr(holder, "_fields") else type(holder)(items)
    twin = copy.copy(holder)
    setattr(twin, step, _changed(getattr(holder, step), rest, value))
    return twin
