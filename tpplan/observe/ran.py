"""What ran inside of modules, as a trace shows it: equal where two of them did the same.

Modules that are equal may still do other things: by what they are given, or by what they share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterable
from typing import Any

from torch.utils._pytree import tree_leaves

from tpplan.observe.trace import Numbered, Op, Trace


def ran_in(traces: Iterable[Trace], paths: Collection[str]) -> dict[str, str]:
    """Module path -> a digest of the ops inside, of their sizes, and of how they hang together.

    With what a module was told by words and numbers, its own number in a list left out: it may do
    something else by them in another call.
    """
    found: dict[str, list[Hashable]] = {path: [] for path in paths}
    for trace in traces:
        known = {path: _Names(trace, path) for path in paths}
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
                    if isinstance(x, str | bool) or (isinstance(x, int | float) and x not in own)
                ]
        for op in trace.ops:
            for call in around[op.call]:
                path = call.path
                inner = trace.calls[op.call].path.removeprefix(path)
                if trace.computed:  # how often, and on how many rows, may hang on the numbers
                    found[path].append((op.name, inner))
                else:
                    found[path].append((op.name, inner, *known[path].of(op)))
        if trace.computed:
            found = {path: sorted(set(done), key=repr) for path, done in found.items()}
    return {path: hashlib.sha256(repr(done).encode()).hexdigest() for path, done in found.items()}


class _Names:
    """What a module's code calls its tensors: in the order in which it comes to them."""

    def __init__(self, trace: Trace, path: str) -> None:
        self.trace, self.path = trace, path
        self._known: dict[int, Hashable] = {}

    def of(self, op: Op) -> tuple[Any, ...]:
        """What an op was given, tensors by name, and what it made."""
        given = () if op.run is None else op.run[1]
        others = tuple(str(leaf) for leaf in tree_leaves(given) if not isinstance(leaf, Numbered))
        made = tuple(self.trace.shapes[n] for n in op.outputs)
        return tuple(map(self._name, op.inputs)), tuple(map(self._name, op.outputs)), made, others

    def _name(self, number: int) -> Hashable:
        if number not in self._known:
            named = self.trace.parameters.get(number, self.trace.buffers.get(number))
            name = len(self._known) if named is None else named.removeprefix(f"{self.path}.")
            self._known[number] = name
        return self._known[number]
