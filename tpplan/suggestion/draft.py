"""What is decided for modules, and the choices that are open: data of the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tpplan.language import FrozenMap


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


@dataclass
class Slot:
    """Modules that are decided on together, in all layers where they are alike.

    Attributes:
        name: for reports; the path of the first of them, with ``*`` for the layer.
        members: role -> the paths that have it.
        variants: what may become of them, the best first; ``at``: the one that is tried.
        region: whether they are a sharded region, from its entry to its exit.
        refused: why those before ``at`` were not taken, one line for each.
    """

    name: str
    members: Mapping[str, tuple[str, ...]]
    variants: tuple[Variant, ...]
    region: bool = False
    at: int = 0
    refused: list[str] = field(default_factory=list)

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
        chosen = self.variant
        return {
            path: chosen[role] for role in chosen for path in self.members.get(role, ())
        }
