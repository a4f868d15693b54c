"""Which vocabularies' tables other modules' code computes with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tpplan.compat import is_view
from tpplan.observe.trace import Trace


def read_by_others(traces: Iterable[Trace], names: Iterable[Sequence[str]]) -> set[str]:
    """The names of parameters that code of other modules reads, and no code writes to.

    Args:
        names: all names of each parameter; those modules are its own.
    """
    every = {name: tuple(alike) for alike in names for name in alike}
    read, written = set[str](), set[str]()
    for trace in traces:
        _note(trace, every, read, written)
    return read - written


def _note(
    trace: Trace, every: Mapping[str, tuple[str, ...]], read: set[str], written: set[str]
) -> None:
    # what shares a parameter's memory, so that what is written to it is written to the parameter
    named = dict(trace.parameters)
    for op in trace.ops:
        for number in op.inputs:
            alike = every.get(named.get(number, ""), ())
            if number in op.written:
                written.update(alike)
            elif trace.calls[op.call].path not in {n.rpartition(".")[0] for n in alike}:
                read.update(alike)
            if alike and op.run is not None and is_view(op.run[0]):
                named.update((out, alike[0]) for out in op.outputs)
