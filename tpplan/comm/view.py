"""Views of what was gathered of a ``RowsTensor``: what is written to them goes back to its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from tpplan import compat
from tpplan.comm.chunked import Chunked
from tpplan.comm.parts import cut
from tpplan.comm.stream import version_of


class Gathered:
    """What views are of: a whole tensor, and that of which it was gathered.

    Autograd, which would have to take such a write down, is not told of it.
    """

    def __init__(self, whole: DTensor, origin: Chunked) -> None:
        self.whole, self.origin = whole, origin
        self._version = version_of(origin)

    def takes(self) -> bool:
        """Whether a write can go back: nobody has changed the origin since."""
        if self._version != version_of(self.origin):
            return False  # on every rank, but lists of tensors are changed without being counted
        if self.origin.requires_grad and torch.is_grad_enabled():
            return False
        now, due = compat.local_of(self.origin), cut(compat.local_of(self.whole), self.origin)
        return bool(((now == due) | ((now != now) & (due != due))).all())

    def put_back(self) -> None:
        """The rows of this rank into the origin."""
        compat.local_of(self.origin).copy_(cut(compat.local_of(self.whole), self.origin))
        # autograd counts the write when it is done
        self._version = version_of(self.origin) + (not self.origin.is_inference())


class View(DTensor):
    """A view of a gathered ``RowsTensor``."""

    _tpplan_gathered: Gathered | None = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = [t for t in compat.written_by(func, args, kwargs) if isinstance(t, View)]
        origins = {id(g): g for t in written if (g := t._tpplan_gathered) is not None}
        apart = len({id(g.origin) for g in origins.values()}) < len(origins)
        if (
            any(t._tpplan_gathered is None or not t._tpplan_gathered.takes() for t in written)
            or apart
        ):
            raise RuntimeError(
                f"{func}: this is a view of a parameter of which each rank holds rows that do not "
                "follow each other, or that other ranks hold too, and that has changed since, or "
                "whose changes autograd records; a write to it would be lost. Take the view anew, "
                "or change the parameter as a whole"
            )
        if written:
            out = _write(func, args, kwargs)
            for gathered in origins.values():
                gathered.put_back()
            return out
        out = func(*tree_map(_unviewed, args), **tree_map(_unviewed, kwargs))
        if not compat.is_view(func):
            return out
        leaves = tree_leaves((args, kwargs))
        return as_views(
            out, next((t._tpplan_gathered for t in leaves if isinstance(t, View)), None)
        )

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> DTensor:
        return compat.unflattened(View, inner, context, size, stride)


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """On plain tensors: every rank has all of it, and torch shards fewer ops than there are."""
    views: dict[int, View] = {}

    def plain(t: Any) -> Any:
        if not isinstance(t, View):
            return t.full_tensor() if isinstance(t, DTensor) else t
        local = compat.local_of(t)
        views[id(local)] = t
        return local

    out = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    return tree_map(lambda t: views.get(id(t), t), out)


def _unviewed(t: Any) -> Any:
    return compat.dtensor(compat.local_of(t), compat.spec_of(t)) if isinstance(t, View) else t


def as_views(out: Any, gathered: Gathered | None) -> Any:
    """What an op answered, its DTensors as views."""

    def viewed(t: Any) -> Any:
        if type(t) is not DTensor:
            return t
        view = compat.dtensor(compat.local_of(t), compat.spec_of(t), View)
        view._tpplan_gathered = None if torch.compiler.is_compiling() else gathered  # type: ignore[attr-defined]
        return view

    return tree_map(viewed, out)
