"""What may be a sharded region: from products that are given the stream to those that give it back.

In an element of the stack every tensor is of the *stream*, or made of *columns*: by a product, and
whatever is made of that. A sum of both is the stream again. The last products before such a sum may
be row-parallel, the products that these are given columns by column-parallel, and those before
them are whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from tpplan.observe.chance import DROPOUT
from tpplan.observe.trace import Call, Op, Trace
from tpplan.planner.views import KEEPING, VIEWS
from tpplan.suggestion.units import Kind, Units

_ADDS = frozenset({"add", "add_", "sub", "sub_"})
_MAKING = frozenset({Kind.PRODUCT, Kind.EXPERTS, Kind.MULTIHEAD, Kind.OTHER})


@dataclass
class Region:
    """The modules of one, by what they may be; in the order of the trace.

    Attributes:
        rows: give the stream; columns: are given it.
        whole: products and other modules before the columns, and routers.
        scales: modules with a number for each column or head, among the columns.
        tables: look-ups that meet the columns (biases by position).
        bare: parameters that code in the region computes with, by name.
        stacked, multihead: the experts of a mixture; torch's own attention.
    """

    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    scales: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    stacked: list[str] = field(default_factory=list)
    multihead: list[str] = field(default_factory=list)

    def add(self, other: Region) -> None:
        """What is in another region, too."""
        for name, paths in vars(other).items():
            own = getattr(self, name)
            own += [path for path in paths if path not in own]

    def roles(self) -> Iterator[tuple[str, str]]:
        """What each module may be, and its path."""
        for name, paths in vars(self).items():
            yield from ((name, path) for path in paths)

    def ends(self) -> list[str]:
        """The modules that give what is added to the stream."""
        return [*self.rows, *self.stacked, *self.multihead]

    def everything(self) -> list[str]:
        """The paths of all of them."""
        return [path for _, path in self.roles()]


@dataclass(frozen=True)
class Shapes:
    """What a trace shows of a region's sizes.

    Attributes:
        width: the columns that its row-parallel layer is given, 0 where there is none.
        heads, head_dim: of its attention, as the result is put together; 0 where unknown.
        attends: whether weights of a softmax, or torch's fused attention, are computed in it.
        outputs: of each column-parallel layer.
    """

    width: int
    heads: int
    head_dim: int
    attends: bool
    outputs: Mapping[str, int]


@dataclass
class ElementParts:
    """An element of the stack: its regions, and what is on the stream besides.

    Attributes:
        stream: modules that work on the stream (norms), lone products among them.
        path: of the element, "" for the model itself.
    """

    path: str
    regions: list[Region] = field(default_factory=list)
    stream: list[str] = field(default_factory=list)


def element_calls(trace: Trace, units: Units) -> list[Call]:
    """The first call of each element: the outermost numbered modules around products.

    And further ones, that come to modules inside of it to which none of those before has.
    """
    called = {call.path: call for call in reversed(trace.calls)}
    found: dict[str, Call] = {}
    for path, kind in units.kinds.items():
        if kind not in (Kind.PRODUCT, Kind.EXPERTS, Kind.MULTIHEAD):
            continue
        call = next((called[p] for p in _around(path) if p in called), None)
        if call is not None and call.path not in units.kinds and streamed(trace, call) is not None:
            found.setdefault(call.path, call)
    return [call for path in found for call in _reaching_more(trace, path)]


def _reaching_more(trace: Trace, path: str) -> Iterator[Call]:
    """The calls of a module that come to some in it to which none before has; the first."""
    reached: dict[int, set[str]] = {c.index: set() for c in trace.calls if c.path == path}
    for call in trace.calls if len(reached) > 1 else ():
        for around in trace.ancestors(call.parent):
            if around.index in reached:
                reached[around.index].add(call.path)
    known: set[str] = set()
    for place, (index, paths) in enumerate(reached.items()):
        if not place or not paths <= known:
            known |= paths
            yield trace.calls[index]


def _around(path: str) -> list[str]:
    """The outermost numbered module around a path, and those inside of it towards the path."""
    steps = path.split(".")
    first = next((i for i, step in enumerate(steps[:-1]) if step.isdigit()), len(steps))
    return [".".join(steps[: n + 1]) for n in range(first, len(steps) - 1)]


def streamed(trace: Trace, call: Call) -> int | None:
    """The tensor of a call that comes out in the same shape; None where none does."""
    shapes = {trace.shapes[n] for n in call.outputs if n in trace.floating}
    given = (n for n in call.arguments if n in trace.floating and trace.shapes[n] in shapes)
    return next(given, None)


def mixing(model: nn.Module, trace: Trace, op: Op) -> str | None:
    """The module without parameters of which an op is more than number by number: a norm, maybe."""
    name = op.name.removeprefix("aten.").split(".")[0]
    if op.pointwise or name in VIEWS or name in KEEPING:
        return None
    path = trace.calls[op.call].path
    module = model.get_submodule(path)
    bare = not any(True for _ in (*module.children(), *module.parameters()))
    return path if bare and path and not isinstance(module, DROPOUT) else None


def _shaped(op: Op) -> bool:
    """Whether what it gives has the shape of what it is given, and none of its numbers."""
    name = op.name.removeprefix("aten.").split(".")[0]
    return name.endswith("_like") or name.startswith("new_")


def shared_steps(paths: Sequence[str]) -> list[str]:
    """The steps that the paths of several modules begin with, without the last of any."""
    split = [path.split(".") for path in paths]
    shared = 0
    while all(len(steps) > shared + 1 and steps[shared] == split[0][shared] for steps in split):
        shared += 1
    return split[0][:shared]


class Reader:
    """Reads one call of an element, op by op."""

    def __init__(self, trace: Trace, units: Units, call: Call, root: bool = False) -> None:
        self.trace, self.units, self.call, self.root = trace, units, call, root
        given = streamed(trace, call)
        width = None if given is None else trace.shapes[given][-1:]
        self.stream = {
            n for n in call.arguments if n in trace.floating and trace.shapes[n][-1:] == width
        }
        self.graded = trace.floating | trace.complex
        self.columns: set[int] = set()
        self.beside: set[int] = set()  # made of tables and parameters alone
        self.known: set[int] = set()
        self.maker: dict[int, str] = {}
        self.by: dict[int, list[Op]] = {}
        self.given: dict[str, list[int]] = {}
        self.joins: list[list[int]] = []
        self.on_stream: dict[str, None] = {}

    def read(self) -> ElementParts:
        """Its regions."""
        for op in self.trace.ops[self.call.first_op : self.call.last_op]:
            self._step(op)
        self.known = {*self.columns, *self.beside, *self.trace.parameters}
        self.joins += [[n] for n in self.call.outputs if n in self.columns]
        parts = ElementParts(self.call.path)
        for join in self.joins:
            found = self._regions(join)
            for region in found:
                known = [r for r in parts.regions if set(r.everything()) & set(region.everything())]
                for other in known:
                    region.add(other)
                    parts.regions.remove(other)
                parts.regions.append(region)
        held = {path for region in parts.regions for path in region.everything()}
        parts.stream = [path for path in self.on_stream if path not in held]
        loose = [path for path in self.given if path not in held and path not in parts.stream]
        parts.stream += loose
        return parts

    # --- forward

    def _step(self, op: Op) -> None:
        unit = self.units.around(op, self.call)
        kind = None if unit is None else self.units.kinds[unit]
        for number in op.outputs:
            self.by.setdefault(number, []).append(op)
        if unit is not None and kind in _MAKING:
            given = [n for n in op.inputs if n not in self.maker or self.maker[n] != unit]
            self.given.setdefault(unit, []).extend(given)
            self.maker.update(dict.fromkeys(op.outputs, unit))
            made = (n in self.columns or self.maker.get(n) == unit for n in op.inputs)
            if self.root or not self.stream.isdisjoint(op.inputs) or any(made):
                self.columns.update(op.outputs)
            return
        inputs = set(op.inputs)
        if unit is not None and kind is Kind.TABLE and not self.root:
            self.beside.update(op.outputs)
            self.maker.update(dict.fromkeys(op.outputs, unit))
        elif (unit is not None and kind is Kind.TABLE) or self._joins(op, inputs):
            self.stream.update(op.outputs)
            self.columns.difference_update(op.outputs)
        elif not inputs.isdisjoint(self.columns):
            self.columns.update(op.outputs)
        elif not inputs.isdisjoint(self.stream):
            self.stream.update(op.outputs)
            within = op.call != self.call.index and unit is None
            bare = mixing(self.units.model, self.trace, op) if within else None
            self.on_stream.update({} if unit is None else {unit: None})
            self.on_stream.update({} if bare is None else {bare: None})
        elif not inputs.isdisjoint(self.beside) or not inputs.isdisjoint(self.trace.parameters):
            self.beside.update(op.outputs)

    def _joins(self, op: Op, inputs: set[int]) -> bool:
        """Whether it adds columns to the stream."""
        streams, columns = inputs & self.stream, inputs & self.columns
        if op.name.removeprefix("aten.").split(".")[0] not in _ADDS or not streams or not columns:
            return False
        shape = self.trace.shapes[op.outputs[0]] if op.outputs else ()
        if all(self.trace.shapes[n] != shape for n in streams) or len(shape) < 2:
            return False
        self.joins.append(sorted(columns))
        return True

    # --- backward

    def _back(self, numbers: Iterable[int]) -> tuple[list[str], set[str]]:
        """The modules that made what became of tensors, and what was met on the way.

        That is scales, and parameters that code computes with.
        """
        pending, seen = [n for n in numbers if n not in self.stream], set[int]()
        found: dict[str, None] = {}
        met: set[str] = set()
        while pending:
            number = pending.pop()
            # what is chosen by numbers, as indices and masks are, has no gradient to them
            if number in seen or number not in self.graded:
                continue
            seen.add(number)
            if number in self.maker:
                found[self.maker[number]] = None
            elif number in self.trace.parameters:
                met.add(self.trace.parameters[number])
            for op in self.by.get(number, ()):
                if _shaped(op):
                    continue
                unit = self.units.around(op, self.call)
                if unit is not None and unit == self.maker.get(number):
                    continue  # what is added in place goes on
                met.update([] if unit is None else [unit])
                inside = unit is None
                pending += [
                    n
                    for n in op.inputs
                    if n in self.known and (inside or n not in self.trace.parameters)
                ]
        order = {path: i for i, path in enumerate(self.units.kinds)}
        return sorted(found, key=lambda path: order[path]), met

    def _regions(self, join: list[int]) -> list[Region]:
        """Those whose results are added to the stream at once; a mixture's are one."""
        ends, met = self._back(join)
        made = [region for end in ends if (region := self._region(end)) is not None]
        kinds = self.units.kinds
        beside = {p for p in met if kinds.get(p) is Kind.SCALES}
        self.on_stream.update(dict.fromkeys(sorted(beside)))
        if not any(region.stacked for region in made):
            return made
        block, ends = Region(), [end for region in made for end in region.ends()]
        around = "".join(f"{step}." for step in shared_steps(ends))
        for region in made:
            # what is given nothing but what was made before the mixture is no region of it
            own = not region.columns or any(path.startswith(around) for path in region.columns)
            block.add(region if own else Region(whole=region.rows))
        lone = [end for end in ends if end not in block.everything()]
        block.whole += lone
        return [block]

    def _region(self, end: str) -> Region | None:
        """The region that a module ends; None where it is given nothing but the stream."""
        kinds = self.units.kinds
        before, met = self._back(self._taken(end))
        region = Region()
        if kinds[end] is Kind.MULTIHEAD:
            region.multihead.append(end)
            return region
        if kinds[end] is Kind.EXPERTS:
            region.stacked.append(end)
            region.whole += [path for path in self._all_before(before) if path != end]
            return region
        tables = [path for path in before if kinds[path] is Kind.TABLE]
        before = [path for path in before if kinds[path] is not Kind.TABLE and path != end]
        if not before or kinds[end] is not Kind.PRODUCT:
            return None
        inner = {path for other in before for path in self._all_before(self._before(other))} - {end}
        region.rows.append(end)
        region.columns += [path for path in before if path not in inner]
        whole = inner | self._scales_before(set(region.columns) | inner)
        region.whole += [path for path in kinds if path in whole]
        region.tables += tables
        region.scales += [path for path in kinds if path in met and kinds[path] is Kind.SCALES]
        region.bare += sorted(met - kinds.keys())
        return region

    def _before(self, path: str) -> list[str]:
        return [p for p in self._back(self._taken(path))[0] if p != path]

    def _taken(self, path: str) -> list[int]:
        """What a module computes with besides its own parameters."""
        own = self.trace.parameters.keys()
        return [n for n in self.given.get(path, ()) if n not in own]

    def _scales_before(self, paths: Iterable[str]) -> set[str]:
        kinds = self.units.kinds
        met = set[str]().union(*(self._back(self._taken(path))[1] for path in paths))
        return {path for path in met if kinds.get(path) is Kind.SCALES}

    def _all_before(self, paths: Iterable[str]) -> list[str]:
        """The modules given, and all before them."""
        found: dict[str, None] = {}
        pending = list(paths)
        while pending:
            path = pending.pop()
            if path not in found and self.units.kinds[path] is not Kind.TABLE:
                found[path] = None
                pending += self._before(path)
        return list(found)
