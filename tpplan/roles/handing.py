"""Modules that give out, and may be given again, what each rank has a part of."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_map_only

from tpplan.comm.placements import is_cut
from tpplan.comm.sharded import Parted
from tpplan.places import given_at, with_at
from tpplan.roles.lowered import Lowered


class Handing(Lowered):
    """Gives its part of what leaves the model as a sharded tensor, and takes its part of such.

    Keys and values of a rank's heads, for one: code outside of it computes with them as if they
    were whole, or keeps them for the next step without anything being sent.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        dims = dict.fromkeys(dim for _, dim in state.plan.handed)

        def own(x: Parted) -> Any:
            cut = next((dim for dim in dims if is_cut(x, dim)), None)
            return x if cut is None else state.stream.part_of(x, cut)

        args, kwargs = tree_map_only(Parted, own, (args, kwargs))
        made = super().forward(*args, **kwargs)
        for place, dim in state.plan.handed:
            part = given_at(made, place)
            if part is not None:
                made = with_at(made, place, state.stream.of_parts(part, dim))
        return made
