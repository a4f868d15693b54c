"""Stacked experts that are too large to be run, made thin: with few columns, of whatever size.

What belongs together in a module does not hang on how large it is; which of its sizes are the
width of the stream, and which count inner columns, is tried where its shapes leave it open.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves

from tpplan.compiled import ThinExperts
from tpplan.layout import Rows
from tpplan.observe.trace import Call, Numbered, Trace

_HIDDEN = (8, 6, 10)


@dataclass(frozen=True)
class Stacked:
    """How the ranks share stacked experts: the inner columns of all, or whole ones.

    Attributes:
        width: of how many each rank has as many: inner columns, or experts.
        cut: the parameters of which each rank has a part, by name.
        added: those that are whole on every rank, and are added to the sum once.
        attributes: numbers in the module's code that are a rank's own: (present, per rank).
        thin: the same of thin experts, where these are too large to be run.
        whole: whether a rank has whole experts.
    """

    width: int
    cut: Mapping[str, Placement]
    added: tuple[str, ...]
    attributes: Mapping[str, tuple[int, int]]
    thin: ThinExperts | None = None
    whole: bool = False


class NotStackedError(ValueError):
    """The parameters of a module are not those of experts that could be shared out."""


class WidthError(NotStackedError):
    """The ranks do not divide what they would share; ``width``: how many there are."""

    def __init__(self, width: int, tp: int, what: str = "inner columns of its experts") -> None:
        super().__init__(f"tp {tp} does not divide the {width} {what}")
        self.width = width


@dataclass(frozen=True)
class Thin:
    """What might be the sizes of thin experts.

    Attributes:
        width, hidden: of what they are given: in the model, and of the thin ones.
        columns, inner: how many inner columns there are: in the model, and in the thin ones.
        shapes: of the parameters; numbers: of the attributes in the module's code that are sizes.
    """

    width: int
    hidden: int
    columns: int
    inner: int
    shapes: Mapping[str, tuple[int, ...]]
    numbers: Mapping[str, int]

    def grown(
        self, found: Stacked, module: nn.Module, numbers: Mapping[str, int], tp: int
    ) -> Stacked:
        """What was found of the thin experts, as it is of the model's."""
        own = {name: (numbers[name], numbers[name] // tp) for name in found.attributes}
        sizes = {**{name: (n, n) for name, n in self.numbers.items()}, **found.attributes}
        few = ThinExperts(self.hidden, self.shapes, found.cut, sizes)
        grown = replace(found, attributes=own, thin=few)
        if found.whole:
            return grown
        if found.width != self.inner:
            raise NotStackedError("its inner columns are not where its shapes show them")
        if self.columns % tp:
            raise WidthError(self.columns, tp)
        cut: dict[str, Placement] = {}
        for name, placed in found.cut.items():
            if isinstance(placed, Rows):
                size = module.get_parameter(name).shape[placed.dim]
                units = self.shapes[name][placed.dim]
                cut[name] = Rows(
                    placed.dim,
                    [
                        [(start * size // units, stop * size // units) for start, stop in own]
                        for own in placed.pieces
                    ],
                )
            else:
                cut[name] = placed
        return replace(grown, width=self.columns, cut=cut)


def thinned(
    module: nn.Module, call: Call, trace: Trace, numbers: Mapping[str, int], tp: int
) -> Iterator[Thin]:
    """How large experts could be made thin: by their shapes, of which several may be right."""
    given = next((n for n in tree_leaves(call.given) if isinstance(n, Numbered)), None)
    if given is None or given.number not in trace.floating:
        raise NotStackedError("it is not given activations first")
    width = trace.shapes[given.number][-1]
    parameters = dict(module.named_parameters())
    others = [
        {int(n) for n in p.shape[1:]} - {width} or {width}
        for p in parameters.values()
        if p.dim() == 3
    ]
    columns = min((min(sizes) for sizes in others), default=0)
    if not columns:
        return
    inner = 2 * tp
    hidden = next(n for n in _HIDDEN if n not in (inner, 2 * inner))  # told from these

    def sizes(n: int) -> list[int]:
        """What a size may become."""
        found = [n // columns * inner] if n % columns == 0 and n // columns <= 2 else []
        return [*([hidden] if n == width else []), *found]

    options: list[list[tuple[str, Any]]] = []
    for name, parameter in parameters.items():
        if parameter.dim() not in (2, 3):
            return
        each = [sizes(int(n)) for n in parameter.shape[1:]]
        rest = [c for c in itertools.product(*each) if len(c) == 1 or hidden in c]
        rest = [c for c in rest if len(c) == 1 or any(n != hidden for n in c)]
        options.append([(name, (int(parameter.shape[0]), *c)) for c in rest])
    shapes = len(options)
    counts = {p.shape[0] for p in parameters.values() if p.dim() == 3}
    for name, n in numbers.items():
        small = [(name, size) for size in sizes(n)]
        # as many experts as there are columns: it may count either
        options.append([*small, (name, n)] if n in counts or not small else small)
    for chosen in itertools.product(*options):
        own = {name: n for name, n in chosen[shapes:] if n != numbers[name]}
        yield Thin(width, hidden, columns, inner, dict(chosen[:shapes]), own)
