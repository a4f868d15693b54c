"""Norms over the whole of a width that is sharded (OLMo 2 normalises q and k so)."""

from __future__ import annotations

from typing import Any

import torch

from tpplan.comm import copy_in, gather_in, reduce_out
from tpplan.kernels.gated_norm import gated_norm, grouped_means
from tpplan.places import taken
from tpplan.roles.lowered import Lowered


class WidthNorm(Lowered):
    """RMSNorm, or LayerNorm, over columns of which each rank holds a part.

    y_i = x_i / sqrt(sum_j |x_j|^2 / width + eps) * w_i (Zhang and Sennrich 2019, section 4): the
    sum of squares is summed over the ranks, and so is its gradient, to which every rank's columns
    contribute; one number for each row. LayerNorm (Ba et al. 2016, section 3) sends two.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        if state.stream.shared is None and state.alone:
            with self._tpplan_whole():
                return super().forward(x)  # type: ignore[no-any-return, misc]
        norm = state.plan.norm
        assert norm is not None
        scales = self._locals()
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        wide, squares = self._tpplan_centred(wide) if norm.centred else self._tpplan_squared(wide)
        out = wide * torch.rsqrt(squares / norm.width + norm.eps)
        if scales:
            out = out * (scales[0] + 1 if norm.offset else scales[0])
        return (out + scales[1] if len(scales) > 1 else out).to(x.dtype)

    def _tpplan_squared(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns, and the sum of the squares of all ranks' columns."""
        transition = self._tpplan.transition
        squares = reduce_out(x.square().sum(-1, keepdim=True), transition)
        return x, copy_in(squares, transition)

    def _tpplan_centred(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the columns less the mean of all ranks' columns.

        The parts' means and squares about them are put together as in Chan, Golub and LeVeque
        1983: a mean that is large beside the deviations costs no digits.
        """
        transition, own = self._tpplan.transition, x.size(-1)
        mean = x.mean(-1, keepdim=True)
        squares = (x - mean).square().sum(-1, keepdim=True)
        parts = gather_in(torch.stack((mean, squares))[None], 0, transition.group.size, transition)
        means, squares = parts[:, 0], parts[:, 1]
        middle = means.mean(0)
        between = (means - middle).square().sum(0)
        return x - middle, squares.sum(0) + own * between


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
