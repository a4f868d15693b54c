"""What leaves the model of which a rank has a part: the keys and values of its heads, say.

It is given out as a sharded tensor, which computes as if whole; a model that is given it again, as
those that return their cache are, takes this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from tpplan.layout import own_part
from tpplan.observe.trace import Trace
from tpplan.places import Place, given_at
from tpplan.planner.events import Departed, compare
from tpplan.planner.flow import Flow
from tpplan.planner.match import folded

Handed = Mapping[str, tuple[tuple[Place, int], ...]]
"""By the module that gives it: where, and the dimension that is cut."""


def leaving(trace: Trace, flow: Flow) -> dict[str, tuple[Place, ...]]:
    """Where modules give what the model then gives, of what was made in a region."""
    found: dict[str, dict[Place, None]] = {}
    for root in trace.calls:
        if root.parent is not None:
            continue
        left = {n for n, place in zip(root.outputs, root.places, strict=True) if place is not None}
        for number in sorted(left & trace.floating & flow.region - flow.whole_in_region):
            for path, place in _giving(trace, number):
                found.setdefault(path, {})[place] = None
    return {path: tuple(places) for path, places in found.items()}


def _giving(trace: Trace, number: int) -> Iterator[tuple[str, Place]]:
    """The innermost module that gives a tensor to all that use it outside, and where."""
    met = [i for i, op in enumerate(trace.ops) if number in (*op.inputs, *op.outputs)]
    for call in reversed(trace.calls):
        if number in call.outputs and all(call.first_op <= i < call.last_op for i in met):
            for made, place in zip(call.outputs, call.places, strict=True):
                if made == number and place is not None:
                    yield call.path, place
            return


class Parts:
    """Watches, in a replay, what modules give, and along which dimension a rank's is a part.

    Attributes:
        at: by kind of module and place, that dimension; None where it is no part of the whole.
        uneven: modules that give what is not as long as the whole, and no such part.
    """

    def __init__(self, places: Mapping[str, tuple[Place, ...]], tp: int) -> None:
        self.places, self.tp = places, tp
        self.at: dict[tuple[str, Place], int | None] = {}
        self.uneven: dict[str, None] = {}
        self.rank: int | None = None
        self._whole: list[torch.Tensor] = []
        self._next = 0

    def watch(self, model: nn.Module, rank: Callable[[], int | None]) -> None:
        """Watch a model that is run as it is, when ``rank`` is None, and then as ranks run it."""

        def begin(*_: Any) -> None:
            self.rank, self._next = rank(), 0

        def watched(path: str) -> Callable[[nn.Module, Any, Any], None]:
            return lambda _, __, out: self._note(path, out)

        self._whole = []
        model.register_forward_pre_hook(begin)
        for path in self.places:
            model.get_submodule(path).register_forward_hook(watched(path))

    def _note(self, path: str, out: Any) -> None:
        for place in self.places[path]:
            made = given_at(out, place)
            if made is None:
                continue
            if self.rank is None:
                self._whole.append(made.clone())
                continue
            whole, self._next = self._whole[self._next], self._next + 1
            key, dim = (folded(path), place), self._part(whole, made)
            if dim is None and whole.shape != made.shape:
                self.uneven[path] = None
            self.at[key] = dim if self.at.get(key, dim) == dim else None

    def _part(self, whole: torch.Tensor, own: torch.Tensor) -> int | None:
        assert self.rank is not None
        if whole.dim() != own.dim():
            return None
        dims = [d for d in range(own.dim()) if whole.size(d) != own.size(d)]
        if len(dims) != 1 or whole.size(dims[0]) != own.size(dims[0]) * self.tp:
            return None
        try:
            compare("", own_part(whole, Shard(dims[0]), self.rank, self.tp), own, "other numbers")
        except Departed:
            return None
        return dims[0]

    def found(self) -> Handed:
        """All that is a part, of the modules that were skipped in the replay too."""
        handed = {
            path: tuple(
                (place, dim)
                for place in places
                if (dim := self.at.get((folded(path), place))) is not None
            )
            for path, places in self.places.items()
        }
        return {path: places for path, places in handed.items() if places}
