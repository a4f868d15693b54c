"""Where the stream enters a sharded region, with one collective for each distinct input."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from tpplan.comm import Stream, Transition, copy_in, gather_in


class Entry:
    """One boundary. Modules that are given the very same tensor share its result.

    The result is kept until the last of them has taken it; at runtime, as at compile time, "the
    same" means one tensor object.
    """

    def __init__(self, transition: Transition, members: int) -> None:
        self.transition = transition
        self.members = members
        self._taken = 0
        self._given: object = None
        self._result: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        twin = Entry(self.transition, self.members)
        memo[id(self)] = twin
        return twin

    def enter(self, x: torch.Tensor, stream: Stream) -> torch.Tensor:
        """``x``, whole: gathered where it is a part of the sequence (g), as it is where not (f)."""
        if self.members == 1:
            return self._entered(x, stream)
        if self._given is not x or self._result is None:
            self._given, self._result, self._taken = x, self._entered(x, stream), 0
        result = self._result
        self._taken += 1
        if self._taken == self.members:
            self._given = self._result = None
        return result

    def _entered(self, x: torch.Tensor, stream: Stream) -> torch.Tensor:
        if isinstance(x, DTensor):
            if stream.is_sharded(x):
                length = x.size(stream.dim)
                return gather_in(stream.to_local(x), stream.dim, length, self.transition)
            if x.placements[0] != Replicate():
                x = x.redistribute(placements=[Replicate()])
            return copy_in(x.to_local(), self.transition)
        if stream.length is not None:
            return gather_in(x, stream.dim, stream.length, self.transition)
        return copy_in(x, self.transition)
