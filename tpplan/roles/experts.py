"""The experts of a mixture: each rank has a part of every one of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tpplan import compat
from tpplan.comm import Site, divide_gradient
from tpplan.comm.agreement import require_same_routing
from tpplan.kernels import experts
from tpplan.places import Kept, given_at, with_at
from tpplan.roles.kept import divide_kept
from tpplan.roles.lowered import Lowered
from tpplan.roles.summing import Summing


class Escaping(Lowered):
    """Gives out what is made in a block of experts and whole on every rank.

    Gradients in a block are parts, added up over the ranks; of this each rank sends the same.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made, state = super().forward(*args, **kwargs), self._tpplan
        for place in state.plan.escaping:
            if place and isinstance(place[0], Kept):
                owner = self.get_submodule(place[0].path)
                divide_kept(owner, place[0].name, state.transition.group.size)
                continue
            found = given_at(made, place)
            if found is not None:
                made = with_at(made, place, divide_gradient(found, state.transition.group.size))
        return made


class Experts(Summing):
    """Y_i of Y = sum_i f(X, A_i): the module's own forward on this rank's inner columns.

    The block around it has the sum, unless it is reduced here. Where only sizes are known it is
    one op.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._tpplan_summed(self._tpplan_made(*args, **kwargs), args, kwargs)

    def _tpplan_made(self, *args: Any, **kwargs: Any) -> Any:
        """Its part of the sum."""
        if not torch.compiler.is_compiling() and compat.fakes_are_made():
            return experts.of_sizes((args, kwargs), list(self._locals()), self._tpplan_among())
        self._tpplan_require_same((args, kwargs))
        narrow = vars(self).get("_tpplan_narrow")
        if narrow is not None:  # in a proof
            return narrow(self._tpplan_part, (args, kwargs))
        return self._tpplan_part(*args, **kwargs)

    def _tpplan_among(self) -> int:
        return 1

    def _tpplan_part(self, *args: Any, **kwargs: Any) -> Any:
        held = experts.held_in(self._locals())
        if held is not None and self._tpplan.transition.group.rank:
            # what no parameter is in is whole on every rank, and added once
            args, kwargs = experts.of_held((args, kwargs), held)
        return super(Summing, self).forward(*args, **kwargs)

    def _tpplan_require_same(self, given: Any) -> None:
        """Compare, at some calls, which experts the ranks chose."""
        state = self._tpplan
        if torch.compiler.is_compiling() or state.alone or compat.only_sizes_count():
            return
        chosen = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
        chosen = [t for t in chosen if not t.is_floating_point()]
        if not chosen or not state.schedule.due((self.training, torch.is_grad_enabled())):
            return
        site = Site(state.plan.path, "experts that the ranks chose, compared", phase="startup")
        group = state.transition.group
        require_same_routing(chosen, group, site, state.stream.mesh.device_type)


class WholeExperts(Experts):
    """Y_i of Y = sum_i f_i(X): the experts of this rank, for the tokens that chose them.

    All ranks have all tokens, so that none is sent; the block around it has the sum.
    """

    def _tpplan_among(self) -> int:
        return int(self._tpplan.transition.group.size)

    def _tpplan_part(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        if state.stream.shared is None and state.alone:
            return super()._tpplan_part(*args, **kwargs)
        count = int(self._locals()[0].shape[0])
        first = count * state.transition.group.rank
        return experts.of_own(super()._tpplan_part, (args, kwargs), first, count)
