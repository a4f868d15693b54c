"""Views of what was gathered, which nobody may write to."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from tpplan import compat


class View(DTensor):
    """A view of a gathered ``RowsTensor``: to be read only, as nothing written here gets back."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(t, View) for t in compat.written_by(func, args, kwargs)):
            raise RuntimeError(
                f"{func}: this is a view of a parameter of which each rank holds rows that do not "
                "follow each other, or that other ranks hold too; a write to it would be lost. "
                "Change a copy of full_tensor() and load that, or change the parameter as a whole"
            )
        out = func(*tree_map(_unviewed, args), **tree_map(_unviewed, kwargs))
        return as_views(out) if compat.is_view(func) else out

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> DTensor:
        return compat.unflattened(View, inner, context, size, stride)


def _unviewed(t: Any) -> Any:
    return compat.dtensor(compat.local_of(t), compat.spec_of(t)) if isinstance(t, View) else t


def as_views(out: Any) -> Any:
    """What an op answered, its DTensors as views."""

    def viewed(t: Any) -> Any:
        plain = type(t) is DTensor
        return compat.dtensor(compat.local_of(t), compat.spec_of(t), View) if plain else t

    return tree_map(viewed, out)
