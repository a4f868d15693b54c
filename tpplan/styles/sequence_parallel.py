"""``sequence_parallel``: runs on a rank's rows of the stream; replicated without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.styles.style import Style

if TYPE_CHECKING:
    from tpplan.observe.trace import Call
    from tpplan.planner.flow import Walk


class SequenceParallel(Style):
    """What works on each position by itself: norms, dropout, embeddings of positions."""

    name = "sequence_parallel"
    rows = probed = True
    hf = ("sequence_parallel",)

    def leave(self, walk: Walk, call: Call) -> None:
        """The stream."""
        walk.stream.update(n for n in call.outputs if n not in walk.region)


SEQUENCE_PARALLEL = SequenceParallel()
