"""Mixtures of experts: the block around the experts, which enters once and is reduced once.

Inside of a block every rank computes with the whole of what has entered: routers are whole, the
experts give a part of a sum, and so do the row-parallel layers beside them, which are not reduced
by themselves. What the block gives of these is reduced at its end. Only what is linear may be done
with parts; the replay of the regions runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from tpplan.compiled import Summed
from tpplan.observe.trace import Call, Trace
from tpplan.places import Place
from tpplan.planner.bare import BareRegion
from tpplan.styles import NONE, Style


def blocks(
    trace: Trace, styles: Mapping[str, Style], elements: Set[str] = frozenset()
) -> dict[str, BareRegion]:
    """The blocks around the experts of a model, as the regions that they are.

    Args:
        elements: paths that are no blocks (the elements of the stack).
    """
    found: dict[str, BareRegion] = {}
    for call in trace.calls:
        if not styles.get(call.path, NONE).stacked or call.parent is None:
            continue
        block = trace.calls[call.parent]
        region = _region(trace, block, styles)
        if region is not None:
            found[block.path] = region
    return found


def escapes(
    trace: Trace, regions: Mapping[str, BareRegion]
) -> tuple[dict[str, tuple[Place, ...]], list[str]]:
    """What leaves blocks besides their sum (what their routers gave): by the module that gives it.

    That is the innermost around the block, or itself, that gives it. Also the blocks of which
    something is used outside that no module gives.
    """
    found: dict[str, dict[Place, None]] = {}
    lost: list[str] = []
    for block in trace.calls:
        region = regions.get(block.path)
        if region is None or not region.block or region.summed is None:
            continue
        made = {
            n
            for op in trace.ops[block.first_op : block.last_op]
            for n in op.outputs
            if n in trace.floating
        }
        made -= {n for p in region.summed.outputs if (n := block.output_at(p)) is not None}
        around = list(trace.ancestors(block.index))
        for number in sorted(made & _used_outside(trace, block)):
            giving = next((c for c in around if number in c.outputs), None)
            inside = giving is None or _uses(trace, number, block.last_op, giving.last_op)
            places = () if giving is None else zip(giving.outputs, giving.places, strict=True)
            at = [place for n, place in places if n == number]
            if giving is None or inside or None in at:
                lost.append(block.path)
                continue
            found.setdefault(giving.path, {}).update(dict.fromkeys(p for p in at if p is not None))
    return {path: tuple(places) for path, places in found.items()}, list(dict.fromkeys(lost))


def _used_outside(trace: Trace, block: Call) -> set[int]:
    """The tensors that ops after a call use, or that calls around it give."""
    later = (n for op in trace.ops[block.last_op :] for n in op.inputs)
    given: Iterable[int] = (n for c in trace.ancestors(block.index) for n in c.outputs)
    return {*later, *given}


def _uses(trace: Trace, number: int, start: int, stop: int) -> bool:
    return any(number in op.inputs for op in trace.ops[start:stop])


def _region(trace: Trace, block: Call, styles: Mapping[str, Style]) -> BareRegion | None:
    parts: set[int] = set()
    rows: set[str] = set()
    for op in trace.ops[block.first_op : block.last_op]:
        style, path = NONE, ""
        for call in trace.ancestors(op.call):
            if call.index == block.index:
                break
            if call.path in styles and (styles[call.path].sums or styles[call.path].stacked):
                style, path = styles[call.path], call.path
        if style is not NONE:
            parts.update(op.outputs)
            rows.update([path] if style.sums else [])
        elif not parts.isdisjoint(op.inputs):
            parts.update(op.outputs)
    made = zip(block.outputs, block.places, strict=True)
    outputs = tuple(place for n, place in made if n in parts and place is not None)
    entering = {n: names for n, names in block.arguments.items() if n in trace.floating}
    if not outputs or not entering:
        return None
    return BareRegion(entering, Summed(outputs, ()), False, frozenset(parts), True, frozenset(rows))
