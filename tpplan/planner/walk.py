"""How tensors are laid out as they flow through the traced model, and what follows from it.

A tensor is *in a region* from where the stream enters a sharded region until a row-parallel layer
reduces it: there each rank works on its own columns, or on the whole of something whose gradient
is a part on each rank (what a replicated layer makes of what has entered). It is *of the stream*
outside, where under sequence parallelism each rank has its own rows. A replicated parameter that
meets either sees only a part of the work, so its gradient must be summed over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from tpplan.compiled import Boundary, Detour, Element, Spread
from tpplan.language import FrozenMap, Rule
from tpplan.observe.channels import drawn_by
from tpplan.observe.trace import Call, Op, Trace
from tpplan.planner.bare import BareRegion, partial_rows
from tpplan.planner.flow import Flow
from tpplan.planner.infer import gathering, sources, staying
from tpplan.planner.noise import Noise
from tpplan.planner.notes import Notes
from tpplan.styles import NONE, named


class Walk(Notes):
    """Follows every tensor of a trace; what each style's calls take and give, the style says.

    Args:
        columns: the column-parallel projections.
        multihead: torch's own attention: a whole region in one module.
        local: modules that were found to work on each position by itself.
        dim: the sequence dimension.
        cut: the parameters that are cut by rules of their own.
        bare: the modules that multiply by these.
        dropouts: modules that draw for their input, also where they drew nothing this time, and
            the functions of those that drop whole channels out.
        spreads: whole values that meet the rows of the stream; see ``spreads``.
    """

    def __init__(
        self,
        trace: Trace,
        rules: Mapping[str, Rule],
        columns: Set[str],
        multihead: Set[str],
        boundaries: Mapping[str, tuple[Boundary, ...]],
        elements: Mapping[str, Element],
        local: Set[str],
        dim: int,
        cut: Set[str],
        bare: Mapping[str, BareRegion],
        dropouts: Mapping[str, Any] = FrozenMap(),
        spreads: Mapping[str, Spread] = FrozenMap(),
    ) -> None:
        self.trace, self.columns, self.multihead = trace, columns, multihead
        self.styles = {path: named(rule.style) for path, rule in rules.items()}
        self.gathered = {
            path for path, rule in rules.items() if rule.options.get("output") == "gather"
        }
        self.gathering = gathering(rules)
        # row-parallel layers of whose result each rank gets its columns
        self.scattered = {
            path for path, rule in rules.items() if named(rule.style).scatters(rule.options)
        }
        self.staying = staying(rules)
        self.boundaries, self.elements, self.bare = boundaries, elements, bare
        self.partial = partial_rows(bare)
        self.local, self.dim, self.cut, self.dropouts = local, dim, cut, dropouts
        self.flow = Flow()
        self.region, self.whole_in_region = self.flow.region, self.flow.whole_in_region
        self.stream: set[int] = set()
        self.from_stream: set[int] = set()  # what became of it in regions
        self.weights: dict[int, frozenset[str]] = {
            number: frozenset([name]) for number, name in trace.parameters.items()
        }
        self.constant: set[int] = set(trace.buffers)
        self.maker: dict[int, str] = {}
        self.trained: set[int] = set()
        parts = frozenset[int]().union(*(region.parts for region in bare.values()))
        given = (c.number_of(elements[c.path].argument) for c in trace.calls if c.path in elements)
        self.noise = Noise(trace, parts, dim, {number for number in given if number is not None})
        self.entry = {
            call.index: self._entries(call) for call in trace.calls if call.path in boundaries
        }
        # arguments of which each rank takes its heads, where their gradient is put together
        for_heads = {path: rule.options.get("head_inputs") or () for path, rule in rules.items()}
        self.for_heads = {
            call.index: set[int]().union(*map(call.numbers_in, for_heads.get(call.path, ())))  # type: ignore[call-overload]
            for call in trace.calls
        }
        self.spread_over_rows(spreads)
        self.apart: set[int] = set()  # calls of replicated modules that get the whole stream
        self.flat: set[int] = set()  # made by column-parallel layers of tokens without their batch

    def _entries(self, call: Call) -> set[int]:
        given = (call.given_as(b.arguments[0].name) for b in self.boundaries[call.path])
        return {number for number in given if number is not None}

    def element_of(self, call: Call) -> Call | None:
        """The call of an element of the stack around another, or itself."""
        around = self.trace.ancestors(call.index)
        return next((c for c in around if c.path in self.elements), None)

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
                self.step(index, self.trace.ops[index])
        for path, site, met in self.noise.draws():
            self.flow.note_drawing(path, site, met)
        return self.flow

    # --- what styles say of their calls

    def is_sharded(self, number: int | None) -> bool:
        """Whether each rank has its own columns of a tensor."""
        return number in self.region and number not in self.whole_in_region

    def refuse_sharded(self, call: Call, given: int | None) -> None:
        """The call makes columns of what must be whole."""
        if self.is_sharded(given):
            self.flow.twice[call.path] = tuple(sources(self.trace, call, self.styles))

    def gives_columns(self, call: Call) -> None:
        """Each rank has its own columns of what the call gives."""
        self.region.update(call.outputs)
        self.whole_in_region.difference_update(call.outputs)
        if self.is_of_stream(call) and not self.in_block(call):
            self.flat.update(n for n in call.outputs if len(self.trace.shapes[n]) <= self.dim + 1)

    def gives_parts(self, call: Call) -> None:
        """What the call gives is a part of a sum, which the block around it has."""
        self.region.update(call.outputs)
        self.whole_in_region.difference_update(call.outputs)

    def goes_on(self, call: Call) -> None:
        """What the call gives is whole, and a part of its gradient comes back on each rank."""
        self.region.update(call.outputs)
        self.whole_in_region.update(call.outputs)

    def in_block(self, call: Call) -> bool:
        """Whether a block of experts is around the call, which entered with its batch."""
        around = self.trace.ancestors(call.parent)
        return any(c.path in self.bare and self.bare[c.path].block for c in around)

    def is_of_stream(self, call: Call) -> bool:
        """Whether what a call is given came from the stream; a region beside the stack may not."""
        known = self.stream | self.from_stream
        return self.element_of(call) is not None or not known.isdisjoint(call.arguments)

    def gives_sum(self, call: Call, outputs: Sequence[int]) -> None:
        """A region's result: the stream again, or whole where none of the stream went into it."""
        self.region.difference_update(outputs)
        self.stream.difference_update(outputs)
        if self.is_of_stream(call):
            self.stream.update(outputs)
        if self.element_of(call) is None:
            self.noise.whole.update(outputs)

    def takes_whole(self, call: Call) -> None:
        """The call computes with all of the stream, and what it is given of it is gathered."""
        self.apart.add(call.index)
        if self.element_of(call) is None:
            return
        taken = [a for n, names in call.arguments.items() if n in self.stream for a in names]
        known = self.flow.detours.get(call.path, Detour((), ()))
        arguments = dict.fromkeys((*known.arguments, *taken))
        self.flow.detours[call.path] = replace(known, arguments=tuple(arguments))

    def gives_rows(self, call: Call) -> None:
        """What the call made of all of the stream goes on as a rank's rows."""
        around = self.element_of(call)
        if around is None or call.index not in self.apart:
            return
        stream = around.number_of(self.elements[around.path].argument)
        rows = () if stream is None else self.trace.shapes[stream][: self.dim + 1]
        known, made = self.flow.detours[call.path], []
        for number, place in zip(call.outputs, call.places, strict=True):
            alike = self.trace.shapes[number][: self.dim + 1] == rows
            if alike and place is not None and number in self.trace.floating:
                self.stream.add(number)
                made.append(place)
        outputs = tuple(dict.fromkeys((*known.outputs, *made)))
        self.flow.detours[call.path] = replace(known, outputs=outputs)

    def takes_rows(self, call: Call, given: int | None) -> None:
        """Outside the elements, what the call works on has rows of the sequence."""
        if given is None or given in self.region or self.element_of(call) is not None:
            return
        shapes = [self.trace.shapes[n] for n in (given, *call.outputs)]
        if given in self.trained and all(len(shape) <= self.dim + 1 for shape in shapes):
            self.flow.rowless[call.path] = shapes[0]

    def gives_whole(self, call: Call) -> None:
        """Nothing of a region leaves the call."""
        self.region.difference_update(call.outputs)
        self.stream.difference_update(call.outputs)

    def check_rows(self, call: Call, given: int) -> None:
        """In an element, what is summed over the ranks has the rows of the stream."""
        around = self.element_of(call)
        if around is None or call.path in self.partial:
            return
        stream = around.number_of(self.elements[around.path].argument)
        # with or without their batch: as the column-parallel layers were given them
        same = (given in self.flat) == (len(self.trace.shapes[given]) <= self.dim + 1)
        if stream is None or not same or not self._rows_of(given, stream):
            self.flow.flattened.append(call.path)

    def _rows_of(self, number: int, stream: int) -> bool:
        """Whether a tensor has the rows of the stream, in its shape or without their batch."""
        rows, whole = self.trace.shapes[number][:-1], self.trace.shapes[stream][:-1]
        # the stream may have several of a position, side by side behind its batch and sequence
        leading = whole[: max(2, self.dim + 1)]
        if len(rows) == 1:
            return rows[0] in (math.prod(whole), math.prod(leading))
        return rows in (whole, leading)

    # --- call by call, op by op

    def enter(self, call: Call) -> None:
        self.flow.elsewhere |= self.weights_of(self.for_heads[call.index])
        given = next((n for n in call.arguments if n in self.trace.floating), None)
        self.styles.get(call.path, NONE).enter(self, call, given)
        self.note_entering(call)
        self.as_data(self.entry.get(call.index, ()))
        if call.path in self.elements:
            number = call.number_of(self.elements[call.path].argument)
            beside = map(call.number_of, self.elements[call.path].others)
            self.stream.update(n for n in (number, *beside) if n is not None)
            self.as_data([number])
        inside = self.element_of(call) is not None
        for boundary in self.boundaries.get(call.path, ()) if inside else ():
            name = boundary.arguments[0].name
            number = call.given_as(name)
            if number is not None:
                ours = number in self.stream or number in self.region
                (self.flow.streamed if ours else self.flow.whole).add((call.path, name))
        around = list(self.trace.ancestors(call.index))
        apart = [c.path for c in around if c.index in self.apart]
        style = self.styles.get(call.path, NONE)
        if not self.flow.detours.keys().isdisjoint(apart[:1]) and not (
            style is NONE or style.apart
        ):
            self.flow.inside[call.path] = apart[0]
        if call.path in self.dropouts and given is not None:
            kind = self.dropped_of(call, given, around, bool(apart))
            self.flow.note_drawing(call.path, call.site, {kind})

    def dropped_of(self, call: Call, given: int, around: list[Call], apart: bool) -> str:
        """What a module that drops out draws for."""
        entered = {n for c in around for n in self.entry.get(c.index, ())}
        if given in self.noise.parts | self.whole_in_region | entered:
            return "whole"
        stream = given in self.stream and not apart and self.noise.is_cut(given)
        kind = "region" if given in self.region else "stream" if stream else "whole"
        shape = self.trace.shapes[given]
        extent = drawn_by(self.dropouts[call.path], shape)
        return "whole" if self.noise.is_one(extent, shape, kind) else kind

    def leave(self, call: Call) -> None:
        self.styles.get(call.path, NONE).leave(self, call)
        self.note_leaving(call)
        summed = self.bare[call.path].summed if call.path in self.bare else None
        if summed is not None:
            if self.bare[call.path].block:  # what else leaves it is whole
                for op in self.trace.ops[call.first_op : call.last_op]:
                    self.region.difference_update(op.outputs)
            self.gives_sum(call, [n for n in map(call.output_at, summed.outputs) if n is not None])
        element = self.elements.get(call.path)
        given = None if element is None else call.output_at(element.output)
        if element is not None and given is not None:
            if given in self.region:
                self.flow.unreduced.append(call.path)
            self.stream.add(given)
            # by their places: the stream itself, given twice, is global in one of them alone
            others = {
                n for n, p in zip(call.outputs, call.places, strict=True) if p != element.output
            }
            came = {*call.nested, *call.arguments}  # and go on as they did
            if not element.others:
                came.discard(call.number_of(element.argument))  # type: ignore[arg-type]
            others -= came
            if not others.isdisjoint(self.stream & self.trace.floating):
                self.flow.escaping.append(call.path)
        if call.parent is None:
            if call.outputs and call.outputs[0] in self.region:
                self.flow.unreduced.append("")
            for number in call.outputs:
                self.flow.elsewhere |= self.weights.get(number, frozenset())
        for number in call.outputs:
            self.maker.setdefault(number, call.path)

    def step(self, index: int, op: Op) -> None:
        around = list(self.trace.ancestors(op.call))
        entries = {n for c in around for n in self.entry.get(c.index, ())}
        apart = any(c.index in self.apart for c in around)
        heads = {n for c in around for n in self.for_heads[c.index]}
        cut = {n for n in heads if n in self.trained or n in self.weights}
        region = any(n in self.region or n in entries or n in cut for n in op.inputs)
        stream = not region and not apart and any(n in self.stream for n in op.inputs)
        rows = [n for n in op.inputs if n in self.stream] if stream else []
        # what has entered, and what is made of it alone, is whole on every rank
        columns = any(n in cut or (n not in entries and self.is_sharded(n)) for n in op.inputs)
        self.noise.note(index, op, self.noise.kind_of(op, columns, rows))
        if any(c.path in self.multihead for c in around):
            return
        weights = self.weights_of(n for n in op.inputs if n not in cut)
        data = [
            n for n in op.inputs if n in cut or (n not in self.weights and n not in self.constant)
        ]
        if not weights and not data:
            self.constant.update(op.outputs)
            return
        if weights and not data:
            self.on_weights(op, weights, region, stream)
            return
        beside = self.spread_of(op.inputs, around)
        if weights:
            self.note_weights(weights, region, stream or bool(beside), around)
        whole = [
            n
            for n in data
            if n in self.trained and n not in self.region and n not in entries and n not in cut
            if region or not (n in self.stream or n in beside)
        ]
        if region:
            self.on_columns(op, data, entries, around, whole)
            if not weights.isdisjoint(self.cut):  # each rank has others
                self.whole_in_region.difference_update(op.outputs)
        elif stream:
            self.on_stream(op, data, around, whole)
        elif beside:
            self.on_spread(op, around)
        if weights or any(n in self.trained for n in data):
            self.trained.update(n for n in op.outputs if n in self.trace.floating)
        self.note_given(op, data, entries, around)

    def note_weights(
        self, weights: Set[str], region: bool, stream: bool, around: list[Call]
    ) -> None:
        """What an op computes with parameters."""
        # outside the elements, every rank computes with all of the stream
        rows = stream and any(
            c.path in self.elements or self.styles.get(c.path, NONE).rows for c in around
        )
        met = self.flow.in_region if region else self.flow.on_stream if rows else None
        (self.flow.elsewhere if met is None else met).update(weights)
        for name in weights:
            self.flow.users.setdefault((name, region), around[0].path)

    def on_columns(
        self, op: Op, data: list[int], entries: Set[int], around: list[Call], whole: list[int]
    ) -> None:
        """An op in a region."""
        partial = any(self.is_sharded(n) and n not in entries for n in data)
        self.region.update(op.outputs)
        self.whole_in_region.update(op.outputs)
        if partial:
            self.whole_in_region.difference_update(op.outputs)
        if any(n in self.stream or n in self.from_stream for n in op.inputs):
            self.from_stream.update(op.outputs)
        self.note_rows(op, around)
        if whole:
            self.flow.torn.setdefault(around[0].path, self.made_by(whole[0], op))
            name = self.made_of(whole[0], op, around[0])
            if name:
                self.flow.made_of.setdefault(around[0].path, name)

    def on_stream(self, op: Op, data: list[int], around: list[Call], whole: list[int]) -> None:
        """An op on the stream, outside of any region."""
        self.stream.update(op.outputs)
        if any(c.path in self.elements for c in around):
            self.note_positions(op, around)
            if whole:
                self.flow.torn_stream.setdefault(around[0].path, self.origin(whole[0], op))
                self.flow.met.append((self.trace.ops.index(op), tuple(whole)))
        else:
            # what a module made of its weights alone (positions) is whole too
            made = [n for n in op.inputs if n in self.weights and n in self.maker]
            self.note_mixture(op, [*data, *made], around)
