"""Norms over the whole of a width that is sharded (OLMo 2 normalises q and k so)."""

from __future__ import annotations

from typing import Any

import torch

from tpplan.comm import copy_in, reduce_out
from tpplan.kernels.gated_norm import gated_norm, grouped_means
from tpplan.places import taken
from tpplan.roles.lowered import Lowered


class WidthNorm(Lowered):
    """RMSNorm over columns of which each rank holds a part.

    y_i = x_i / sqrt(sum_j |x_j|^2 / width + eps) * w_i (Zhang and Sennrich 2019, section 4): the
    sum of squares is summed over the ranks, and so is its gradient, to which every rank's columns
    contribute; one number for each row.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        if state.stream.shared is None and state.alone:
            with self._tpplan_whole():
                return super().forward(x)  # type: ignore[no-any-return, misc]
        norm = state.plan.norm
        assert norm is not None
        (weight,) = self._locals()
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        squares = reduce_out(wide.square().sum(-1, keepdim=True), state.transition)
        total = copy_in(squares, state.transition)
        scale = weight + 1 if norm.offset else weight
        unit = wide * torch.rsqrt(total / norm.width + norm.eps)
        return (unit * scale).to(x.dtype)


class GatedWidthNorm(Lowered):
    """The same, gated (Mamba-2 normalises so); where it has groups of columns that ranks share,
    one number for each group."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        if state.stream.shared is None and state.alone:
            with self._tpplan_whole():
                return super().forward(*args, **kwargs)
        norm = state.plan.norm
        assert norm is not None and norm.gated is not None and norm.takes is not None
        x, gate = (taken(argument, args, kwargs) for argument in norm.takes)
        (weight,) = self._locals()
        scale = weight + 1 if norm.offset else weight
        return gated_norm(x, gate, scale, norm.gated, self._tpplan_means, norm.eps)

    def _tpplan_means(self, squares: torch.Tensor) -> torch.Tensor:
        """The mean of squares over the group of columns that this rank has some of."""
        state = self._tpplan
        norm, rank = state.plan.norm, state.transition.group.rank
        assert norm is not None and norm.gated is not None
        size = state.transition.group.size
        groups, width = norm.gated.groups, norm.width // norm.gated.groups
        if groups % size == 0:  # it has whole groups
            return grouped_means(squares, groups // size)
        own = rank * squares.size(-1) // width
        sums = squares.sum(-1, keepdim=True)
        if groups > 1:
            place = torch.zeros(groups, dtype=sums.dtype, device=sums.device)
            place[own] = 1.0
            sums = sums * place
        total = copy_in(reduce_out(sums, state.transition), state.transition)
        return total.narrow(-1, own, 1) / width
