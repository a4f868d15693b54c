"""Random numbers in the flow of tensors: where they are drawn, and what they are for."""

from __future__ import annotations

from collections.abc import Mapping

from tpplan.observe.trace import Op, Trace


class Noise:
    """Tensors made of constants and noise alone, and what they met."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.drawn: dict[int, frozenset[int]] = {}
        self.met: dict[int, set[str]] = {}

    def note(self, index: int, op: Op, kind: str) -> None:
        """What random numbers are drawn for: where they are drawn by themselves, what they meet."""
        inputs = [self.drawn.get(n) for n in op.inputs]
        noise = frozenset().union(*(n for n in inputs if n is not None))
        if op.random:
            self.met[index] = set()
            noise |= {index}
        if all(n is not None for n in inputs):
            self.drawn.update(dict.fromkeys(op.outputs, noise))
            return
        for drawn in noise:
            self.met[drawn].add(kind)
        for number in op.outputs:
            self.drawn.pop(number, None)  # written to

    def draws(self) -> Mapping[str, set[str]]:
        """Module path -> what the random numbers are for that its own code draws."""
        found: dict[str, set[str]] = {}
        for index, met in self.met.items():
            path = self.trace.calls[self.trace.ops[index].call].path
            found.setdefault(path, set()).update(met or {"whole"})
        return found
