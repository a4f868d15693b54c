"""What ran inside of modules, as a trace shows it: equal where two of them did the same.

Modules that are equal may still do other things: by what they are given, or by what they share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterable
from typing import Any

from torch.utils._pytree import tree_leaves

from tpplan.compat import is_view
from tpplan.observe.trace import Op, Trace


def ran_in(traces: Iterable[Trace], paths: Collection[str]) -> dict[str, str]:
    """Module path -> a digest of the ops inside, of their sizes, and of how they hang together.

    With what a module was told by words and numbers, its own number in a list left out: it may do
    something else by them in another call.
    """
    found: dict[str, list[Hashable]] = {path: [] for path in paths}
    for trace in traces:
        fixed = _Fixed(trace)
        known = {path: _Names(trace, path, fixed) for path in paths}
        around = [
            [call for call in trace.ancestors(call.index) if call.path in known]
            for call in trace.calls
        ]
        for call in trace.calls:
            if call.path in found:
                own = [int(name) for name in call.path.split(".") if name.isdecimal()]
                found[call.path] += [
                    x
                    for x in tree_leaves(call.given)
                    if isinstance(x, str | bool | float) or (isinstance(x, int) and x not in own)
                ]
        for op in trace.ops:
            for call in around[op.call]:
                path = call.path
                inner = trace.calls[op.call].path.removeprefix(path)
                if trace.computed:  # how often, and on how many rows, may hang on the numbers
                    found[path].append((op.name, inner, *known[path].numbers_of(op)))
                else:
                    found[path].append((op.name, inner, *known[path].of(op)))
            fixed.follow(op)
        if trace.computed:
            found = {path: sorted(set(done), key=repr) for path, done in found.items()}
    return {path: _digest(done) for path, done in found.items()}


def _digest(told: object) -> str:
    return hashlib.sha256(repr(told).encode()).hexdigest()


class _Names:
    """What a module's code calls its tensors: in the order in which it comes to them.

    Those that it has from elsewhere, and that hang on nothing that the model is given, by what
    they are: what is 1 to one layer may be 0 to another.
    """

    def __init__(self, trace: Trace, path: str, fixed: _Fixed) -> None:
        self.trace, self.path, self.fixed = trace, path, fixed
        self._known: dict[int, Hashable] = {}

    def of(self, op: Op) -> tuple[Any, ...]:
        """What an op was given, tensors by name, and what it made."""
        made = tuple(self.trace.shapes[n] for n in op.outputs)
        inputs = tuple(map(self._name, op.inputs))
        return inputs, tuple(map(self._made, op.outputs)), made, tuple(map(str, op.told))

    def numbers_of(self, op: Op) -> tuple[Any, ...]:
        """The numbers among it, but for sizes and what else may be one."""
        told = (x for x in op.told if isinstance(x, float) or (op.pointwise and x != ""))
        inputs = (self._name(n) for n in op.inputs)
        self._known.update(dict.fromkeys(op.outputs, 0))
        return tuple(map(str, told)), tuple(name for name in inputs if isinstance(name, str))

    def _name(self, number: int) -> Hashable:
        fixed = self.fixed
        if number not in self._known:
            named = fixed.names.get(number)
            name = named.removeprefix(f"{self.path}.") if named is not None else fixed.of(number)
            self._known[number] = len(self._known) if name is None else name
        return self._known[number]

    def _made(self, number: int) -> Hashable:
        if number not in self.fixed.names:
            self._known.setdefault(number, len(self._known))
        return self._name(number)


class _Fixed:
    """Tensors of which the values are there before the model is given anything.

    Attributes:
        names: of those that the model has.
    """

    def __init__(self, trace: Trace) -> None:
        constants = {n: _digest(value) for n, value in trace.constants.items()}
        self.names = {**trace.held, **trace.buffers, **trace.parameters}
        self._known = {**constants, **trace.held, **trace.buffers}
        # of what a tensor is a view, and which
        self._views: dict[int, tuple[int, str]] = {}

    def of(self, number: int) -> str | None:
        """Equal for two tensors that are made alike, of the same; None where it hangs on more."""
        base, way = self._views.get(number, (number, ""))
        found = self._known.get(base)
        return found if found is None or not way else _digest((found, way))

    def follow(self, op: Op) -> None:
        """Note what an op makes or writes."""
        base, way = self._views.get(op.inputs[0], (op.inputs[0], "")) if op.inputs else (-1, "")
        if base in self._known and op.run is not None and is_view(op.run[0]):
            views = {n: _digest((way, op.name, op.told, i)) for i, n in enumerate(op.outputs)}
            self._views.update((n, (base, view)) for n, view in views.items() if n != base)
            return
        given = [self.of(number) for number in op.inputs]
        fixed = None if op.random or None in given else _digest((op.name, op.told, given))
        for place, number in enumerate(dict.fromkeys((*op.written, *op.outputs))):
            written = self._views.get(number, (number, ""))[0]
            self._known.pop(written, None)
            if fixed is not None:
                self._known[written] = _digest((fixed, place))
