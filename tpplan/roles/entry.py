"""Where the stream enters a sharded region, with one collective for each distinct input."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from tpplan.comm import Site, Stream, Transition, gather_in
from tpplan.comm.placements import is_whole
from tpplan.comm.products import Again, entered, keep_rows
from tpplan.comm.stream import version_of


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say_idle() -> None:
    """Once for each graph, while it is traced."""
    warnings.warn(
        "save: shard keeps no less in a compiled graph, which decides itself what it keeps",
        stacklevel=2,
    )


class Entry:
    """One boundary. Modules that are given the very same tensor share its result.

    "The same" means one tensor object, unchanged and in the same gradient and autocast mode. The
    result is kept with the stream, until the last of the modules has taken it or the forward is
    over. Compiled code, which cannot ask whether a tensor was changed, shares nothing.

    ``again``: what a second gather, in backward, is reported under. ``whole``: whether the tensor
    is whole also inside the stack. ``projections``: whether all that becomes of it is multiplied by
    weights, for which autocast would cast it (code that only asks for its dtype is then told that
    of the products).
    """

    def __init__(
        self, transition: Transition, again: Site, members: int, whole: bool, projections: bool
    ) -> None:
        self.transition = transition
        self.again = again
        self.members = members
        self.whole = whole
        self.projections = projections

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        twin = Entry(self.transition, self.again, self.members, self.whole, self.projections)
        memo[id(self)] = twin
        return twin

    def enter(self, x: torch.Tensor, stream: Stream, length: int | None) -> torch.Tensor:
        """``x``, whole: gathered where it is a part of the sequence (g), as it is where not (f).

        ``length``: of the sequence that an element of the stack works on, if one does.
        """
        if self.members == 1 or stream.shared is None or torch.compiler.is_compiling():
            return self._entered(x, stream, length)
        autocast = torch.is_autocast_enabled(self.transition.group.mesh.device_type)
        state = (version_of(x), torch.is_grad_enabled(), autocast)
        given, seen, result, taken = stream.shared.pop(self, (None, None, None, 0))
        if given is not x or seen != state or result is None:
            result, taken = self._entered(x, stream, length), 0
        if taken + 1 < self.members:
            stream.shared[self] = (x, state, result, taken + 1)
        return result  # type: ignore[no-any-return]

    def _entered(self, x: torch.Tensor, stream: Stream, length: int | None) -> torch.Tensor:
        if isinstance(x, DTensor):
            if stream.is_sharded(x):
                return self._gathered(stream, stream.to_local(x), stream.dim, x.size(stream.dim))
            if not is_whole(x):
                x = x.redistribute(placements=[Replicate()])
            x = x.to_local()
            return entered(x, self.transition)
        if length is not None and not self.whole:
            if x.dim() <= stream.dim + 1:  # tokens without their batch: every rank's, one by one
                return self._gathered(stream, x, 0, x.size(0) * self.transition.group.size)
            return self._gathered(stream, x, stream.dim, length)
        return entered(x, self.transition)

    def _gathered(self, stream: Stream, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        device, dtype = self.transition.group.mesh.device_type, None
        if self.projections and x.dtype == torch.float32 and torch.is_autocast_enabled(device):
            # before it is sent: half the bytes, and one cast for all that read it
            dtype = torch.get_autocast_dtype(device)
        whole = gather_in(x, dim, length, self.transition, dtype)
        # other code may view it, as it could what it was given before
        whole = whole if self.projections else whole.contiguous()
        if stream.saves_rows and torch.compiler.is_compiling():
            _say_idle()
        elif stream.saves_rows and whole.requires_grad:
            group = self.transition.group
            keep_rows(whole, x, Again(group, self.again, dim, length, dtype))
        return whole
