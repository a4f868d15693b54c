"""What the walk over a trace notes of single ops that positions of the stream meet in."""

from __future__ import annotations

from collections.abc import Mapping, Set

from tpplan.compiled import Boundary, Element
from tpplan.observe.positions import acts_on_each
from tpplan.observe.trace import Call, Op, Trace
from tpplan.planner.flow import Flow
from tpplan.planner.noise import Noise
from tpplan.planner.views import KEEPING, VIEWS
from tpplan.styles import NONE, Style


class Notes:
    """Of the walk, whose attributes they are, what it has found when it comes to an op."""

    trace: Trace
    flow: Flow
    noise: Noise
    dim: int
    styles: Mapping[str, Style]
    boundaries: Mapping[str, tuple[Boundary, ...]]
    elements: Mapping[str, Element]
    columns: Set[str]
    local: Set[str]
    stream: set[int]
    flat: set[int]
    maker: dict[int, str]

    def note_positions(self, op: Op, around: list[Call]) -> None:
        """An op on the stream in an element must act on each position by itself."""
        if any(c.path in self.local or c.path in self.boundaries for c in around):
            return
        name = op.name.removeprefix("aten.").split(".")[0]
        streams = [n for n in op.inputs if n in self.stream]
        widths = {self.trace.shapes[n][-1:] for n in (*streams, *op.outputs)}
        if name in VIEWS and len(widths) == 1:
            return  # tokens without their batch, and back
        rows = {self.trace.shapes[n][: self.dim + 1] for n in streams}
        kept = {self.trace.shapes[n][: self.dim + 1] for n in op.outputs} == rows
        if kept and (op.pointwise or name in KEEPING or name in VIEWS):
            return
        element = next(c for c in around if c.path in self.elements)
        number = element.given_as(self.elements[element.path].argument.name)
        shape = () if number is None else self.trace.shapes[number][: self.dim + 1]
        if not acts_on_each(op, self.trace, self.stream, shape, self.dim):
            self.flow.along.setdefault(around[0].path, name)

    def note_rows(self, op: Op, around: list[Call]) -> None:
        """Among tokens without their batch, whose order is a rank's own, each is on its own."""
        name = op.name.removeprefix("aten.").split(".")[0]
        if any(c.path in self.columns or c.path in self.local for c in around):
            return
        flat = [
            n
            for n in op.inputs
            if n in self.flat and not (op.pointwise or name in KEEPING or name in VIEWS)
        ]
        if flat and not self.styles.get(around[0].path, NONE).sums:
            self.flow.flattened.append(around[0].path)
        if any(n in self.flat for n in op.inputs):
            self.flat.update(op.outputs)

    def note_mixture(self, op: Op, data: list[int], around: list[Call]) -> None:
        """The stream meets a tensor of all positions in code of no module that has a rule."""
        if any(c.path in self.styles for c in around):
            return
        for number in data:
            whole = number in self.trace.floating - self.stream - self.noise.whole
            if whole and self.trace.shapes[number]:
                self.flow.mixed.setdefault(around[0].path, self.maker.get(number, ""))
                for given in data:
                    path = self.maker.get(given, "") if given in self.stream else ""
                    apart = not any(path.startswith(f"{e}.") for e in self.elements)
                    if self.styles.get(path, NONE).rows and apart:
                        self.flow.giving.setdefault(around[0].path, path)
