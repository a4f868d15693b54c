"""Where the stream enters a sharded region, with one collective for each distinct input."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from tpplan.comm import Site, Stream, Transition, gather_in
from tpplan.comm.pace import left_to_compiler
from tpplan.comm.pieces import Projecting, gather_products
from tpplan.comm.placements import is_whole
from tpplan.comm.products import Again, entered, keep_rows
from tpplan.comm.stream import version_of
from tpplan.compat import constant_in_graphs
from tpplan.roles.projection import is_plain

if TYPE_CHECKING:
    from tpplan.roles.lowered import Lowered


@constant_in_graphs
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
    of the products). ``served``: the modules that multiply by them; ``columns``: how many they
    have on the first rank; ``around``: the path of what is around all members.
    """

    def __init__(
        self, transition: Transition, again: Site, members: int, whole: bool, projections: bool
    ) -> None:
        self.transition = transition
        self.again = again
        self.members = members
        self.whole = whole
        self.projections = projections
        self.served: Sequence[Lowered] = ()
        self.columns = 0
        self.around = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        twin = Entry(self.transition, self.again, self.members, self.whole, self.projections)
        memo[id(self)] = twin
        twin.served, twin.columns = copy.deepcopy(self.served, memo), self.columns
        twin.around = self.around
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
                if length is None:
                    stream.entered = x.size(stream.dim)
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

    def _cut(self, stream: Stream, x: torch.Tensor, dim: int) -> tuple[int, Sequence[Projecting]]:
        """Into how many pieces of its rows it is cut, and which products are made of them."""
        if stream.pieces is None or not self.served or x.size(dim) < 2:
            return 1, ()
        if self.members > 1 and not stream.runs_alike(self.around):
            return 1, ()
        if torch.compiler.is_compiling():
            return left_to_compiler(stream.pieces.symmetric), ()
        device = self.transition.group.mesh.device_type
        lower = torch.is_autocast_enabled(device) and x.dtype != torch.float32
        if lower:
            return 1, ()
        rows = x.numel() // x.size(-1) * self.transition.group.size
        count = stream.pieces.of("all_gather", rows, x.size(-1), self.columns, x.dtype)
        found = [_projecting(module, x) for module in self.served] if count != 1 else []
        ready = [one for one in found if one is not None]
        return (count if ready else 1), ready

    def _gathered(self, stream: Stream, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        device, dtype = self.transition.group.mesh.device_type, None
        if self.projections and x.dtype == torch.float32 and torch.is_autocast_enabled(device):
            # before it is sent: half the bytes, and one cast for all that read it
            dtype = torch.get_autocast_dtype(device)
        again = None
        if stream.saves_rows and x.requires_grad and torch.is_grad_enabled():
            again = Again(self.transition.group, self.again, dim, length, dtype)
        pieces, projecting = self._cut(stream, x, dim)
        if pieces != 1:
            how = self.transition, projecting, pieces, dtype, again
            whole = gather_products(x, dim, length, *how)
        else:
            whole = gather_in(x, dim, length, self.transition, dtype)
        # other code may view it, as it could what it was given before
        whole = whole if self.projections else whole.contiguous()
        if stream.saves_rows and torch.compiler.is_compiling():
            _say_idle()
        elif again is not None:
            keep_rows(whole, x, again)
        return whole


def _projecting(module: Lowered, x: torch.Tensor) -> Projecting | None:
    """The product that ``module`` is going to make of ``x``; None where that is not certain."""
    if not is_plain(module._tpplan_project) or module._tpplan_is_watched():
        return None
    locals_ = module._tpplan.own.current(module)
    if locals_ is None:
        return None
    weight, *bias = locals_
    own = bias[0] if bias and module._tpplan_adds_bias else None
    found = Projecting(weight, own, module._tpplan.transposed)
    return found if found.takes(x) else None
