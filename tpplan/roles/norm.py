"""A norm over the whole of a width that is sharded (OLMo 2 normalises q and k so)."""

from __future__ import annotations

import torch

from tpplan.comm import copy_in, reduce_out
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
