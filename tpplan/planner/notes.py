"""What the walk over a trace notes of single ops that positions of the stream meet in."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Set

from tpplan.compiled import Boundary, Element, Spread
from tpplan.observe.positions import acts_on_each
from tpplan.observe.trace import Call, Op, Trace
from tpplan.places import Argument
from tpplan.planner.flow import Flow
from tpplan.planner.infer import nearest
from tpplan.planner.noise import LIKE, Noise
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
    spreads: Mapping[str, Spread]
    beside: set[int]
    beside_in: Mapping[int, Set[int | None]]
    apart: set[int]
    stream: set[int]
    region: set[int]
    weights: dict[int, frozenset[str]]
    trained: set[int]
    for_heads: Mapping[int, Set[int]]
    flat: set[int]
    maker: dict[int, str]

    @functools.cached_property
    def given(self) -> dict[int, frozenset[Argument]]:
        """Numbers that the model is given, and what is made of them alone."""
        found: dict[int, frozenset[Argument]] = {}
        for call in self.trace.calls:
            for number, arguments in {**call.nested, **call.arguments}.items():
                if call.parent is None and number in self.trace.floating:
                    found[number] = found.get(number, frozenset()) | {*arguments}
        return found

    def note_given(
        self, op: Op, data: Iterable[int], entered: Set[int], around: list[Call]
    ) -> None:
        """What of that meets what ranks share out, and what meets what is whole."""
        numbers = [n for n in data if n in self.given]
        if not numbers or op.name.startswith(LIKE):
            return
        own = (self.for_heads[c.index] for c in around)  # whose gradient is put together there
        known = entered, *own, self.region, self.stream, self.trained
        columns, rows, whole = self.flow.given
        mine = [n for n in numbers if not any(n in found for found in known)]
        whole.update(*(self.given[n] for n in numbers if n not in mine))
        arguments = frozenset[Argument]().union(*(self.given[n] for n in mine))
        stacked = any(c.path in self.elements for c in around)
        if not self.region.isdisjoint(op.outputs):
            columns |= arguments
        elif stacked and not self.stream.isdisjoint(op.outputs):
            rows |= arguments
        elif not self.trained.isdisjoint(op.outputs) or not self.stream.isdisjoint(op.outputs):
            whole |= arguments
        elif mine:
            made = self.trace.floating.intersection(op.outputs)
            self.given.update((n, self.given.get(n, frozenset()) | arguments) for n in made)

    def weights_of(self, numbers: Iterable[int]) -> frozenset[str]:
        """The parameters that tensors are made of which are made of nothing else."""
        return frozenset[str]().union(*(self.weights.get(n, frozenset()) for n in numbers))

    def on_weights(self, op: Op, weights: frozenset[str], region: bool, stream: bool) -> None:
        """An op on parameters alone, and constants."""
        for number in op.outputs:
            self.weights[number] = weights
        if region:  # columns of a table, which then meet what is whole (a mask)
            self.region.update(op.outputs)
        elif stream:  # embeddings of positions, scaled
            self.stream.update(op.outputs)

    def as_data(self, numbers: Iterable[int | None]) -> None:
        """Of what enters a region, or is the stream, the whole gradient comes back.

        So what is made of parameters alone (learned latents, queries) is an activation from there
        on, and these parameters have met what is whole.
        """
        for number in numbers:
            if number in self.weights:
                self.flow.elsewhere |= self.weights.pop(number)
                self.trained.add(number)

    def made_by(self, number: int, op: Op) -> str:
        """The module that made a tensor; of what code made, the sum that it came of."""
        if number in self.maker:
            return self.maker[number]
        sums = (c for c in self.trace.calls if self.styles.get(c.path, NONE).sums)
        ends = {n: call.path for call in sums for n in call.outputs}
        return next(iter(nearest(self.trace, [number], self.trace.ops.index(op), ends)), "")

    def made_of(self, number: int, op: Op, call: Call) -> str:
        """The parameter of a module's own that its code multiplied by last, to make a tensor."""
        pending = {number}
        for before in reversed(self.trace.ops[call.first_op : self.trace.ops.index(op)]):
            if pending.isdisjoint(before.outputs):
                continue
            for name in sorted(self.weights_of(before.inputs)):
                if name.rpartition(".")[0] == call.path and before.call == call.index:
                    return name if not before.pointwise else ""
            pending.update(before.inputs)
        return ""

    def origin(self, number: int, op: Op) -> str:
        """The module that gave what a tensor was made of, last."""
        index = self.trace.ops.index(op)
        return next(iter(nearest(self.trace, [number], index, self.maker)), "")

    def spread_over_rows(self, spreads: Mapping[str, Spread]) -> None:
        """What is known to be whole on every rank, and to meet its rows of the stream."""
        self.spreads, self.beside = spreads, set()
        self.beside_in = {
            call.index: {call.given_as(a.name) for a in spreads[call.path].arguments}
            for call in self.trace.calls
            if call.path in spreads
        }

    def spread_of(self, numbers: Iterable[int], around: Iterable[Call]) -> set[int]:
        """What is whole on every rank, and a part of its gradient comes back from its rows."""
        given = set[int | None]().union(*(self.beside_in.get(c.index, ()) for c in around))
        return {n for n in numbers if n in self.beside or n in given}

    def on_spread(self, op: Op, around: list[Call]) -> None:
        """An op on such values alone."""
        stacked = any(c.path in self.elements for c in around)
        if not stacked or any(c.index in self.apart for c in around):
            self.flow.twofold.append(around[0].path)
        self.beside.update(n for n in op.outputs if n in self.trace.floating)

    def note_entering(self, call: Call) -> None:
        """Such a value must not enter a region, where its gradient is put together as well."""
        around = list(self.trace.ancestors(call.parent))
        names = {a.name for b in self.boundaries.get(call.path, ()) for a in b.arguments}
        if self.spread_of((n for n in map(call.given_as, names) if n is not None), around):
            self.flow.twofold.append(call.path)

    def note_leaving(self, call: Call) -> None:
        """Nor an element; and what of a call's results is one from here on."""
        around = list(self.trace.ancestors(call.index))
        if call.path in self.elements and self.spread_of(call.outputs, around):
            self.flow.twofold.append(call.path)
        if any(c.path in self.elements for c in around[1:]) and call.path in self.spreads:
            places = self.spreads[call.path].outputs
            self.beside.update(n for n in map(call.output_at, places) if n is not None)

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
        number = element.number_of(self.elements[element.path].argument)
        shape = () if number is None else self.trace.shapes[number][: self.dim + 1]
        if not acts_on_each(op, self.trace, self.stream, shape, self.dim):
            self.flow.along.setdefault(around[0].path, name)
            if around[0].index == element.index:
                self.flow.inlined.append(element.path)

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

    def is_one_for_all(self, number: int, op: Op) -> bool:
        """Whether what an op takes with the stream is no number of its rows' own."""
        shape = self.trace.shapes[number]
        if not (shape and op.pointwise and op.outputs):
            return not shape
        made = self.trace.shapes[op.outputs[0]]
        along = len(shape) - len(made) + self.dim
        # what has lost the sequence, to a mean over it, every rank has all of; where it is one
        # dimension with others, it is the proof that tells
        noise = self.noise
        lost = noise.lengths.isdisjoint(made) and noise.tokens.isdisjoint(made[:1])
        return lost or not 0 <= along < len(shape) or shape[along] == 1

    def note_mixture(self, op: Op, data: list[int], around: list[Call]) -> None:
        """The stream meets all positions' gradient in code of no module that has a rule.

        Of what has none each rank takes its rows, for which nothing is sent.
        """
        if any(c.path in self.styles for c in around):
            return
        learned = (self.trained | self.weights.keys()) & self.trace.floating
        for number in data:
            whole = number in learned - self.stream - self.noise.whole
            if whole and not self.is_one_for_all(number, op):
                self.flow.mixed.setdefault(around[0].path, self.maker.get(number, ""))
                for given in data:
                    path = self.maker.get(given, "") if given in self.stream else ""
                    apart = not any(path.startswith(f"{e}.") for e in self.elements)
                    if self.styles.get(path, NONE).rows and apart:
                        self.flow.giving.setdefault(around[0].path, path)
