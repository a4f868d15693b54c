"""What the author of a plan need not write, read off a trace of the model.

Where the stream enters each sharded region, which modules share that boundary, what the elements
of the layer stack are, how many heads a projection has.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tpplan.language import Diagnostic, Pattern, PlanError
from tpplan.planner.compiled import Argument, Boundary, Element
from tpplan.planner.trace import Call, Trace

_VIEWS = ("aten.view", "aten._unsafe_view", "aten.reshape", "aten.unflatten")


def stream_input(trace: Trace, call: Call) -> tuple[int, Argument] | None:
    """The first floating tensor a module was given."""
    for number, argument in call.arguments.items():
        if number in trace.floating:
            return number, argument
    return None


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

    entries: dict[str, tuple[int, Argument, list[str]]] = {}
    for call in trace.calls:
        if styles.get(call.path) != "colwise" and call.path not in heads:
            continue
        entry = stream_input(trace, call)
        if entry is None:
            continue
        number, argument = entry
        path = call.path
        if call.path not in heads:
            for outer in trace.ancestors(call.parent):
                if number not in outer.arguments or not only_columns(number, outer):
                    break
                path, argument = outer.path, outer.arguments[number]
        consumers = entries.setdefault(path, (number, argument, []))[2]
        if call.path not in consumers:
            consumers.append(call.path)

    together: dict[int, list[str]] = {}
    for path, (number, _, _) in entries.items():
        together.setdefault(number, []).append(path)
    return {
        path: Boundary(argument, tuple(consumers), tuple(together[number]))
        for path, (number, argument, consumers) in entries.items()
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
    for number, argument in call.arguments.items():
        if number in trace.floating and trace.shapes[number] == shape:
            return argument
    return None


def find_heads(
    trace: Trace, styles: Mapping[str, str], model: nn.Module
) -> dict[str, tuple[int, int]]:
    """Heads and width of a head, for each column-parallel layer whose output is viewed by heads."""
    flat = _column_outputs(trace, styles)
    found: dict[str, tuple[int, int]] = {}
    for op in trace.ops:
        source = next((flat[i] for i in op.inputs if i in flat), None)
        if source is None or not op.outputs or not op.name.startswith(_VIEWS):
            continue
        width = int(model.get_submodule(source).out_features)  # type: ignore[arg-type]
        shape = trace.shapes[op.outputs[0]]
        if shape and shape[-1] == width:
            flat[op.outputs[0]] = source
            continue
        count, product = 0, 1
        while product < width and count < len(shape):
            count += 1
            product *= shape[-count]
        if product == width and count > 1:
            found.setdefault(source, (shape[-count], width // shape[-count]))
    return found


def _column_outputs(trace: Trace, styles: Mapping[str, str]) -> dict[int, str]:
    return {
        c.outputs[0]: c.path for c in trace.calls if styles.get(c.path) == "colwise" and c.outputs
    }


def find_cuts(trace: Trace, styles: Mapping[str, str]) -> dict[str, str]:
    """Column-parallel layers whose output is cut along its features: path -> the op that cuts."""
    cuts = ("aten.split", "aten.chunk", "aten.slice", "aten.select", "aten.unbind", "aten.narrow")
    flat = _column_outputs(trace, styles)
    found: dict[str, str] = {}
    for op in trace.ops:
        if op.name.startswith(cuts):
            for number in op.inputs:
                if number in flat and any(
                    trace.shapes[o][-1:] != trace.shapes[number][-1:] for o in op.outputs
                ):
                    found[flat[number]] = op.name.removeprefix("aten.").split(".")[0]
    return found


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
