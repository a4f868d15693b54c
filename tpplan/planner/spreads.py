"""Values of a whole sequence that layers spread over the rows of the stream (scales, gates).

Every rank has the same of them, and its rows give a part of their gradient. It is summed where a
replicated module in the element gives them, or where the element is given them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from tpplan.compiled import Element, Spread
from tpplan.observe.trace import Call, Trace
from tpplan.places import Argument, Place
from tpplan.planner.flow import Flow
from tpplan.styles import NONE, Style

Followed = tuple[Flow, Mapping[str, Element], Mapping[str, Spread]]
"""How tensors flow, the elements as they turn out, and what they spread over their rows."""
_Cut = tuple[str, Argument | None, Place]  # a module's path; an argument, or a place in its result


def followed(
    walk: Callable[[Mapping[str, Element], Mapping[str, Spread]], Flow],
    trace: Trace,
    styles: Mapping[str, Style],
    elements: Mapping[str, Element],
    dim: int,
) -> Followed:
    """Walk until it is known what is spread over the rows of the stream.

    Args:
        walk: follows the tensors, with such values as were found.
    """
    tried = _spread(walk, trace, styles, elements, dim)
    fewer = _without_vectors(trace, elements, dim)
    if fewer == elements or not tried[0].along:
        return tried
    other = _spread(walk, trace, styles, fewer, dim)
    return tried if other[0].along or other[0].met else other


def _spread(
    walk: Callable[[Mapping[str, Element], Mapping[str, Spread]], Flow],
    trace: Trace,
    styles: Mapping[str, Style],
    elements: Mapping[str, Element],
    dim: int,
) -> Followed:
    flow = walk(elements, {})
    if not flow.met:
        return flow, elements, {}
    found = spreads(trace, flow.met, styles, elements, dim)
    again = walk(elements, found)
    if not again.met and not again.twofold:
        return again, elements, found
    flow.twofold = again.twofold
    return flow, elements, {}


def _without_vectors(trace: Trace, elements: Mapping[str, Element], dim: int) -> dict[str, Element]:
    """The elements without arguments that are as wide as the sequence is long, by chance."""
    calls = {call.path: call for call in reversed(trace.calls)}

    def has_rows(path: str, argument: Argument) -> bool:
        number = calls[path].number_of(argument)
        return number is None or len(trace.shapes[number]) > dim + 1

    return {
        path: replace(one, others=tuple(a for a in one.others if has_rows(path, a)))
        for path, one in elements.items()
    }


def spreads(
    trace: Trace,
    met: Sequence[tuple[int, Sequence[int]]],
    styles: Mapping[str, Style],
    elements: Mapping[str, Element],
    dim: int,
) -> dict[str, Spread]:
    """Where the gradients are to be summed of what the stream meets in its elements.

    Args:
        met: ops on the stream, and the whole tensors that they are given.
        dim: the sequence's dimension.
    """
    within: dict[int, dict[int, set[int]]] = {}
    for index, numbers in met:
        op = trace.ops[index]
        rows = {trace.shapes[n][dim] for n in op.outputs if len(trace.shapes[n]) > dim}
        rank = max((len(trace.shapes[n]) for n in op.outputs), default=0)
        alike = (_is_one_row(trace.shapes[n], rank, dim) for n in numbers)
        if op.pointwise and 1 not in rows and all(alike):
            element = next(c for c in trace.ancestors(op.call) if c.path in elements)
            within.setdefault(element.index, {}).setdefault(index, set()).update(numbers)
    found: dict[str, Spread] = {}
    for number, meeting in within.items():
        element = trace.calls[number]
        stream = element.number_of(elements[element.path].argument)
        for path, argument, place in _cuts(trace, element, meeting, styles, stream):
            known = found.setdefault(path, Spread())
            if argument is None:
                outputs = dict.fromkeys((*known.outputs, place))
                found[path] = replace(known, outputs=tuple(outputs))
            else:
                arguments = dict.fromkeys((*known.arguments, argument))
                found[path] = replace(known, arguments=tuple(arguments))
    return found


def _is_one_row(shape: Sequence[int], rank: int, dim: int) -> bool:
    """Whether a tensor has the same for every position, beside one of ``rank`` dimensions."""
    at = dim - (rank - len(shape))
    return at < 0 or shape[at] == 1


def _cuts(
    trace: Trace,
    element: Call,
    met: Mapping[int, Set[int]],
    styles: Mapping[str, Style],
    stream: int | None,
) -> Iterable[_Cut]:
    """Where in the element what becomes of tensors is given or made, none after another.

    The nearest to where they meet the stream: what is made there is often much smaller than the
    weights that made it, whose gradients are whole then.
    """
    made: dict[int, _Cut] = {}
    for call in trace.calls:
        inside = any(c.index == element.index for c in trace.ancestors(call.parent))
        if inside and styles.get(call.path, NONE).apart:
            for number, place in zip(call.outputs, call.places, strict=True):
                if place is not None:  # the outermost has it
                    made.setdefault(number, (call.path, None, place))
    while True:
        ends = _ends(trace, element, met, made.keys())
        given = {n for n in ends if n in element.arguments and n not in made and n != stream}
        after = _after(trace, element, met, (ends & made.keys()) | given)
        if not after:
            break
        made = {number: cut for number, cut in made.items() if number not in after}
    cuts = [made[n] for n in sorted(ends & made.keys())]
    return cuts + [(element.path, name, ()) for n in given for name in element.arguments[n]]


def _ends(trace: Trace, element: Call, met: Mapping[int, Set[int]], stops: Set[int]) -> set[int]:
    """What tensors were made of: the nearest of ``stops``, and what the element did not make."""
    pending, ends = set[int](), set[int]()
    for index in reversed(range(element.first_op, element.last_op)):
        op = trace.ops[index]
        reached = pending.intersection(op.outputs)
        pending -= reached
        ends |= reached & stops
        pending.update(op.inputs if reached - stops else ())
        pending |= met.get(index, set())
    return ends | pending


def _after(trace: Trace, element: Call, met: Mapping[int, Set[int]], numbers: Set[int]) -> set[int]:
    """Those of some tensors that others of them have become."""
    reached, after = set(numbers), set[int]()
    for index in range(element.first_op, element.last_op):
        op = trace.ops[index]
        # where the stream meets them it becomes none of them
        if index not in met and not reached.isdisjoint(op.inputs):
            after.update(numbers & set(op.outputs))
            reached.update(op.outputs)
    return after
