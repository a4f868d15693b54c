"""What ops do to memory, whether they are random, and the queue of a device that they go to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors have in common whose values lie in the same memory."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def has_data(x: torch.Tensor) -> bool:
    """Whether ``x`` is values in memory; meta tensors, and those inside of vmap, are not."""
    return not x.is_meta and torch._C._has_storage(x)


def is_composite(func: Any) -> bool:
    """Whether an op consists of others, which autograd sees in its place."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")  # type: ignore[no-any-return]


def is_view(func: Any) -> bool:
    """Whether what an op returns shares the storage of what it was given."""
    kinds = [r.alias_info for r in func._schema.returns]
    return any(kind is not None and not kind.is_write for kind in kinds)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that an op writes to."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found += tree_leaves(given)
    return found


def draws(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an op draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # attention ops carry the tag for a dropout that is mostly zero
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given)
    return True


def queue_of(device_type: str) -> int | None:
    """The number of the current queue of a device (a CUDA stream); None where there is only one."""
    if device_type == "cpu":
        return None
    return int(torch.get_device_module(device_type).current_stream().stream_id)
