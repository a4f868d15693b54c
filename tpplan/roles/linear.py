"""Column- and row-parallel Linear (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from tpplan.comm import chunk, copy_in, join, reduce_out, scatter_out
from tpplan.comm.pace import left_to_compiler
from tpplan.comm.pieces import Projecting, product_reduced, product_scattered
from tpplan.roles.lowered import Lowered, State
from tpplan.roles.projection import is_plain


class Colwise(Lowered):
    """Y_i = X A_i + b_i: the input is whole, the output this rank's columns.

    To a user who calls the layer by itself it gives all columns.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        if state.stream.shared is None and state.alone:
            with self._tpplan_whole():
                return super().forward(input)  # type: ignore[no-any-return, misc]
        weight, *bias = self._locals()
        return self._tpplan_project(input, weight, *bias)


class WholeLinear(Lowered):
    """Y = X A + b, all of it on every rank."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, *bias = self._locals()
        return self._tpplan_project(input, weight, *bias)


class Rowwise(Lowered):
    """Y = sum_i X_i A_i + b: the input is this rank's columns, the bias is added once.

    The sum is whole under plain TP, this rank's rows of it on a sequence-sharded stream. A user who
    calls the layer by itself gives it all columns.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        if state.stream.shared is None and state.alone:
            with self._tpplan_whole():
                return super().forward(input)  # type: ignore[no-any-return, misc]
        return self._tpplan_summed(input)

    @property
    def _tpplan_owned(self) -> bool:
        """Whether nobody else has what the projection gives."""
        return is_plain(self._tpplan_project)

    def _tpplan_summed(self, input: torch.Tensor) -> torch.Tensor:
        weight, *bias = self._locals()
        if self._tpplan.stream.pieces is not None:
            pieces = _pieces(self, input, weight)
            if pieces != 1:
                return _in_pieces(self, input, weight, bias, pieces)
        return reduced(self, self._tpplan_project(input, weight), bias, self._tpplan_owned)


class RowwiseScattered(Rowwise):
    """Each rank gets its columns of Y = sum_i X_i A_i + b (a layer that mixes all heads, and
    whose result is one number for each head)."""

    def _tpplan_summed(self, input: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        weight, *bias = self._locals()
        partial = self._tpplan_project(input, weight)
        out = scatter_out(partial, partial.dim() - 1, state.transition)
        first = out.size(-1) * state.transition.group.rank
        for whole in bias:
            out = out + whole.narrow(0, first, out.size(-1)).to(out.dtype)
        return out


class RowwiseInside(Rowwise):
    """Y = sum_i X_i A_i + b, whole, for the code of the region: it computes with that and with this
    rank's columns, so that what each rank sends back of Y is a part of its gradient (Mamba makes
    its step sizes, B and C so, of all channels and for each of them)."""

    def _tpplan_summed(self, input: torch.Tensor) -> torch.Tensor:
        weight, *bias = self._locals()
        transition = self._tpplan.transition
        partial = self._tpplan_project(input, weight)
        out = reduce_out(partial, transition, owned=self._tpplan_owned)
        for whole in bias:
            out = out + whole.to(out.dtype)
        return copy_in(out, transition)


class RowwisePartial(Rowwise):
    """Y_i = X_i A_i, and b on the first rank alone: the block around it sums the parts."""

    def _tpplan_summed(self, input: torch.Tensor) -> torch.Tensor:
        weight, *bias = self._locals()
        out = self._tpplan_project(input, weight)
        first = float(self._tpplan.transition.group.rank == 0)
        for whole in bias:
            out = out + (whole * first).to(out.dtype)
        return out


class RowwiseTogether(Rowwise):
    """One of several row-parallel layers whose outputs the model only adds up.

    While the element runs that adds them, all but the last one keep their part back and answer
    with zeros; the last one reduces the sum of all parts, and adds all biases. Elsewhere, and in
    code of the element that is checkpointed by itself, each reduces its own.
    """

    def _tpplan_summed(self, input: torch.Tensor) -> torch.Tensor:
        weight, *bias = self._locals()
        partial = self._tpplan_project(input, weight)
        return reduced_together(self, partial, bias, self._tpplan_owned)


def reduced_together(
    module: Lowered,
    partial: torch.Tensor,
    bias: Sequence[torch.Tensor] = (),
    owned: bool = False,
) -> torch.Tensor:
    """Zeros, or of the last of what is reduced together the sum of all of it."""
    state = module._tpplan
    stream, partners = state.stream, state.plan.together
    parts = stream.parts
    if parts is None or parts.grad is not torch.is_grad_enabled():
        return reduced(module, partial, bias, owned)
    kept, biases = parts.kept.pop(partners, (None, ()))
    if kept is not None:
        partial = kept + partial
    biases = (*biases, *bias)
    if state.plan.path != partners[-1]:
        parts.kept[partners] = (partial, biases)
        rows = list(partial.shape)
        if stream.sequence_parallel and stream.length is not None:
            dim = min(stream.dim, partial.dim() - 2)
            rows[dim] = chunk(rows[dim], state.transition.group.size)
        return partial.new_zeros(()).expand(rows)
    return reduced(module, partial, biases, owned or kept is not None)


def reduced(
    module: Lowered,
    partial: torch.Tensor,
    biases: Sequence[torch.Tensor] = (),
    owned: bool = False,
) -> torch.Tensor:
    """The sum of all ranks' ``partial``, whole or as this rank's rows, and the biases once.

    ``owned``: nobody else has ``partial``.
    """
    state = module._tpplan
    stream = state.stream
    if not stream.sequence_parallel:
        out = reduce_out(partial, state.transition, owned=owned)
        for bias in biases:
            out = out + bias.to(out.dtype)
        return out
    dim = min(stream.dim, partial.dim() - 2)
    shift = functools.reduce(torch.add, biases) if biases else None
    out = scatter_out(partial, dim, state.transition, shift)
    return _answered(state, out, dim, partial.size(dim))


def _answered(state: State, rows: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """What a row-parallel layer gives of this rank's ``rows`` of its result."""
    if state.length is not None:
        return rows
    stream = state.stream
    if stream.entered == length and dim == stream.dim and state.inside:
        # called outside of the stack, with the stream in its global form
        return stream.to_global(rows, length)
    return join(rows, dim, length, state.transition)


def _pieces(module: Lowered, x: torch.Tensor, weight: torch.Tensor) -> int:
    """Into how many pieces the product of ``x`` is cut that is summed over the ranks."""
    state = module._tpplan
    stream = state.stream
    assert stream.pieces is not None
    if x.dim() < 2 or weight.dim() != 2:
        return 1
    if torch.compiler.is_compiling():
        return left_to_compiler(stream.pieces.symmetric)
    group = state.transition.group
    rows = x.numel() // max(x.size(-1), 1)
    sp = stream.sequence_parallel
    most = chunk(x.size(min(stream.dim, x.dim() - 2)), group.size) if sp else rows
    if most < 2 or not is_plain(module._tpplan_project):
        return 1
    outer = weight.size(1 if state.transposed else 0)
    # on the first rank; others may have fewer columns, and must cut alike
    inner = chunk(state.own.specs[0].shape[0 if state.transposed else 1], group.size)
    return stream.pieces.of("reduce_scatter" if sp else "all_reduce", rows, inner, outer, x.dtype)


def _in_pieces(
    module: Lowered,
    x: torch.Tensor,
    weight: torch.Tensor,
    biases: Sequence[torch.Tensor],
    pieces: int,
) -> torch.Tensor:
    """``reduced``, of the product of ``x``."""
    state = module._tpplan
    stream, device = state.stream, x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    if not stream.sequence_parallel:
        out = product_reduced(
            x, Projecting(weight, None, state.transposed), state.transition, pieces
        )
        for bias in biases:
            out = out + bias.to(out.dtype)
        return out
    dim = min(stream.dim, x.dim() - 2)
    by = Projecting(weight, biases[0] if biases else None, state.transposed)
    out = product_scattered(x, by, dim, state.transition, pieces)
    return _answered(state, out, dim, x.size(dim))
