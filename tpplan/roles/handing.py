"""Modules that give out, and may be given again, what each rank has a part of."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.comm.placements import dim_of
from tpplan.comm.sharded import Parted
from tpplan.places import Place, at, given_at, items_of, with_at
from tpplan.roles.lowered import Lowered


class Handing(Lowered):
    """Gives its part of what leaves the model as a sharded tensor, and takes its part of such.

    Keys and values of a rank's heads, for one: code outside of it computes with them as if they
    were whole, or keeps them for the next step without anything being sent.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        stream = state.stream
        lent = _Lent(lambda x: stream.part_of(x, dim_of(x)))
        try:
            args, kwargs = lent.taken(args), {k: lent.taken(v) for k, v in kwargs.items()}
            made = super().forward(*args, **kwargs)
        finally:
            lent.put_back()
        made = lent.returned(made)
        for place, dim in state.plan.handed:
            part = given_at(made, place)
            if part is not None and not isinstance(part, Parted):
                made = lent.put(made, place, stream.of_parts(part, dim))
        return made


class _Lent:
    """A rank's parts in the place of what a call was given.

    What code may write to is not copied: that is its caller's, who finds there what it wrote.
    """

    def __init__(self, own: Callable[[Parted], torch.Tensor]) -> None:
        self._own = own
        self._writable: list[Any] = []
        self._lent: list[tuple[torch.Tensor, Parted]] = []

    def taken(self, value: Any) -> Any:
        """What is given to the module."""
        return self._exchanged(value, self._part, written=True)[0]

    def put_back(self) -> None:
        """Leave what is the caller's with what it gave there, where that still is."""
        containers, self._writable = self._writable, []
        for container in containers if self._lent else ():
            self._exchanged(container, self._given, written=True)
        self._writable = containers

    def returned(self, made: Any) -> Any:
        """What the module gives, with what it was given where it gives that on."""
        return self._exchanged(made, self._given, written=False)[0] if self._lent else made

    def put(self, made: Any, place: Place, new: Any) -> Any:
        """``with_at``, but written into what is the caller's."""
        if not place:
            return new
        inner = self.put(at(made, place[:1]), place[1:], new)
        # torch.compile cannot tell lists apart: there, what is given are copies
        told = self._writable and not torch.compiler.is_compiling()
        if not told or not any(made is one for one in self._writable):
            return with_at(made, place[:1], inner)
        _write(made, place[0], inner)
        return made

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, Parted):
            return x
        part = self._own(x)
        self._lent.append((part, x))
        return part

    def _given(self, x: torch.Tensor) -> torch.Tensor:
        return next((given for part, given in self._lent if part is x), x)

    def _exchanged(
        self, value: Any, new: Callable[[torch.Tensor], torch.Tensor], written: bool
    ) -> tuple[Any, bool]:
        """``value`` with others in the place of its tensors, and whether it is another one.

        Args:
            written: whether that is written into what can be written to; else there are copies.
        """
        if isinstance(value, torch.Tensor):
            made = new(value)
            return made, made is not value
        items = items_of(value)
        if items is None:  # one that torch's pytrees may look into
            parted = written and any(isinstance(x, Parted) for x in tree_leaves(value))
            return (tree_map_only(Parted, new, value), True) if parted else (value, False)
        write = written and _is_writable(value)
        if write:
            self._writable.append(value)
        changed = False
        for key, item in list(items):
            inner, other = self._exchanged(item, new, written)
            if other and write:
                _write(value, key, inner)
            elif other:
                value, changed = with_at(value, (key,), inner), True
        return value, changed


def _is_writable(value: Any) -> bool:
    if isinstance(value, MutableMapping | list):
        return True
    options = getattr(type(value), "__dataclass_params__", None)
    return options is not None and not options.frozen


def _write(container: Any, key: Any, item: Any) -> None:
    if isinstance(container, MutableMapping | list):
        container[key] = item
    else:
        setattr(container, key, item)
