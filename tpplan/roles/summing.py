"""Modules whose own code gives a part of a sum: they multiply by bare parameters that are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpplan.places import at, taken, with_at
from tpplan.roles.linear import reduced, reduced_together
from tpplan.roles.lowered import LocalParameters


class Summing(LocalParameters):
    """Y = sum_i f(X, A_i) + b: the module's own forward with this rank's part of its parameters.

    What it adds to the sum is a parameter on the first rank and zeros on the others, whose gradient
    is summed over the ranks like that of any replicated parameter of a sharded region.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._tpplan_summed(super().forward(*args, **kwargs), args, kwargs)

    def _tpplan_summed(self, made: Any, args: Any, kwargs: Any) -> Any:
        """What is a part of a sum in what it gives, reduced."""
        state = self._tpplan
        if state.stream.shared is None and state.alone:
            return made
        assert state.plan.summed is not None
        for place in state.plan.summed.outputs:
            made = with_at(made, place, self._tpplan_reduced(at(made, place), args, kwargs))
        return made

    def _tpplan_reduced(self, part: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        stream, boundaries = self._tpplan.stream, self._tpplan.plan.boundaries
        if self._tpplan.plan.together:
            return reduced_together(self, part)
        entered = taken(boundaries[0].arguments[0], args, kwargs) if boundaries else None
        if stream.sequence_parallel and entered is not None and entered.dim() > part.dim() == 2:
            # tokens without their batch, of which each rank is to have its rows of every sequence
            rows = entered.shape[:-1]
            return reduced(self, part.view(*rows, part.shape[-1])).flatten(0, len(rows) - 1)
        return reduced(self, part)

    def _locals(self) -> Sequence[torch.Tensor]:
        state, locals_ = self._tpplan, super()._locals()
        assert state.plan.summed is not None
        first = float(state.transition.group.rank == 0)
        named = zip(state.own.names, locals_, strict=True)
        return [x * first if name in state.plan.summed.added else x for name, x in named]
