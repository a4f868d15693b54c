"""Whether an op acts on each position of the stream by itself, found by running it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence, Set

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from tpplan.observe.trace import Numbered, Op, Trace

_LARGE = 2**24


def acts_on_each(op: Op, trace: Trace, streams: Set[int], rows: Sequence[int], dim: int) -> bool:
    """Whether one position's result hangs on that position alone, wherever in the sequence it is.

    Ops that are alike are run once: equal layers have the same ones.

    Args:
        streams: the tensors that have the rows of the stream, as they are or flattened to tokens.
        rows: the stream's dimensions up to that of the sequence; dim: that dimension.
    """
    tensors = {*op.inputs, *op.outputs}
    ours = sorted(set(op.inputs).intersection(streams))
    tokens = math.prod(rows)
    shapes = {n: trace.shapes[n] for n in tensors}
    aligned = all(
        shapes[n][: dim + 1] == tuple(rows) or shapes[n][:1] == (tokens,)
        for n in (*ours, *op.outputs)
    )
    small = sum(math.prod(shape) for shape in shapes.values()) <= _LARGE
    if op.run is None or not (aligned and small) or tensors & trace.complex:
        return False
    kind = (_kind(op, trace, streams), tuple(rows), dim)
    if kind not in trace.alone:
        try:
            trace.alone[kind] = _alone(op, trace, ours, rows, dim)
        except Exception:  # what cannot be run on random numbers is not known
            trace.alone[kind] = False
    return trace.alone[kind]


def _kind(op: Op, trace: Trace, streams: Set[int]) -> Hashable:
    """What ``_alone`` finds of an op hangs on this, and on what the stream is."""
    leaves, spec = tree_flatten(op.run)
    places = {n: i for i, n in enumerate(dict.fromkeys(op.inputs))}

    def told(leaf: object) -> Hashable:
        if not isinstance(leaf, Numbered):
            return type(leaf), leaf
        n = leaf.number
        return places[n], trace.shapes[n], n in trace.floating, n in streams

    made = tuple(trace.shapes[n] for n in op.outputs)
    return tuple(map(told, leaves)), str(spec), made


def _alone(op: Op, trace: Trace, ours: Sequence[int], rows: Sequence[int], dim: int) -> bool:
    tokens, shapes = math.prod(rows), trace.shapes
    generator = torch.Generator().manual_seed(0)

    def by_token(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(tokens, -1)

    def run(given: Mapping[int, torch.Tensor]) -> torch.Tensor:
        assert op.run is not None
        func, values = op.run
        args, kwargs = tree_map_only(Numbered, lambda n: given[n.number].clone(), values)
        made = (x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor))
        return torch.cat([by_token(x).double() for x in made], 1)

    def drawn(number: int) -> torch.Tensor:
        if number not in trace.floating:  # which of several: of two there are in most cases
            return torch.randint(0, 2, shapes[number], generator=generator)
        return torch.randn(shapes[number], generator=generator, dtype=torch.float64)

    given = {n: drawn(n) for n in op.inputs}
    order = torch.arange(tokens).view(tuple(rows)).flip(dim).flatten()
    whole = run(given)
    turned = {n: by_token(given[n])[order].view(shapes[n]) for n in ours}
    if not torch.allclose(run({**given, **turned}), whole[order], equal_nan=True):
        return False
    for token in (0, tokens // 2, tokens - 1):
        changed = {n: by_token(given[n]).clone() for n in ours}
        for n, x in changed.items():
            x[token] = by_token(drawn(n))[token]
        found = run({**given, **{n: x.view(shapes[n]) for n, x in changed.items()}})
        others = torch.arange(tokens) != token
        if not torch.allclose(found[others], whole[others], equal_nan=True):
            return False
    return True
