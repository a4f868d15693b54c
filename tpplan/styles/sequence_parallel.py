"""``sequence_parallel``: runs on a rank's rows of the stream; replicated without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from tpplan.compiled import ModulePlan
from tpplan.roles import sequence
from tpplan.roles.sequence import SequenceEmbedding
from tpplan.styles.style import Roles, Style, adds_to_embedding

if TYPE_CHECKING:
    from tpplan.observe.trace import Call
    from tpplan.planner.walk import Walk


class SequenceParallel(Style):
    """What works on each position by itself: norms, dropout, embeddings of positions."""

    name = "sequence_parallel"
    rows = probed = True
    hf = ("sequence_parallel",)

    def enter(self, walk: Walk, call: Call, given: int | None) -> None:
        """Rows."""
        walk.takes_rows(call, given)

    def leave(self, walk: Walk, call: Call) -> None:
        """The stream."""
        walk.stream.update(n for n in call.outputs if n not in walk.region)

    def roles(self, plan: ModulePlan, module: nn.Module, fused: type[nn.Module] | None) -> Roles:
        """Its own code on a rank's rows."""
        if adds_to_embedding(module):
            return [], SequenceEmbedding
        inner, _ = super().roles(plan, module, fused)
        return [sequence.SequenceParallel, *inner], None


SEQUENCE_PARALLEL = SequenceParallel()
