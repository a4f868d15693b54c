"""What training is to change, given inside of caches and lists, as prefixes of keys and values.

Where ranks share key and value heads, each would have of its gradient what its own queries make.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# a cache of an encoder and a decoder has caches, lists of layers, in each of these the tensors
_DEEP = 6
# nothing that was given is looked for inside of these
_CLOSED = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)


def trained_inside(inputs: Mapping[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors inside of ``inputs`` whose gradients do not come to the model, by their names.

    Not those that the model gave out itself: what they are for its layers, these sum.
    """
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            for t in _inside(value):
                if t.requires_grad and not isinstance(t, DTensor) and _is_made_outside(t):
                    yield f"a tensor in '{name}'", t


def _inside(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in it, in the attributes of what is in it, and so on: in one order anywhere."""
    level, met = [value], set[int]()
    for _ in range(_DEEP):
        inner: list[Any] = []
        for one in level:
            if id(one) in met:
                continue
            met.add(id(one))
            if isinstance(one, torch.Tensor):
                yield one
            elif not isinstance(one, _CLOSED):
                inner += _parts(one)
        level = inner


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return () if isinstance(next(iter(value), None), int | float | str) else value
    held: dict[str, Any] = getattr(value, "__dict__", {})
    return held.values()


def _is_made_outside(t: torch.Tensor) -> bool:
    """Whether its gradient comes to a leaf by another way than through the sharded layers."""
    if t.grad_fn is None:
        return True
    pending, met = [t.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node in met or _is_of_layers(node):
            continue
        met.add(node)
        if hasattr(node, "variable"):
            return True
        pending += (inner for inner, _ in node.next_functions if inner is not None)
    return False


def _is_of_layers(node: Any) -> bool:
    """Whether it is one of tpplan's own functions, or of a compiled graph."""
    made_by = getattr(node, "_forward_cls", None)
    name = str(getattr(made_by, "__module__", ""))
    return name.startswith("tpplan.") or node.name() == "CompiledFunctionBackward"
