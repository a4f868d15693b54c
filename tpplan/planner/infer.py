"""What the author of a plan need not write, read off a trace of the model.

Where the stream enters each sharded region, which modules share that boundary, and of which layers
what a module is given was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from tpplan.compiled import Boundary
from tpplan.language import Rule
from tpplan.observe.trace import Call, Trace, stream_input
from tpplan.places import Argument
from tpplan.planner.bare import BareRegion
from tpplan.styles import NONE, Style, named


def staying(rules: Mapping[str, Rule]) -> frozenset[str]:
    """Row-parallel layers whose sum is for the code of the region that they are in."""
    return frozenset(path for path, rule in rules.items() if named(rule.style).stays(rule.options))


def gathering(rules: Mapping[str, Rule]) -> frozenset[str]:
    """Replicated modules of which the plan says that they are given the whole sequence."""
    return frozenset(p for p, rule in rules.items() if rule.options.get("input") == "gather")


def carrying(trace: Trace, path: str) -> Argument | None:
    """The argument that carries the stream into a module; None where it was not called."""
    call = next((c for c in trace.calls if c.path == path and c.arguments), None)
    if call is None:
        return None
    number = stream_input(trace, call)
    # an embedding of positions is given their ids
    return call.arguments[next(iter(call.arguments)) if number is None else number][0]


def find_boundaries(
    trace: Trace,
    columns: set[str],
    multihead: set[str],
    heads: set[str],
    gathers: Mapping[str, frozenset[str]],
    bare: Mapping[str, BareRegion],
    adapted: Mapping[str, str],
    inside: Set[str],
) -> dict[str, tuple[Boundary, ...]]:
    """Where each input of a column-parallel layer enters: module path -> boundaries.

    It belongs at the outermost module that was given the very same tensor and uses it for
    column-parallel layers only: such a module may read the tensor's shape before projecting it.
    Where the plan says that an argument enters, what replicated layers make of it has entered.

    Args:
        columns: the paths of column-parallel projections.
        multihead: those of torch's own attention, which project several inputs.
        heads: the paths of vocab-parallel heads, which enter on their own.
        gathers: module path -> arguments that the plan says enter there.
        bare: the modules that compute with cut parameters of their own.
        adapted: what a layer with a low-rank adapter is made of -> the path of that layer, whose
            adapter takes the same input.
        inside: see ``staying``: what is made of their sum has entered.
    """
    of_columns = {layer for path, layer in adapted.items() if path in columns}
    entered = _made_of_sums(trace, inside, columns)
    # so do those whose own parameters make columns of it, beside layers that do
    of_columns |= {path for path, region in bare.items() if region.columns and not region.summed}
    return _Entries(trace, columns, multihead, heads, gathers, of_columns, entered).boundaries(bare)


def _made_of_sums(trace: Trace, inside: Set[str], columns: Set[str]) -> set[int]:
    """The sums that regions go on with, and what they make of these: it has entered.

    What is made of columns besides is refused where a layer is given it.
    """
    found = set[int]()
    for call in trace.calls:
        if call.path in inside and call.parent is not None:
            found.update(call.outputs)
            for op in trace.ops[call.last_op : trace.calls[call.parent].last_op]:
                made = trace.calls[op.call].path in columns
                if not made and not found.isdisjoint(op.inputs):
                    found.update(op.outputs)
    return found


class _Entries:
    """What enters where: module path and tensor -> its arguments, and whom it serves."""

    def __init__(
        self,
        trace: Trace,
        columns: set[str],
        multihead: set[str],
        heads: set[str],
        gathers: Mapping[str, frozenset[str]],
        adapted: Set[str],
        entered: Set[int],
    ) -> None:
        self.entered = entered
        self.trace, self.columns, self.multihead, self.heads = trace, columns, multihead, heads
        self.adapted = adapted
        self.uses: dict[int, list[int]] = {}
        for index, op in enumerate(trace.ops):
            for number in op.inputs:
                self.uses.setdefault(number, []).append(index)
        # what the plan says enters, with all that replicated layers make of it
        self.stated = {
            (call.index, number): whole_in(trace, number, call, columns)
            for call in trace.calls
            for number, arguments in call.arguments.items()
            if any(a.name in gathers.get(call.path, ()) for a in arguments)
        }
        # what both enter with in an adapted layer: what A makes of it is whole as well
        self.together = {
            (call.index, number): whole_in(trace, number, call, columns)
            for call in trace.calls
            if call.path in adapted
            for number in call.arguments
        }
        self.entries: dict[tuple[str, int], tuple[tuple[Argument, ...], list[str]]] = {}

    def boundaries(self, bare: Mapping[str, BareRegion]) -> dict[str, tuple[Boundary, ...]]:
        self.enter_bare(bare)
        for call in self.trace.calls:
            if call.path in self.multihead:
                for number, names in call.arguments.items():
                    taken = tuple(a for a in names if a.name in ("query", "key", "value"))
                    if taken:
                        self.entries.setdefault((call.path, number), (taken, [call.path]))
            elif call.path in self.columns or call.path in self.heads:
                self.enter(call)
        self.keep_innermost()
        together: dict[int, list[str]] = {}
        for path, number in self.entries:
            together.setdefault(number, []).append(path)
        result: dict[str, tuple[Boundary, ...]] = {}
        for (path, number), (arguments, consumers) in self.entries.items():
            boundary = Boundary(arguments, tuple(consumers), number, tuple(together[number]))
            # a module that is called several times enters in the same way each time
            known = result.get(path, ())
            if all(boundary.arguments != other.arguments for other in known):
                result[path] = (*known, boundary)
        return result

    def enter_bare(self, bare: Mapping[str, BareRegion]) -> None:
        """What modules multiply by cut parameters of their own enters there, or further out."""
        for path, region in bare.items():
            for number, arguments in region.entering.items():
                if path in self.adapted:
                    for call in self.trace.calls:
                        if call.path == path and number in call.arguments:
                            self.note(path, *self.climbed(call, number))
                else:
                    self.entries[path, number] = arguments, [path]

    def keep_innermost(self) -> None:
        """A layer that was entered further out in one call than in another would enter twice."""
        places: dict[str, set[str]] = {}
        for (path, _), (_, consumers) in self.entries.items():
            for consumer in consumers:
                places.setdefault(consumer, set()).add(path)
        for key, (_, consumers) in list(self.entries.items()):
            around = f"{key[0]}.".lstrip(".")
            within = [
                c for c in consumers if any(p.startswith(around) for p in places[c] - {key[0]})
            ]
            consumers[:] = [c for c in consumers if c not in within]
            if not consumers:
                del self.entries[key]

    def enter(self, call: Call) -> None:
        """What a projection or a head is given enters there, or further out."""
        given = stream_input(self.trace, call)
        if given is None or given in self.entered:
            return
        self.note(call.path, *self.outermost(call, given))

    def note(self, consumer: str, path: str, number: int, arguments: tuple[Argument, ...]) -> None:
        """What enters at a module serves one more."""
        consumers = self.entries.setdefault((path, number), (arguments, []))[1]
        if consumer not in consumers:
            consumers.append(consumer)

    def outermost(self, call: Call, given: int) -> tuple[str, int, tuple[Argument, ...]]:
        """The module at which a tensor enters for a call, the tensor there, and its names."""
        around = {outer.index: outer for outer in self.trace.ancestors(call.parent)}
        for (index, number), whole in self.stated.items():
            if index in around and given in whole:
                return around[index].path, number, around[index].arguments[number]
        for (index, number), whole in self.together.items():
            if index in around and given in whole:
                call, given = around[index], number
        return self.climbed(call, given)

    def climbed(self, call: Call, given: int) -> tuple[str, int, tuple[Argument, ...]]:
        """The outermost module that uses a tensor, given to a call, as that call does."""
        path, arguments = call.path, call.arguments[given]
        around = {outer.index: outer for outer in self.trace.ancestors(call.parent)}
        for outer in around.values() if call.path not in self.heads else ():
            names = outer.arguments.get(given)
            if names is None or not self.only_columns(given, outer):
                break
            path, arguments = outer.path, names
        return path, given, arguments

    def only_columns(self, number: int, outer: Call) -> bool:
        """Whether a call uses a tensor for column-parallel layers only."""
        for index in self.uses.get(number, ()):
            if outer.first_op <= index < outer.last_op:
                around = {c.path for c in self.trace.ancestors(self.trace.ops[index].call)}
                user = self.trace.calls[self.trace.ops[index].call].path
                if user not in self.columns and around.isdisjoint(self.multihead | self.adapted):
                    return False
        return True


def whole_in(trace: Trace, number: int, outer: Call, columns: set[str]) -> set[int]:
    """What a module makes of a tensor without any column-parallel layer: whole on every rank."""
    whole, cut = {number}, set[int]()
    for op in trace.ops[outer.first_op : outer.last_op]:
        if trace.calls[op.call].path in columns or not cut.isdisjoint(op.inputs):
            cut.update(op.outputs)
        elif not whole.isdisjoint(op.inputs):
            whole.update(op.outputs)
    return whole - cut


def sources(
    trace: Trace, call: Call, styles: Mapping[str, Style], given_out: bool = False
) -> list[str]:
    """The column-parallel layers whose outputs reach the input of a call, as it was traced.

    Args:
        given_out: what reaches the outputs of the call instead.
    """
    ends = {
        number: other.path
        for other in trace.calls
        if (style := styles.get(other.path, NONE)).columns or style.sums
        if given_out or other.index != call.index
        for number in other.outputs
    }
    if given_out:
        made = nearest(trace, call.outputs, call.last_op, ends)
    else:
        given = {n for n in call.arguments if n in trace.floating}
        made = nearest(trace, given, call.first_op, ends)
    return [path for path in made if styles[path].columns]


def nearest(trace: Trace, numbers: Iterable[int], upto: int, ends: Mapping[int, str]) -> list[str]:
    """The modules that made what became of tensors, each way back to the first of ``ends``.

    Args:
        upto: the op before which to look; ends: a tensor -> the module that made it.
    """
    pending = set(numbers)
    found: set[str] = set()
    for op in reversed(trace.ops[:upto]):
        if not pending.intersection(op.outputs):
            continue
        reached = [ends[n] for n in pending.intersection(op.outputs) if n in ends]
        found.update(reached)
        pending.difference_update(op.outputs)
        if not reached:
            pending.update(op.inputs)
    return [path for path in dict.fromkeys(c.path for c in trace.calls) if path in found]
