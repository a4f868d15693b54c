"""What torch.compile fused with the products around it, for whoever compiles a sharded model."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Group
from rich.text import Text

from tpplan.render.console import columned, plain
from tpplan.render.text import site
from tpplan.simulate.graphs import options_reading
from tpplan.simulate.steps import Collective


class FusionReport:
    """Has inductor fuse products with what is sent, and says which it did.

    ::

        report = tpplan.FusionReport()
        model = torch.compile(model, options=report.options)
        model(ids, labels=ids).loss.backward()
        print(report)

    Its pass passes over, without a word, what has not the forms that it knows, and every group for
    which symmetric memory is not enabled (``overlap: symmetric_memory`` does, on GPUs).

    Attributes:
        options: for ``torch.compile(..., options=...)``. Graphs are made anew, none is taken from
            inductor's cache: those could not be read.
        graphs: the collectives of each graph in the order in which they were compiled, on this
            rank; ``fused`` says which run in pieces beside their products, ``reason`` names those.
    """

    def __init__(self) -> None:
        self.graphs: list[list[Collective]] = []
        self.options: dict[str, Any] = options_reading(self.graphs.append)

    @property
    def collectives(self) -> list[Collective]:
        """Of all graphs."""
        return [collective for graph in self.graphs for collective in graph]

    def __str__(self) -> str:
        return plain(self.layout())

    def layout(self) -> Group:
        """For a rich console: identical layers folded into one line."""
        found = self.collectives
        could = [c for c in found if c.kind in ("all_gather", "reduce_scatter")]
        fused = sum(c.fused for c in could)
        graphs = "graph" if len(self.graphs) == 1 else "graphs"
        summary = Text(
            f"{fused} of {len(could)} all-gathers and reduce-scatters in {len(self.graphs)} "
            f"compiled {graphs} are fused with products.",
            style="bold",
        )
        if not found:
            return Group(summary)
        rows = columned("", "phase", "module", "×", "collective", "shape", "each", "beside")
        for key, count in Counter(map(_row, found)).items():
            phase, module, *rest = key
            rows.add_row(phase, module, str(count), *rest)
        return Group(summary, "", rows)


def _row(c: Collective) -> tuple[str, ...]:
    *row, beside = site(c)
    return *row, beside or "nothing of its own"
