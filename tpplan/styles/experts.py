"""``experts``: the stacked experts of a mixture, of each of which every rank has inner columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from tpplan.compiled import ModulePlan
from tpplan.language import Rule
from tpplan.roles import dispatch, experts
from tpplan.styles.style import Misfits, Roles, Style

if TYPE_CHECKING:
    from tpplan.observe.trace import Call
    from tpplan.planner.sizes import Sizes
    from tpplan.planner.walk import Walk


class Experts(Style):
    """A part of each expert on every rank; the block around them is reduced once."""

    name = "experts"
    stacked = True

    def complaint(self, module: nn.Module, tp: int) -> str | None:
        """It must hold the weights of all experts in one tensor."""
        if any(p is not None and p.dim() >= 3 for p in module._parameters.values()):
            return None
        return f"{type(module).__name__} holds no parameter (experts, rows, columns)"

    def keeps_whole(self, options: Mapping[str, object]) -> bool:
        """As the plan says."""
        return options.get("shard") == "experts"

    def closes(self, options: Mapping[str, object]) -> bool:
        """As the plan says."""
        return options.get("reduce") == "here"

    def ways(self) -> Mapping[str, Mapping[str, object]]:
        """Columns of all of them, or some of them."""
        return {word: {"shard": word} for word in ("inner", "experts")}

    def lay_out(self, sizes: Sizes, path: str, rule: Rule, misfits: Misfits) -> None:
        """By what the module computes."""
        sizes.share_experts(path, rule, misfits)

    def leave(self, walk: Walk, call: Call) -> None:
        """Each rank has a part of the sum."""
        walk.gives_parts(call)

    def roles(self, plan: ModulePlan, module: nn.Module, fused: type[nn.Module] | None) -> Roles:
        """Its own forward, on a part of each expert, or for the experts of a rank."""
        if plan.dispatched:
            return [dispatch.Dispatched], None
        whole = self.keeps_whole(plan.options)
        return [experts.WholeExperts if whole else experts.Experts], None

    def reasons(self, plan: ModulePlan) -> tuple[str, str]:
        """The block around it issues them."""
        return "parts of all experts, summed", "gradient of what the experts give"


EXPERTS = Experts()
