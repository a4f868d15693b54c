"""What follows from how tensors are laid out as they flow through a traced model; see ``walk``."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from tpplan.compat import Site
from tpplan.compiled import Detour
from tpplan.places import Argument


@dataclass
class Flow:
    """What was found.

    Attributes:
        in_region, on_stream, elsewhere: parameter names by what they met: sharded activations, a
            rank's rows of the stream, what is whole.
        given: what the model is given, by what it met: the same three.
        users: of parameters, the modules that compute with them, by whether that is in a region.
        unsharded: row-parallel layers whose input is whole.
        twice: column-parallel layers and heads whose input is already sharded, and the layers
            that sharded it.
        unsplit: modules that are to run on sharded columns, but are given a whole tensor.
        unreduced: elements, or the model (""), that sharded activations leave.
        mixed: outside the elements, modules (by path) that combine the stream with a whole
            tensor, and the path of the module that made that tensor.
        giving: of those, by path, the module that gave them the stream, if it runs on its rows.
        rowless: outside the elements, modules that are to run on rows of the stream, but are given
            a tensor without them, and its shape.
        torn: modules that combine sharded activations with whole ones that gradients flow
            through, and the module those came from; and torn_stream, the same for the stream.
        made_of: of those, by path, the parameter of the module's own that made it, if one did.
        met: the ops in which the stream of an element meets such tensors, and which.
        twofold: modules that use otherwise what is spread over the rows of the stream.
        along: modules in an element that combine positions of the stream, and the op.
        inlined: of those, the elements, whose own code does it.
        escaping: elements that give out more than the stream itself.
        whole: boundaries in an element, with the argument, that are given a whole tensor; streamed:
            those that are given the stream.
        flattened: row-parallel layers whose output is not of the stream's shape.
        detours: replicated modules in the stack that are given all of it, and what they take of it.
        inside: modules with a rule of another kind that run inside of such.
        region: tensors that ranks have their own columns of, or make from what entered a region.
        whole_in_region: of those, what is made of what entered alone, and whole on every rank.
        draws: modules that draw random numbers in their own forward, and, at each place in the
            code, what for: "region", "stream", "whole".
    """

    in_region: set[str] = field(default_factory=set)
    on_stream: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    given: tuple[set[Argument], set[Argument], set[Argument]] = field(
        default_factory=lambda: (set(), set(), set())
    )
    users: dict[tuple[str, bool], str] = field(default_factory=dict)
    unsharded: list[str] = field(default_factory=list)
    twice: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unsplit: list[str] = field(default_factory=list)
    unreduced: list[str] = field(default_factory=list)
    mixed: dict[str, str] = field(default_factory=dict)
    giving: dict[str, str] = field(default_factory=dict)
    rowless: dict[str, tuple[int, ...]] = field(default_factory=dict)
    torn: dict[str, str] = field(default_factory=dict)
    torn_stream: dict[str, str] = field(default_factory=dict)
    made_of: dict[str, str] = field(default_factory=dict)
    met: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    twofold: list[str] = field(default_factory=list)
    along: dict[str, str] = field(default_factory=dict)
    inlined: list[str] = field(default_factory=list)
    escaping: list[str] = field(default_factory=list)
    whole: set[tuple[str, str]] = field(default_factory=set)
    streamed: set[tuple[str, str]] = field(default_factory=set)
    flattened: list[str] = field(default_factory=list)
    detours: dict[str, Detour] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    region: set[int] = field(default_factory=set)
    whole_in_region: set[int] = field(default_factory=set)
    draws: dict[str, dict[Site, set[str]]] = field(default_factory=dict)

    def note_drawing(self, path: str, site: Site, kinds: Set[str]) -> None:
        """A module's code draws random numbers, for these."""
        self.draws.setdefault(path, {}).setdefault(site, set()).update(kinds)


def given_in_parts(flows: Iterable[Flow], sequence_parallel: bool) -> tuple[Argument, ...]:
    """What the model is given of which each rank has a part of the gradient, in all its uses."""
    columns, rows, whole = (
        set[Argument]().union(*met) for met in zip(*(flow.given for flow in flows), strict=True)
    )
    found = (columns | rows) - whole if sequence_parallel else columns - rows - whole
    return tuple(sorted(found, key=str))
