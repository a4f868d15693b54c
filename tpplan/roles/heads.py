"""What is given for all heads, of which a rank computes with those that are its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan.comm import Site, Transition, copy_in, split
from tpplan.comm.stream import version_of
from tpplan.compiled import ModulePlan
from tpplan.places import at, taken, tensors_in, with_at
from tpplan.roles.lowered import Lowered, State
from tpplan.roles.sequence import replaced


def own_part(x: torch.Tensor, dim: int | None, heads: int, state: State) -> torch.Tensor:
    """This rank's heads of ``x``, along ``dim``; all of it where it holds one for all of them.

    Where gradients are asked of it, they are what all heads make of them, on every rank: parts are
    put together, what is for all heads is summed. Modules that are given the same tensor in one
    forward share its part, and what that sends.
    """
    group = state.transition.group
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x if dim is None else heads_of(x, dim, heads, group.rank, group.size)
    shared = None if torch.compiler.is_compiling() else state.stream.shared
    key = own_part, id(x), dim, heads
    if shared is not None and key in shared:
        given, version, own, changed = shared[key]
        if given is x and version == version_of(x) and changed == version_of(own):
            return own  # type: ignore[no-any-return]
    site = Site(state.plan.path, "gradient of what is given for all heads")
    transition = Transition(group, site, site)
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    if dim is None or x.size(dim) == 1:
        own = copy_in(whole, transition)
    else:
        own = split(whole.unflatten(dim, (-1, heads)), dim + 1, transition).flatten(dim, dim + 1)
    if shared is not None:
        shared[key] = x, version_of(x), own, version_of(own)
    return own


class HeadInputs(Lowered):
    """Takes its own heads of the arguments that hold something for every head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        cut = functools.partial(own_part, heads=state.plan.heads, state=state)
        args, kwargs = own_heads(state.plan, cut, args, kwargs)
        return super().forward(*args, **kwargs)


def own_heads(
    plan: ModulePlan,
    cut: Callable[[torch.Tensor, int], torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with ``plan.head_inputs``, or what is in them, ``cut`` to a rank's heads."""
    for argument, along in plan.head_inputs:
        value = taken(argument, args, kwargs)
        for place in [place for place, _ in tensors_in(value) if place is not None]:
            x = at(value, place)
            dim = along % x.dim()
            if x.size(dim) != 1 and x.size(dim) % plan.heads:
                raise ValueError(
                    f"{plan.path}: '{argument.name}' has {x.size(dim)} entries along dimension "
                    f"{dim}, not a multiple of {plan.heads} heads"
                )
            value = with_at(value, place, cut(x, dim))
        if value is not None:
            args, kwargs = replaced(argument, value, args, kwargs)
    return args, kwargs


def heads_of(x: torch.Tensor, dim: int, heads: int, rank: int, tp: int) -> torch.Tensor:
    """A rank's heads of ``x``; all of it where it holds one for all of them.

    A dimension of batch·heads holds the heads of one sample after the other. Of fewer heads than
    ranks each has one.
    """
    if x.size(dim) == 1:
        return x
    grouped: torch.Tensor = x.unflatten(dim, (-1, heads))
    each = max(1, heads // tp)
    return grouped.narrow(dim + 1, rank * heads // tp, each).flatten(dim, dim + 1)


class OwnBuffers(Lowered):
    """Computes with its own part of buffers that hold something for every head or column.

    They stay whole, as they are saved and made anew.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, table = self._tpplan, self._buffers
        if state.stream.shared is None and state.alone:
            return super().forward(*args, **kwargs)
        rank, cut = state.transition.group.rank, state.plan.buffers
        whole = {name: self.get_buffer(name) for name in cut}
        for name, rows in cut.items():
            table[name] = rows.part(whole[name], rank)
        try:
            return super().forward(*args, **kwargs)
        finally:
            table.update(whole)


def keep_own(
    module: nn.Module, name: str, dim: int, heads: int, rank: int, tp: int
) -> Callable[[], None]:
    """Leave of a buffer, or of a tensor that is an attribute, a rank's heads; returns the undoing.

    A cache of keys and values is written to by code that knows of a rank's heads only.
    """
    table = module._buffers if name in module._buffers else vars(module)
    whole = table[name]
    assert isinstance(whole, torch.Tensor)
    table[name] = heads_of(whole, dim, heads, rank, tp).clone()
    return lambda: table.__setitem__(name, whole)
