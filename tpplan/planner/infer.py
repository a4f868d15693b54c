"""What the author of a plan need not write, read off a trace of the model.

Where the stream enters each sharded region, which modules share that boundary, what the elements
of the layer stack are, how many heads a projection has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpplan.language import Diagnostic, Pattern, PlanError
from tpplan.planner.compiled import Argument, Boundary, Element
from tpplan.planner.trace import Call, Trace

VIEWS = frozenset({"view", "_unsafe_view", "reshape", "unflatten", "unsqueeze", "squeeze"})
KEEPING = frozenset({"clone", "alias", "detach", "_to_copy", "contiguous", "lift_fresh"})
_CUTS = frozenset(
    {"split", "split_with_sizes", "chunk", "slice", "select", "unbind", "narrow", "glu"}
)


def stream_input(trace: Trace, call: Call) -> int | None:
    """The first floating tensor a module was given."""
    return next((number for number in call.arguments if number in trace.floating), None)


def find_boundaries(
    trace: Trace, styles: Mapping[str, str], heads: set[str]
) -> dict[str, Boundary]:
    """Where each input of a column-parallel layer enters: module path -> boundary.

    It belongs at the outermost module that was given the very same tensor and uses it for
    column-parallel layers only: such a module may read the tensor's shape before projecting it.

    Args:
        styles: module path -> style.
        heads: the paths of vocab-parallel heads, which enter on their own.
    """
    uses: dict[int, list[int]] = {}
    for index, op in enumerate(trace.ops):
        for number in op.inputs:
            uses.setdefault(number, []).append(index)

    def only_columns(number: int, outer: Call) -> bool:
        for index in uses.get(number, ()):
            if outer.first_op <= index < outer.last_op:
                user = trace.calls[trace.ops[index].call].path
                if styles.get(user) != "colwise":
                    return False
        return True

    entries: dict[str, tuple[int, tuple[Argument, ...], list[str]]] = {}
    for call in trace.calls:
        if styles.get(call.path) != "colwise" and call.path not in heads:
            continue
        given = stream_input(trace, call)
        if given is None:
            continue
        number, path, arguments = given, call.path, call.arguments[given]
        if call.path not in heads:
            for outer in trace.ancestors(call.parent):
                if number not in outer.arguments or not only_columns(number, outer):
                    break
                path, arguments = outer.path, outer.arguments[number]
        consumers = entries.setdefault(path, (number, arguments, []))[2]
        if call.path not in consumers:
            consumers.append(call.path)

    together: dict[int, list[str]] = {}
    for path, (number, _, _) in entries.items():
        together.setdefault(number, []).append(path)
    return {
        path: Boundary(arguments, tuple(consumers), tuple(together[number]))
        for path, (number, arguments, consumers) in entries.items()
    }


def find_elements(
    trace: Trace, styles: Mapping[str, str], layers: Pattern | None
) -> dict[str, Element]:
    """The elements of the layer stack: where row-parallel layers sit, or what ``layers`` names."""
    called = {call.path: call for call in reversed(trace.calls)}
    if layers is not None:
        paths = [path for path in called if layers.matches(path)]
    else:
        rows = [path for path, style in styles.items() if style == "rowwise"]
        paths = list(dict.fromkeys(_stacked(path) for path in rows))
    elements = {}
    for path in paths:
        call = called.get(path)
        if call is None:
            continue
        stream = _stream_of(trace, call)
        if stream is not None:
            output = 0 if call.output_is_tuple else None
            elements[path] = Element(stream, output)
    return elements


def _stacked(path: str) -> str:
    """The outermost numbered module around ``path``, or the model itself."""
    parts = path.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def _stream_of(trace: Trace, call: Call) -> Argument | None:
    if not call.outputs:
        return None
    shape = trace.shapes[call.outputs[0]]
    for number, arguments in call.arguments.items():
        if number in trace.floating and trace.shapes[number] == shape:
            return arguments[0]
    return None


@dataclass(frozen=True)
class Columns:
    """What the model does with the columns of its column-parallel layers.

    Attributes:
        heads: number and width of the heads that a layer's output is viewed as.
        misused: layers whose columns do more than keep to themselves, and how: such columns
            cannot be shared out as they are.
    """

    heads: Mapping[str, tuple[int, int]]
    misused: Mapping[str, str]


def follow_columns(trace: Trace, styles: Mapping[str, str]) -> Columns:
    """Follow the columns until they are heads, or enter the row-parallel layer.

    Only what acts on each column by itself is let through: a cut, a norm or a softmax over them
    would run on a part of them and compute something else.
    """
    flat = {
        c.outputs[0]: c.path for c in trace.calls if styles.get(c.path) == "colwise" and c.outputs
    }
    split: dict[int, str] = {}
    heads: dict[str, tuple[int, int]] = {}
    misused: dict[str, str] = {}
    for op in trace.ops:
        if styles.get(trace.calls[op.call].path) in ("colwise", "rowwise", "vocab"):
            continue
        name = op.name.removeprefix("aten.").split(".")[0]
        for number in op.inputs:
            if number in split and name in _CUTS:
                count = trace.shapes[number][-2]
                if any(trace.shapes[out][-2:-1] != (count,) for out in op.outputs):
                    misused.setdefault(split[number], f"its heads are cut into parts ({name})")
            if number not in flat:
                continue
            path, width = flat[number], trace.shapes[number][-1]
            same = [out for out in op.outputs if trace.shapes[out][-1:] == (width,)]
            if op.pointwise or name in KEEPING or (name in VIEWS and same):
                flat.update(dict.fromkeys(same, path))
                continue
            shape = _heads_of(trace.shapes[op.outputs[0]], width) if name in VIEWS else ()
            if len(shape) == 2:
                split[op.outputs[0]] = path
                heads.setdefault(path, (shape[0], shape[1]))
            elif shape:
                misused.setdefault(path, f"its output is viewed as {shape}: it is packed")
            else:
                what = "cut into parts" if name in _CUTS else "combined with each other"
                misused.setdefault(path, f"its columns are {what} ({name})")
    return Columns(heads, misused)


def _heads_of(shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The last dimensions of ``shape`` that ``width`` columns were split into."""
    count, product = 0, 1
    while product < width and count < len(shape):
        count += 1
        product *= shape[-count]
    return shape[-count:] if product == width and count > 1 else ()


def require_called(trace: Trace, styles: Mapping[str, str]) -> None:
    """Refuse what cannot be inferred: a sharded module that the traced forward never called."""
    called = {c.path for c in trace.calls}
    silent = [
        p for p, s in styles.items() if s in ("colwise", "rowwise", "vocab") and p not in called
    ]
    if silent:
        message = f"{silent[0]} was not called in the forward pass that was traced"
        hint = "give inputs= with which the model calls it, or leave it out of the plan"
        raise PlanError([Diagnostic(message, hint=hint)])
