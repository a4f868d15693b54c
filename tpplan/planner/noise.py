"""Random numbers in the flow of tensors: where they are drawn, and what they are for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set

from tpplan.compat import Site
from tpplan.compiled import DrawnAt, DrawnFor
from tpplan.observe.trace import Op, Trace


def drawn_for(met: Mapping[Site, Set[str]], sequence_parallel: bool) -> DrawnFor | None:
    """What the random numbers are for that a module draws."""
    kinds = set[str]().union(*met.values())
    partial = kinds & ({"region", "stream"} if sequence_parallel else {"region"})
    if partial and kinds - partial:
        return "mixed"
    order: tuple[DrawnFor, ...] = ("region", "stream", "whole")
    return next((kind for kind in order if kind in kinds), None)


def drawn_at(met: Mapping[Site, Set[str]], sequence_parallel: bool) -> DrawnAt:
    """Where a module draws random numbers for several, what for at each place in its code."""
    if drawn_for(met, sequence_parallel) != "mixed":
        return ()
    kinds = ((site, drawn_for({site: of}, sequence_parallel)) for site, of in met.items())
    return tuple((site, kind) for site, kind in kinds if kind is not None and kind != "mixed")


# what takes nothing of a tensor but its shape
LIKE = (
    "aten.new_",
    *(f"aten.{made}_like" for made in ("empty", "zeros", "ones", "full")),
    *(f"aten.{drawn}_like" for drawn in ("rand", "randn", "randint")),
)


class Noise:
    """Tensors made of constants and noise alone, and what they met.

    Attributes:
        parts: tensors that are parts of a sum: what each rank draws for them must be the same.
        whole: what regions beside the stack gave, and what became of it: whole on every rank.
        leading: what streams have before their columns; before: how many dimensions that is.
        tokens: how many rows streams have where batch and sequence are one dimension.
        lengths: how long their sequences are.
    """

    def __init__(self, trace: Trace, parts: Set[int], dim: int, streams: Set[int]) -> None:
        self.trace, self.parts, self.dim = trace, parts, dim
        # a batch comes before the sequence or behind it
        self.leading = {trace.shapes[n][:-1][: max(2, dim + 1)] for n in streams}
        self.before = max(map(len, self.leading), default=dim + 1)
        self.tokens = {math.prod(sizes) for sizes in self.leading}
        self.lengths = {sizes[dim] for sizes in self.leading if len(sizes) > dim}
        self.whole: set[int] = set()
        self.drawn: dict[int, frozenset[int]] = {}
        self.extent: dict[int, tuple[int, ...]] = {}  # of noise: how many there are along each
        self.met: dict[int, set[str]] = {}

    def kind_of(self, op: Op, region: bool, rows: Sequence[int]) -> str:
        """What random numbers are for that an op meets.

        Args:
            rows: those of its inputs that are of the stream; what has lost the sequence is whole.
        """
        if not self.parts.isdisjoint(op.inputs):
            return "whole"
        if region:
            return "region"
        if rows and self.whole.issuperset(rows):
            self.whole.update(op.outputs)
        return "stream" if any(map(self.is_cut, rows)) else "whole"

    def is_cut(self, number: int) -> bool:
        """Whether a tensor of the stream has a sequence of which each rank has its rows."""
        shape = self.trace.shapes[number]
        if number in self.whole or len(shape) <= self.dim:
            return False
        if len(shape) == self.dim + 1:
            return shape[0] in self.tokens
        return shape[self.dim] > 1

    def note(self, index: int, op: Op, kind: str) -> None:
        """What random numbers are drawn for: where they are drawn by themselves, what they meet."""
        given = () if op.name.startswith(LIKE) else op.inputs
        inputs = [self.drawn.get(n) for n in given]
        noise = frozenset().union(*(n for n in inputs if n is not None))
        if op.random:
            self.met[index] = set()
            noise |= {index}
        if all(n is not None for n in inputs):
            self.drawn.update(dict.fromkeys(op.outputs, noise))
            self.extent.update((n, self._extent(op, n)) for n in op.outputs)
            return
        for drawn in noise:
            alike = [n for n in op.inputs if drawn in self.drawn.get(n, ())]
            one = alike and all(self._is_one(op, n, kind) for n in alike)
            self.met[drawn].add("whole" if one else kind)
        for number in op.outputs:
            self.drawn.pop(number, None)  # written to

    def _extent(self, op: Op, number: int) -> tuple[int, ...]:
        """The size of noise, 1 along what it is repeated along."""
        shape = self.trace.shapes[number]
        spread = op.pointwise or op.name.startswith("aten.expand")
        if op.random or not spread or op.name.startswith(LIKE) or not op.inputs:
            return shape
        given = [_aligned(self.extent[n], len(shape)) for n in op.inputs]
        return tuple(max(sizes) for sizes in zip(*given, strict=True))

    def _is_one(self, op: Op, number: int, kind: str) -> bool:
        """Whether all ranks need the same of some noise: it has nothing along what is cut."""
        if op.name.startswith(("aten.index.", "aten.index_select")):
            return number not in self.trace.floating  # which rows, of what is not cut
        others = [self.trace.shapes[n] for n in op.inputs if n not in self.drawn]
        return self.is_one(self.extent[number], max(others, key=len), kind)

    def is_one(self, extent: tuple[int, ...], shape: tuple[int, ...], kind: str) -> bool:
        """The same of noise of some extent that meets a tensor of a shape."""
        if math.prod(extent) == 1:
            return True
        dim = self._cut_in_region(shape) if kind == "region" else self._cut_in_stream(shape)
        # what has too few dimensions has nothing that is cut: a label for each sample
        return dim is not None and (dim >= len(shape) or _aligned(extent, len(shape))[dim] == 1)

    def _cut_in_stream(self, shape: tuple[int, ...]) -> int:
        if len(shape) == self.dim + 1:
            return 0
        # channels may come before the sequence
        places = [i for i, size in enumerate(shape) if size in self.lengths]
        return places[0] if len(places) == 1 else self.dim

    def _cut_in_region(self, shape: tuple[int, ...]) -> int | None:
        """Where columns or heads are in what is made of the stream, as models lay it out."""
        before = self.before
        if len(shape) <= before + 1:
            return len(shape) - 1 if shape[:-1] in self.leading or len(shape) <= before else 0
        if len(shape) > before + 2:
            return None
        # heads before their columns, or before the sequence
        behind = shape[:before] in self.leading and shape[-1] != shape[-2]
        return before if behind else before - 1

    def draws(self) -> Iterator[tuple[str, Site, set[str]]]:
        """The modules whose own code draws random numbers, where in it, and what for."""
        for index, met in self.met.items():
            op = self.trace.ops[index]
            yield self.trace.calls[op.call].path, op.site, met or {"whole"}


def _aligned(extent: tuple[int, ...], dims: int) -> tuple[int, ...]:
    """Sizes as they are spread over a tensor of so many dimensions."""
    return (1,) * (dims - len(extent)) + extent[max(len(extent) - dims, 0) :]
