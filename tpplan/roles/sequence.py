"""Modules outside the stack that the stream passes through, and what modules are given of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan import compat
from tpplan.comm import chunk, copy_in, join, split
from tpplan.places import Argument, at, taken, with_at
from tpplan.roles.lowered import Lowered
from tpplan.roles.members import outermost


def replaced(
    argument: Argument, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with ``value`` in the place of one that was given."""
    if argument.place:
        around = Argument(argument.name, argument.index)
        value = with_at(taken(around, args, kwargs), argument.place, value)
    if argument.name in kwargs:
        return args, {**kwargs, argument.name: value}
    assert argument.index is not None
    return (*args[: argument.index], value, *args[argument.index + 1 :]), kwargs


def require_sequence(x: torch.Tensor, dims: int, path: str) -> None:
    """Refuse a tensor of fewer dimensions than a batch of sequences has."""
    if x.dim() < dims:
        raise ValueError(
            f"{path or 'the model'}: sequence parallelism needs a batch of sequences, not a tensor "
            f"of shape {tuple(x.shape)}; add the missing dimension, or turn sequence_parallel off"
        )


def require_graph(path: str) -> None:
    """Refuse to run without a graph where another rank may still run one.

    Graphs are made for the sizes of what a rank has. Ranks may reach the limit on graphs at
    different lengths, and a graph has its collectives in another order.
    """
    if not torch.compiler.is_compiling() and compat.only_old_graphs():
        raise RuntimeError(
            f"{path or 'the model'}: torch.compile would run it without a graph from here on, as "
            "it has made as many as it may, and other ranks may not: they would wait for each "
            "other; set torch._dynamo.config.recompile_limit higher, or pad to fewer lengths"
        )


_FIRST = Argument("input", 0)


class Apart(Lowered):
    """A replicated module outside the stack: given the sharded stream, it works on all of it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        argument = state.plan.stream or _FIRST
        given = taken(argument, args, kwargs)
        if isinstance(given, DTensor) and state.length is None:
            sharded = state.stream.is_sharded(given) and given.dim() > state.stream.dim + 1
            whole = state.stream.whole(given, state.transition) if sharded else None
            given = given.full_tensor() if whole is None else whole
            args, kwargs = replaced(argument, given, args, kwargs)
        return super().forward(*args, **kwargs)


class OnDetour(Apart):
    """A replicated module in the stack that needs the whole sequence: gathers it, gives rows.

    Every rank computes the same, so no gradient of its own is a part, and none is summed.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        length, plan = state.length, state.plan.detour
        if length is None or plan is None or not state.stream.sequence_parallel:
            return super().forward(*args, **kwargs)
        dim = state.stream.dim
        rows = chunk(length, state.transition.group.size)
        for argument in plan.arguments:
            given = taken(argument, args, kwargs)
            if isinstance(given, torch.Tensor) and given.dim() > dim and given.size(dim) == rows:
                whole = join(given, dim, length, state.transition)
                args, kwargs = replaced(argument, whole, args, kwargs)
        out = super().forward(*args, **kwargs)
        for place in plan.outputs:
            out = with_at(out, place, split(at(out, place), dim, state.transition))
        return out


class Spreading(Lowered):
    """Has values for all rows of the sequence, whole on every rank, which meet a rank's rows.

    Of their gradient each rank has a part: it is summed.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        plan = state.plan.spread
        if plan is None or state.length is None or not state.stream.sequence_parallel:
            return super().forward(*args, **kwargs)
        for argument in plan.arguments:
            given = taken(argument, args, kwargs)
            if isinstance(given, torch.Tensor):
                copy = copy_in(given, state.transition)
                args, kwargs = replaced(argument, copy, args, kwargs)
        out = super().forward(*args, **kwargs)
        for place in plan.outputs:
            out = with_at(out, place, copy_in(at(out, place), state.transition))
        return out


class SequenceParallel(Lowered):
    """Runs on this rank's rows of the sequence (norms, dropout, position embeddings)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        stream = state.stream
        if not stream.sequence_parallel or state.length is not None:
            return super().forward(*args, **kwargs)
        if stream.shared is None:
            return outermost(self, self._tpplan_rows, args, kwargs)
        return self._tpplan_rows(*args, **kwargs)

    def _tpplan_rows(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        stream = state.stream
        argument = state.plan.stream or _FIRST
        given = taken(argument, args, kwargs)
        sharded = isinstance(given, DTensor)
        floating = sharded or given.is_floating_point()
        # ids of positions are of shape (sequence,) or (batch, sequence)
        dim = stream.dim if floating else given.dim() - 1
        length = given.size(dim)
        local = stream.to_local(given) if sharded else split(given, dim, state.transition)
        args, kwargs = replaced(argument, local, args, kwargs)
        out = super().forward(*args, **kwargs)
        if sharded or state.inside:
            return stream.to_global(out, length, dim)
        return join(out, dim, length, state.transition)


class SequenceEmbedding(Lowered, nn.Embedding):
    """The look-up inside an embedding of positions: of this rank's rows of the ids."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        stream = state.stream
        (weight,) = self._locals()
        if not stream.sequence_parallel or state.length is not None:
            return self._tpplan_widen(F.embedding(input, weight, self.padding_idx))
        dim, length = input.dim() - 1, input.size(-1)
        rows = F.embedding(split(input, dim, state.transition), weight, self.padding_idx)
        own = self._tpplan_widen(rows)
        if state.inside:
            return stream.to_global(own, length, dim)
        return join(own, dim, length, state.transition)
