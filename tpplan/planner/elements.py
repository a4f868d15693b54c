"""The elements of the layer stack: which argument is the stream, and which are cut with it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Set

from tpplan.compiled import Boundary, Element
from tpplan.language import Pattern
from tpplan.observe.trace import Call, Trace
from tpplan.places import Argument, Place
from tpplan.styles import Style


def find_elements(
    trace: Trace,
    styles: Mapping[str, Style],
    layers: Pattern | None,
    boundaries: Mapping[str, tuple[Boundary, ...]],
    multihead: Set[str],
    summing: Set[str],
    gathering: Set[str],
) -> dict[str, Element]:
    """The elements of the layer stack: where row-parallel layers sit, or what ``layers`` names.

    Args:
        multihead: torch's own attention; in a stack of nothing else it is what is row-parallel.
        summing: modules that are row-parallel by parameters of their own.
        gathering: those of which the plan says that they are given the whole sequence.
    """
    called = {call.path: call for call in reversed(trace.calls)}
    if layers is not None:
        paths = [path for path in called if layers.matches(path)]
    else:
        rows = [path for path, style in styles.items() if style.sums] + sorted(summing)
        rows = rows or sorted(multihead)
        paths = list(dict.fromkeys(_called_in(_stacked(path), path, called) for path in rows))
    entering = {boundary.number for found in boundaries.values() for boundary in found}
    entered = boundaries.keys() | gathering
    elements = {}
    for path in paths:
        call = called.get(path)
        if call is None:
            continue
        found = stream_of(trace, call)
        if found is not None:
            stream, output = found
            others = _others(trace, call, stream, entering, entered, styles, multihead)
            elements[path] = Element(stream, output, others)
    return elements


def _stacked(path: str) -> str:
    """The outermost numbered module around ``path``, or the model itself."""
    parts = path.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def _called_in(outer: str, path: str, called: Container[str]) -> str:
    """``outer``; where the model only holds it, the outermost module towards ``path`` it calls."""
    while outer not in called and outer != path:
        rest = path[len(outer) :].lstrip(".")
        outer = f"{outer}.{rest.partition('.')[0]}".lstrip(".")
    return outer


def _others(
    trace: Trace,
    call: Call,
    stream: Argument,
    entering: Set[int],
    entered: Set[str],
    styles: Mapping[str, Style],
    multihead: Set[str],
) -> tuple[Argument, ...]:
    """Arguments whose rows meet those of the stream, as an embedding of the tokens in every layer.

    What enters a sharded region is left out: that is gathered where it enters. So is what meets
    sharded activations (angles, masks), whose rows are all of the sequence.
    """
    number, given = call.number_of(stream), {**call.nested, **call.arguments}
    assert number is not None
    rows = trace.shapes[number][:-1]
    # the first layer may be given the stream under several names
    others = [name for name in given[number] if name != stream]
    for other, names in given.items():
        alike = other != number and trace.shapes[other][: len(rows)] == rows
        if (
            alike
            and other not in entering
            and _meets(trace, call, other, number, styles, multihead, entered)
        ):
            others += names[:1]
    return tuple(others)


def _meets(
    trace: Trace,
    call: Call,
    other: int,
    stream: int,
    styles: Mapping[str, Style],
    multihead: Set[str],
    entered: Set[str],
) -> bool:
    """Whether what becomes of a tensor in an element meets the stream, and not its columns.

    Args:
        entered: modules whose code is given the whole of the stream.
    """
    apart, streams, columns = {other}, {stream}, set[int]()
    met = False
    for op in trace.ops[call.first_op : call.last_op]:
        around = {c.path for c in trace.ancestors(op.call)}
        within = [styles[path] for path in around if path in styles]
        whole = not around.isdisjoint(multihead)
        cut = any(style.columns for style in within) or not columns.isdisjoint(op.inputs)
        cut = cut or not around.isdisjoint(entered)
        if (cut or whole) and not apart.isdisjoint(op.inputs):
            return False
        if whole or any(style.sums for style in within):
            streams.update(op.outputs)
        elif cut:
            columns.update(op.outputs)
        elif not streams.isdisjoint(op.inputs):
            met = met or not apart.isdisjoint(op.inputs)
            streams.update(op.outputs)
        elif not apart.isdisjoint(op.inputs):
            apart.update(op.outputs)
    return met


def stream_of(trace: Trace, call: Call) -> tuple[Argument, Place] | None:
    """The argument that comes out in the same shape, and where: the first such tensor.

    Of what is inside of arguments, preferably what comes out changed, and in its own place.
    """
    for given in (call.arguments, call.nested):
        found = [
            (arguments[0], place, (out in given, arguments[0].place != place))
            for out, place in zip(call.outputs, call.places, strict=True)
            for number, arguments in given.items()
            if place is not None
            if trace.shapes[number] == trace.shapes[out] and {number, out} <= trace.floating
        ]
        if found:
            return (found[0] if given is call.arguments else min(found, key=lambda f: f[2]))[:2]
    return None
