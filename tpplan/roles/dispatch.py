"""Experts of one rank of ``ep``: what the tokens of all of them have chosen is sent there.

A token is sent once for each expert it chose, with its factor, to the ranks that hold that expert;
what the module's own forward makes of it comes back, and is added up where the token is. How many
rows go where is exchanged first, so that none is dropped and none is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tpplan import compat
from tpplan.comm import Transition, copy_in, reduce_out
from tpplan.comm.collectives import all_to_all
from tpplan.comm.exchange import exchange
from tpplan.kernels import experts
from tpplan.roles.experts import Experts

WAYS = (
    "tokens, to their experts",
    "gradients of tokens, from their experts",
    "what experts made of tokens, back",
    "gradients of what experts made of tokens",
)
"""What is sent: forward there, and its gradient; forward back, and its gradient."""
_COMPILING = "which tokens go where hangs on their numbers, of which a graph has none"


class Dispatched(Experts):
    """Y = sum over the chosen experts, wherever they are; with tp a rank's part of that sum.

    The gradients of its parameters come from the tokens of all ranks of ep, and are divided by
    how many these are: a mean, as data parallelism makes it of all other gradients.
    """

    def _tpplan_made(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not compat.fakes_are_made():
            self._tpplan_require_same((args, kwargs))
        narrow = vars(self).get("_tpplan_narrow")
        if narrow is not None:  # in a proof
            return narrow(self._tpplan_part, (args, kwargs))
        return self._tpplan_part(*args, **kwargs)

    def _tpplan_part(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        assert state.dispatch is not None
        every, held = int(state.own.specs[0].shape[0]), int(self._locals()[0].shape[0])
        per = every // state.dispatch[0].group.size
        # of the experts of a rank of ep, those of its tensor-parallel rank
        tp = state.own.group
        first = held * tp.rank if held < per else 0
        called_alone = held_by_several(state) and state.stream.shared is None and state.alone
        given = args, kwargs
        if called_alone:  # all tensor-parallel ranks have the same, and want the whole
            given = tree_map_only(Tensor, lambda t: _entered(t, state.transition), given)
        made = dispatched(self._tpplan_rows, given, (per, first, held), state.dispatch)
        return reduce_out(made, state.transition) if called_alone else made

    def _tpplan_rows(self, *args: Any, **kwargs: Any) -> Any:
        """What the experts of this rank make of rows that chose them."""
        if compat.fakes_are_made():
            return experts.of_sizes((args, kwargs), list(self._locals()))
        return self._tpplan_on_locals(*args, **kwargs)


def held_by_several(state: Any) -> bool:
    """Whether tensor-parallel ranks share the experts of a rank of ep."""
    return bool(state.dispatch[0].group.name != state.own.group.name)


def _entered(t: Tensor, transition: Transition) -> Tensor:
    return copy_in(t, transition) if t.is_floating_point() else t


class Routes(NamedTuple):
    """Which rows go where.

    Attributes:
        rows, slots: of each row that is sent, the token and which of its choices it is for.
        expert: of each row that arrives, which of this rank's experts it is for.
        sent, received: how many go to each rank, and come from it.
    """

    rows: Tensor
    slots: Tensor
    expert: Tensor
    sent: list[int]
    received: list[int]

    @staticmethod
    def of(chosen: Tensor, own: tuple[int, int, int], transition: Transition) -> Routes:
        """Those of the choices of all ranks; one small all-to-all."""
        (per, first, held), group = own, transition.group
        within = chosen % per - first
        taken = (within >= 0) & (within < held) & (chosen < per * group.size)
        rows, slots = torch.where(taken)
        # by rank, and then by expert
        number = (chosen // per * held + within)[rows, slots]
        order = number.argsort(stable=True)
        due = number.bincount(minlength=held * group.size)
        coming = _counts(due, held, transition)
        sums = torch.stack([due, coming]).view(2, group.size, held).sum(2)
        sent, received = sums.tolist()
        here = torch.arange(held, device=chosen.device).repeat(group.size)
        return Routes(rows[order], slots[order], here.repeat_interleave(coming), sent, received)

    @staticmethod
    def of_sizes(chosen: Tensor, own: tuple[int, int, int], transition: Transition) -> Routes:
        """Where only sizes are known: as many rows for each expert."""
        (per, _, held), size = own, transition.group.size
        count = -(-chosen.numel() * held // per)
        rows = chosen.new_empty(count, dtype=torch.long)
        coming = _counts(chosen.new_empty(held * size, dtype=torch.long), held, transition)
        each = [(count + size - 1 - rank) // size for rank in range(size)]
        return Routes(rows, rows, coming.new_empty(count), each, each)


def _counts(due: Tensor, held: int, transition: Transition) -> Tensor:
    """How many rows come from each rank for each expert, of those that go to each."""
    group, each = transition.group, [held] * transition.group.size
    why = "how many tokens chose each expert"
    site = replace(transition.forward, reason=why, routed=False)
    return all_to_all(due, each, each, group, site)


def _dispatched(
    forward: Callable[..., Tensor],
    given: Any,
    own: tuple[int, int, int],
    ways: tuple[Transition, Transition],
) -> Tensor:
    """What the experts that tokens chose make of these, wherever they are; differentiable.

    Args:
        forward: of a module with this rank's experts; it is given rows that chose one of them.
        given: the arguments: activations (tokens, width), and of the same shape (tokens, chosen)
            whole numbers that choose experts, and their factors.
        own: how many experts a rank of ep has; the first of these that is this rank's, and how
            many are.
        ways: from a token's rank to its expert's, and back.

    Raises:
        ValueError: where the arguments are others.
    """
    x, chosen, factors = experts.chosen_in(given)
    routes = Routes.of_sizes if compat.fakes_are_made() else Routes.of
    way, (there, back) = routes(chosen, own, ways[0]), ways
    sent = x[way.rows], factors[way.rows, way.slots]
    rows, factor = exchange(sent, way.sent, way.received, there)
    expert, arrived = way.expert, rows.shape[0]
    if not arrived:  # one all the same: all ranks have the same graph, and every expert a gradient
        rows, factor = (torch.cat([t, t.new_zeros(1, *t.shape[1:])]) for t in (rows, factor))
        expert = expert.new_zeros(1)
    place = {id(x): rows, id(chosen): expert[:, None], id(factors): factor[:, None]}
    args, kwargs = tree_map_only(Tensor, lambda t: place[id(t)], given)
    made = forward(*args, **kwargs)[:arrived]
    (given_back,) = exchange((made,), way.received, way.sent, back)
    return torch.zeros_like(x).index_add(0, way.rows, given_back.to(x.dtype))


dispatched: Callable[..., Tensor] = torch.compiler.disable(_dispatched, reason=_COMPILING)
