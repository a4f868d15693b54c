"""``replicate``: every rank has the whole module, and the plan says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from tpplan.compiled import ModulePlan
from tpplan.roles.linear import WholeLinear
from tpplan.roles.sequence import Apart, OnDetour
from tpplan.styles.style import Roles, Style, runs_as

if TYPE_CHECKING:
    from tpplan.observe.trace import Call
    from tpplan.planner.walk import Walk


class Whole(Style):
    """Anything; outside the stack it is given the whole of the stream, inside if the plan says so.

    What is inside of it is replicated with it.
    """

    name = "replicate"
    apart = probed = True
    bare = frozenset()
    hf = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")

    def enter(self, walk: Walk, call: Call, given: int | None) -> None:
        """Outside the stack it computes with all of the stream, inside where the plan says so."""
        anywhere = call.path in walk.gathering or walk.element_of(call) is None
        if anywhere and given in walk.stream and given not in walk.region:
            walk.takes_whole(call)

    def leave(self, walk: Walk, call: Call) -> None:
        """The stream, where it was gathered for it."""
        walk.gives_rows(call)

    def multiplies(self, plan: ModulePlan, module: nn.Module) -> bool:
        """A Linear whose weight no other code reads."""
        return runs_as(module, nn.Linear) and not plan.read and plan.summed is None

    def roles(self, plan: ModulePlan, module: nn.Module, fused: type[nn.Module] | None) -> Roles:
        """On the whole of the stream it goes there and back."""
        inner, _ = super().roles(plan, module, fused)
        if self.multiplies(plan, module):
            inner = [WholeLinear]
        if plan.detour is not None:
            return [OnDetour, *inner], None
        return ([Apart] if plan.element is None else []) + inner, None


REPLICATE = Whole()
