"""Column-parallel layers that look like several projections in one, by what is done to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpplan.observe.trace import Trace
from tpplan.planner.infer import sources
from tpplan.planner.views import KEEPING, VIEWS, head_views
from tpplan.styles import NONE, Style

_CUTS = frozenset({"split", "split_with_sizes", "chunk"})
_NAMES = {2: "[gate, up]", 3: "[q, k, v]"}
_OF_HEADS = {2: "[k, v]", 3: "[q, k, v]"}
_MOST = 4


def with_parts(views: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The first view of columns that has 2 or 3 in front of heads; empty where there is none."""
    return next((dims for dims in views if len(dims) > 2 and dims[0] in _OF_HEADS), ())


def packed_heads(count: int) -> str:
    """What to write for parts that a view has in front of the heads."""
    return f"packed: {_OF_HEADS[count]}"


def looks_packed(trace: Trace, path: str, styles: Mapping[str, Style]) -> str | None:
    """What to write for a layer that the model views or cuts as parts, or that is too wide."""
    view = with_parts(head_views(trace, {path}).get(path, ()))
    if view:
        return packed_heads(view[0])
    count = _cut_in(trace, path)
    if count == 1:
        count = _times_too_wide(trace, path, styles)
    return f"packed: {_NAMES.get(count, '[...]')}" if 1 < count <= _MOST else None


def _cut_in(trace: Trace, path: str) -> int:
    """Into how many parts a layer's columns are cut; 1 where they are not."""
    flat = {c.outputs[0] for c in trace.calls if c.path == path and c.outputs}
    for op in trace.ops:
        given = next((n for n in op.inputs if n in flat), None)
        if given is None or trace.calls[op.call].path == path:
            continue
        name = op.name.removeprefix("aten.").split(".")[0]
        width = trace.shapes[given][-1:]
        narrower = [n for n in op.outputs if trace.shapes[n][-1:] != width]
        if name in _CUTS and narrower:
            return len(op.outputs)
        if op.pointwise or name in KEEPING or name in VIEWS:
            flat.update(n for n in op.outputs if n not in narrower)
    return 1


def _times_too_wide(trace: Trace, path: str, styles: Mapping[str, Style]) -> int:
    """How many times the inputs of the row-parallel layer after it a layer makes."""
    made = next(c for c in trace.calls if c.path == path and c.outputs)
    wide = trace.shapes[made.outputs[0]][-1]
    for call in trace.calls:
        if styles.get(call.path, NONE).sums and path in sources(trace, call, styles):
            taken = next(trace.shapes[n][-1] for n in call.arguments if n in trace.floating)
            return 1 if wide % taken else wide // taken
    return 1
