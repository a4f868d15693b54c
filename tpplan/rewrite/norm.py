"""Norms: by a fused kernel, or over the whole of a width that is sharded (OLMo 2's q and k)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tpplan.comm import copy_in, reduce_out
from tpplan.kernels.norm import norm
from tpplan.planner import KernelChoice
from tpplan.rewrite.lowered import Lowered


class WidthNorm(Lowered):
    """RMSNorm over columns of which each rank holds a part.

    y_i = x_i / sqrt(sum_j |x_j|^2 / width + eps) * w_i (Zhang and Sennrich 2019, section 4): the
    sum of squares is summed over the ranks, and so is its gradient, to which every rank's columns
    contribute; one number for each row.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        norm = state.plan.norm
        assert norm is not None
        (weight,) = self._locals()
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        squares = reduce_out(wide.square().sum(-1, keepdim=True), state.transition)
        total = copy_in(squares, state.transition)
        scale = weight + 1 if norm.offset else weight
        unit = wide * torch.rsqrt(total / norm.width + norm.eps)
        return (unit * scale).to(x.dtype)


class FusedNorm(Lowered):
    """LayerNorm or RMSNorm of local rows by the kernel that was proved to equal the module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        if torch.is_autocast_enabled(x.device.type):
            return super().forward(x)  # type: ignore[no-any-return]
        return _normed(
            x, state.plan.kernel, dict(zip(state.own.names, self._locals(), strict=True))
        )


class WholeNorm(nn.Module):
    """The same in a model that is not sharded."""

    _tpplan: KernelChoice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of ``x``; autocast is left to the module's own forward."""
        if torch.is_autocast_enabled(x.device.type):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        return _normed(x, self._tpplan, self._parameters)


def _normed(
    x: torch.Tensor,
    choice: KernelChoice | None,
    parameters: Mapping[str, torch.Tensor | None],
) -> torch.Tensor:
    assert choice is not None
    form = choice.form
    assert form is not None
    weight, bias = (None if name is None else parameters[name] for name in form.names)
    return norm(
        x,
        weight,
        bias,
        eps=form.eps,
        centred=form.centred,
        offset=form.offset,
        early=form.early,
    )
