"""Sharded regions of bare parameters: modules whose own code multiplies by what is cut.

The heads of ``torch.einsum("btc,hdc->bthd", x, self.q)`` are a rank's own where ``q`` is cut along
them, as the columns of a column-parallel layer are; a product with a parameter that is cut along
what it sums over is a part of the result, as that of a row-parallel layer is. What enters, and what
has to be summed, is seen in the trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from tpplan.compiled import Summed
from tpplan.observe.trace import Call, Op, Trace
from tpplan.places import Argument
from tpplan.styles import NONE, Style

# ops that may add a parameter to a sum; a factor of it is whole on every rank
_ADDING = frozenset({"add", "add_", "sub", "sub_", "addmm", "baddbmm", "addbmm", "linear"})


@dataclass(frozen=True)
class BareRegion:
    """What a module that holds cut parameters does with them.

    Attributes:
        entering: the arguments that are multiplied by a cut parameter while they are whole, by the
            tensor that each is.
        summed: what is a part of a sum where the module gives it; None where nothing is.
        columns: whether the module gives columns, as a column-parallel layer.
        parts: the tensors that are parts of a sum, in all of its calls.
        block: whether it is a block of experts, whose inputs are whole for all that is inside.
        rows: row-parallel layers inside of it, of which it takes a part as well.
    """

    entering: Mapping[int, tuple[Argument, ...]]
    summed: Summed | None
    columns: bool
    parts: frozenset[int]
    block: bool = False
    rows: frozenset[str] = frozenset()


def partial_rows(regions: Mapping[str, BareRegion]) -> frozenset[str]:
    """Row-parallel layers that do not reduce what they give: a block around them does."""
    return frozenset[str]().union(*(region.rows for region in regions.values()))


def bare_regions(
    trace: Trace,
    cut: Mapping[str, Style],
    styles: Mapping[str, Style],
    aliases: Mapping[str, Sequence[str]],
) -> dict[str, BareRegion]:
    """The modules that multiply by cut parameters of their own -> what they do.

    Args:
        cut: the style of each parameter that is cut by a rule of its own, under all its names.
        styles: those of modules.
        aliases: all names of each parameter, by its first.
    """
    owners = {name.rpartition(".")[0] for name in cut}
    owners -= {path for path, style in styles.items() if style.sharded}
    regions: dict[str, BareRegion] = {}
    columns = _columns(trace, styles, cut) if owners else set[int]()
    for call in trace.calls:
        if call.path in owners:
            found = _Reader(trace, call, cut, styles, aliases, columns).read()
            known = regions.setdefault(call.path, found)
            regions[call.path] = replace(known, parts=known.parts | found.parts)
    return {path: found for path, found in regions.items() if found.entering or found.summed}


def _columns(trace: Trace, styles: Mapping[str, Style], cut: Mapping[str, Style]) -> set[int]:
    """The tensors of which each rank has columns, by the layers that made these."""
    found: set[int] = set()
    # parameters that are cut along what a product sums over, and views of them
    summing = {n for n, name in trace.parameters.items() if name in cut and cut[name].sums}
    for op in trace.ops:
        if not summing.isdisjoint(op.inputs):
            if found.isdisjoint(op.inputs):
                summing.update(op.outputs)
            continue
        around = (styles.get(call.path) for call in trace.ancestors(op.call))
        style = next((style for style in around if style is not None), NONE)
        if not style.sums and (style.columns or not found.isdisjoint(op.inputs)):
            found.update(op.outputs)
    return found


class _Reader:
    """Follows a call's tensors: whole, in columns, or parts of a sum."""

    def __init__(
        self,
        trace: Trace,
        call: Call,
        cut: Mapping[str, Style],
        styles: Mapping[str, Style],
        aliases: Mapping[str, Sequence[str]],
        columns: Set[int],
    ) -> None:
        self.trace, self.call, self.cut, self.styles = trace, call, cut, styles
        self.aliases = aliases
        self.weights = {n: frozenset([name]) for n, name in trace.parameters.items()}
        # whole tensors, by the arguments they were made of
        given = call.arguments.keys() & trace.floating
        self.whole = {n: frozenset([n]) for n in given - columns}
        self.columns = {*given} & columns
        self.given = dict(self.whole), set(self.columns)
        self.parts: set[int] = set()
        self.entering: set[int] = set()
        self.added: set[str] = set()
        self.sums: dict[int, frozenset[str]] = {}  # what row-parallel layers gave, and these
        self.rows: frozenset[str] = frozenset()  # those whose sum is added to a part of one

    def read(self) -> BareRegion:
        for op in self.trace.ops[self.call.first_op : self.call.last_op]:
            self.step(op)
        met = frozenset[str]().union(*(self.sums.get(n, frozenset()) for n in self.parts))
        if met - self.rows:
            again = _Reader(self.trace, self.call, self.cut, self.styles, self.aliases, set())
            again.whole, again.columns = self.given
            again.rows = met
            return again.read()
        entering = {n: self.call.arguments[n] for n in sorted(self.entering)}
        made = zip(self.call.outputs, self.call.places, strict=True)
        outputs = tuple(place for n, place in made if n in self.parts and place is not None)
        added = (name.rpartition(".") for first in self.added for name in self.aliases[first])
        names = tuple(sorted({leaf for owner, _, leaf in added if owner == self.call.path}))
        columns = not self.columns.isdisjoint(self.call.outputs)
        summed = Summed(outputs, names) if outputs else None
        return BareRegion(entering, summed, columns, frozenset(self.parts), rows=self.rows)

    def step(self, op: Op) -> None:
        names = frozenset[str]().union(*(self.weights.get(n, frozenset()) for n in op.inputs))
        given = set(op.inputs)
        if given.isdisjoint(self.whole.keys() | self.columns | self.parts):
            if names:
                self.weights.update(dict.fromkeys(op.outputs, names))
            return
        around = self._style_around(op)
        cut = [self.cut[name] for name in names & self.cut.keys()]
        if op.pointwise and given.isdisjoint(self.columns | self.parts):
            cut = []  # number by number it cannot make columns of what is whole
        sums = frozenset[str]().union(*(self.sums.get(n, frozenset()) for n in given))
        if around.sums:
            sums |= {c.path for c in self.trace.ancestors(op.call) if c.path in self.styles}
        if sums:
            self.sums.update(dict.fromkeys(op.outputs, sums))
        if around.sums and not sums.isdisjoint(self.rows):
            self.parts.update(op.outputs)
        elif around.sums:
            self.whole.update(dict.fromkeys(op.outputs, frozenset[int]()))
        elif any(style.sums for style in cut) or not given.isdisjoint(self.parts):
            if op.name.removeprefix("aten.").split(".")[0] in _ADDING:
                self.added |= names - self.cut.keys()
            self.parts.update(op.outputs)
        elif cut or around.columns or not given.isdisjoint(self.columns):
            if cut and given.isdisjoint(self.columns):
                self.entering |= self._origins(given)
            self.columns.update(op.outputs)
        else:
            self.whole.update(dict.fromkeys(op.outputs, self._origins(given)))

    def _origins(self, given: Set[int]) -> frozenset[int]:
        return frozenset[int]().union(*(self.whole.get(n, frozenset()) for n in given))

    def _style_around(self, op: Op) -> Style:
        """Of the module with a rule that the op is in, inside of the call."""
        for call in self.trace.ancestors(op.call):
            if call.index == self.call.index:
                break
            if call.path in self.styles:
                return self.styles[call.path]
        return NONE
