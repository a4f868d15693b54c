"""How tensors are laid out as they flow through the traced model, and what follows from it.

A tensor is *in a region* from where the stream enters a sharded region until a row-parallel layer
reduces it: there each rank works on its own columns. It is *of the stream* outside, where under
sequence parallelism each rank has its own rows. A replicated parameter that meets either sees only
a part of the work, so its gradient must be summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpplan.planner.compiled import Boundary, Element
from tpplan.planner.trace import Call, Op, Trace


@dataclass
class Flow:
    """What was found.

    Attributes:
        in_region, on_stream, elsewhere: parameter names by what they met.
        unsharded: row-parallel layers whose input is whole.
        twice: column-parallel layers whose input is already sharded.
        unreduced: elements, or the model (""), that sharded activations leave.
        mixed: outside the elements, modules (by path) that combine the stream with a whole
            tensor, and the path of the module that made that tensor.
    """

    in_region: set[str] = field(default_factory=set)
    on_stream: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    unsharded: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    unreduced: list[str] = field(default_factory=list)
    mixed: dict[str, str] = field(default_factory=dict)


class _Walk:
    def __init__(
        self,
        trace: Trace,
        styles: Mapping[str, str],
        boundaries: Mapping[str, Boundary],
        elements: Mapping[str, Element],
    ) -> None:
        self.trace, self.styles = trace, styles
        self.boundaries, self.elements = boundaries, elements
        self.flow = Flow()
        self.region: set[int] = set()
        self.stream: set[int] = set()
        self.weights: dict[int, frozenset[str]] = {
            number: frozenset([name]) for number, name in trace.parameters.items()
        }
        self.maker: dict[int, str] = {}
        self.entry = {
            call.index: self._argument(call, boundaries[call.path].argument.name)
            for call in trace.calls
            if call.path in boundaries
        }

    def _argument(self, call: Call, name: str) -> int | None:
        return next((n for n, a in call.arguments.items() if a.name == name), None)

    def run(self) -> Flow:
        starts: dict[int, list[Call]] = {}
        ends: dict[int, list[Call]] = {}
        for call in self.trace.calls:
            starts.setdefault(call.first_op, []).append(call)
            ends.setdefault(call.last_op, []).append(call)
        for index in range(len(self.trace.ops) + 1):
            for call in sorted(ends.get(index, ()), key=lambda c: -c.index):
                if call.first_op < index:
                    self.leave(call)
            for call in starts.get(index, ()):
                self.enter(call)
                if call.last_op == index:
                    self.leave(call)
            if index < len(self.trace.ops):
                self.step(self.trace.ops[index])
        return self.flow

    def enter(self, call: Call) -> None:
        style = self.styles.get(call.path)
        given = next((n for n in call.arguments if n in self.trace.floating), None)
        if style == "rowwise" and given is not None and given not in self.region:
            self.flow.unsharded.append(call.path)
        if style == "colwise" and given in self.region:
            self.flow.twice.append(call.path)
        if call.path in self.elements:
            number = self._argument(call, self.elements[call.path].argument.name)
            if number is not None:
                self.stream.add(number)

    def leave(self, call: Call) -> None:
        style = self.styles.get(call.path)
        if style == "colwise":
            self.region.update(call.outputs)
        elif style in ("rowwise", "vocab"):
            self.region.difference_update(call.outputs)
            self.stream.difference_update(call.outputs)
        if style == "rowwise" or (style == "vocab" and call.path not in self.boundaries):
            self.stream.update(call.outputs)
        if style == "sequence_parallel":
            self.stream.update(n for n in call.outputs if n not in self.region)
        if call.path in self.elements and call.outputs:
            if call.outputs[0] in self.region:
                self.flow.unreduced.append(call.path)
            self.stream.add(call.outputs[0])
        if call.parent is None and call.outputs and call.outputs[0] in self.region:
            self.flow.unreduced.append("")
        for number in call.outputs:
            self.maker.setdefault(number, call.path)

    def step(self, op: Op) -> None:
        around = list(self.trace.ancestors(op.call))
        entries = {self.entry[c.index] for c in around if c.index in self.entry}
        region = any(n in self.region or n in entries for n in op.inputs)
        stream = not region and any(n in self.stream for n in op.inputs)
        weights = frozenset().union(*(self.weights.get(n, frozenset()) for n in op.inputs))
        data = [n for n in op.inputs if n not in self.weights]
        if weights and not data:
            for number in op.outputs:
                self.weights[number] = weights
            return
        if weights:
            met = self.flow.in_region if region else self.flow.on_stream if stream else None
            (self.flow.elsewhere if met is None else met).update(weights)
        if region:
            self.region.update(op.outputs)
        elif stream:
            self.stream.update(op.outputs)
            self.note_mixture(op, data, around)

    def note_mixture(self, op: Op, data: list[int], around: list[Call]) -> None:
        if any(c.path in self.elements or c.path in self.styles for c in around):
            return
        for number in data:
            whole = number in self.trace.floating and number not in self.stream
            if whole and self.trace.shapes[number]:
                self.flow.mixed.setdefault(around[0].path, self.maker.get(number, ""))


def follow(
    trace: Trace,
    styles: Mapping[str, str],
    boundaries: Mapping[str, Boundary],
    elements: Mapping[str, Element],
) -> Flow:
    """Follow every tensor of ``trace`` through the sharded regions and the stream."""
    return _Walk(trace, styles, boundaries, elements).run()
