"""``replicate``: every rank has the whole module, and the plan says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Replicate

from tpplan.compiled import ModulePlan
from tpplan.roles.sequence import Apart
from tpplan.styles.style import Roles, Style

if TYPE_CHECKING:
    from tpplan.observe.trace import Call
    from tpplan.planner.flow import Walk


class Whole(Style):
    """Anything; outside the stack it is given the whole of the stream."""

    name = "replicate"
    apart = probed = True
    bare = Replicate()
    hf = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")

    def enter(self, walk: Walk, call: Call, given: int | None) -> None:
        """Outside the stack it computes with all of the stream."""
        if walk.element_of(call) is None and given in walk.stream and given not in walk.region:
            walk.apart.add(call.index)

    def roles(self, plan: ModulePlan, module: nn.Module, fused: type[nn.Module] | None) -> Roles:
        """Outside the stack it goes to the whole of the stream and back."""
        inner, _ = super().roles(plan, module, fused)
        return ([Apart] if plan.element is None else []) + inner, None


REPLICATE = Whole()
