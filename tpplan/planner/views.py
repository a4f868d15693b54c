"""How a model views the columns of its column-parallel layers: as heads, as parts."""

from __future__ import annotations

from tpplan.observe.trace import Trace

VIEWS = frozenset({"view", "_unsafe_view", "reshape", "unflatten", "unsqueeze", "squeeze"})
KEEPING = frozenset({"clone", "alias", "detach", "_to_copy", "contiguous", "lift_fresh"})
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm", "rms_norm"})
_CUTS = frozenset({"split", "split_with_sizes", "chunk", "slice", "narrow"})


def head_views(trace: Trace, columns: set[str]) -> dict[str, list[tuple[int, ...]]]:
    """The dimensions that a model views the columns of its column-parallel layers as.

    Columns are followed through what acts on each by itself, norms, and cuts of a packed layer.
    """
    # what several layers made (a layer and its adapter, added) are columns of each of them
    flat = {c.outputs[0]: (c.path,) for c in trace.calls if c.path in columns and c.outputs}
    seen: dict[str, list[tuple[int, ...]]] = {}
    for op in trace.ops:
        if trace.calls[op.call].path in columns:
            continue
        name = op.name.removeprefix("aten.").split(".")[0]
        for number in op.inputs:
            if number not in flat:
                continue
            paths, width = flat[number], trace.shapes[number][-1]
            for out in op.outputs:
                shape = trace.shapes[out]
                deeper = len(shape) - len(trace.shapes[number])
                heads = _heads_of(shape, width, deeper) if name in VIEWS else ()
                if len(heads) >= 2:
                    for path in paths:
                        seen.setdefault(path, []).append(heads)
                elif name in _CUTS or (
                    shape[-1:] == (width,) and (op.pointwise or name in KEEPING | VIEWS | _NORMS)
                ):
                    flat[out] = tuple(dict.fromkeys((*flat.get(out, ()), *paths)))
    return seen


def _heads_of(shape: tuple[int, ...], width: int, deeper: int) -> tuple[int, ...]:
    """The last dimensions of ``shape`` that ``width`` columns were split into.

    Args:
        deeper: how many dimensions the view added; a single head shows in nothing else.
    """
    count, product = 0, 1
    while product < width and count < len(shape):
        count += 1
        product *= shape[-count]
    if product == width and count == 1 and deeper == 1 and shape[-2] == 1:
        count = 2
    return shape[-count:] if product == width and count > 1 else ()
