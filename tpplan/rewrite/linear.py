"""Column- and row-parallel Linear (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tpplan.comm import join, reduce_out, scatter_out
from tpplan.rewrite.lowered import Lowered


class Colwise(Lowered):
    """Y_i = X A_i + b_i: the input is whole, the output this rank's columns."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, *self._locals())


class Rowwise(Lowered):
    """Y = sum_i X_i A_i + b: the input is this rank's columns, the bias is added once.

    The sum is whole under plain TP, this rank's rows of it on a sequence-sharded stream.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        weight, *bias = self._locals()
        partial = F.linear(input, weight)
        stream = state.stream
        if not stream.sequence_parallel:
            out = reduce_out(partial, state.transition)
            return out + bias[0].to(out.dtype) if bias else out
        dim = min(stream.dim, partial.dim() - 2)
        out = scatter_out(partial, dim, state.transition)
        if bias:
            out = out + bias[0].to(out.dtype)  # autocast, which casts a Linear's bias
        if stream.length is None:
            # called outside the stack: whole in, whole out
            return join(out, dim, partial.size(dim), state.transition)
        return out
