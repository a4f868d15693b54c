"""Mixtures of experts: the block around the experts, which enters once and is reduced once.

Inside of a block every rank computes with the whole of what has entered: routers are whole, the
experts give a part of a sum, and so do the row-parallel layers beside them, which are not reduced
by themselves. What the block gives of these is reduced at its end. Only what is linear may be done
with parts; the replay of the regions runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from tpplan.compiled import Summed
from tpplan.observe.trace import Call, Trace
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
