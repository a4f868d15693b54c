"""What is decided for modules, and the choices that are open: data of the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tpplan.language import FrozenMap
from tpplan.styles import named
from tpplan.styles.replicate import REPLICATE


@dataclass(frozen=True)
class Decision:
    """The rule of a module.

    Attributes:
        options: as a plan file has them; why: a comment, of what could not be sharded.
    """

    style: str
    options: Mapping[str, object] = field(default_factory=FrozenMap)
    why: str = ""

    def because(self, why: str) -> Decision:
        """The same, with a comment."""
        return replace(self, why=why)


Variant = Mapping[str, Decision]
"""The decisions for the roles of a slot; a role without one has no rule."""


WHOLE = Decision(REPLICATE.name)


@dataclass(eq=False)
class Slot:
    """Modules that are decided on together, in all layers where they are alike.

    Attributes:
        name: for reports; the path of the first of them, with ``*`` for the layer.
        members: role -> the paths that have it.
        variants: what may become of them, the best first; ``at``: the one that is tried.
        sharded: how many variants, of a region from its entry to its exit, shard it; 0 of others.
        refused: why those before ``at`` were not taken, one line for each.
    """

    name: str
    members: Mapping[str, tuple[str, ...]]
    variants: tuple[Variant, ...]
    sharded: int = 0
    at: int = 0
    refused: list[str] = field(default_factory=list)

    @property
    def region(self) -> bool:
        """Whether it is one that may be sharded."""
        return self.sharded > 0

    @property
    def stacked(self) -> bool:
        """Whether it has the experts of a mixture."""
        return any(named(decision.style).stacked for decision in self.variants[0].values())

    @property
    def left_whole(self) -> bool:
        """Whether it is a region of which no way to shard it was taken."""
        return 0 < self.sharded <= self.at

    @property
    def paths(self) -> frozenset[str]:
        """All that it may have rules for."""
        return frozenset(path for held in self.members.values() for path in held)

    def within(self, prefixes: tuple[str, ...]) -> bool:
        """Whether something of it is in modules, of which the paths end in a dot."""
        return any(path.startswith(prefixes) for path in self.paths)

    @property
    def variant(self) -> Variant:
        """The one that is tried."""
        return self.variants[self.at]

    def advance(self, why: str) -> bool:
        """Go to the next variant, if there is one."""
        if self.at + 1 >= len(self.variants):
            return False
        self.refused.append(why)
        self.at += 1
        return True

    def decisions(self) -> dict[str, Decision]:
        """Path -> its rule, by the variant that is tried."""
        chosen, why = self.variant, ""
        if self.left_whole and self.refused:
            why = f"not sharded: {self.refused[0]}"
        return {
            path: chosen[role].because(why)
            for role in chosen
            for path in self.members.get(role, ())
        }
