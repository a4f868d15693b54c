"""What a sharded region holds besides its projections: scales, tables, its code's parameters."""

from __future__ import annotations

from collections.abc import Set

from torch import nn

from tpplan.styles.colwise import COLWISE
from tpplan.suggestion.draft import WHOLE, Decision
from tpplan.suggestion.regions import Region, Shapes


class Held:
    """What is likely to become of these, as decisions by path."""

    def __init__(self, model: nn.Module, region: Region, shapes: Shapes) -> None:
        self.model, self.region, self.shapes = model, region, shapes

    def tables(self) -> dict[str, Decision]:
        """As wide as a head: the same for every head; otherwise with a column for each."""
        found = {}
        for path in self.region.tables:
            width = self.model.get_parameter(f"{path}.weight").shape[-1]
            shared = width == self.shapes.head_dim != self.shapes.heads
            found[path] = WHOLE if shared else Decision(COLWISE.name)
        return found

    def scales(self) -> dict[str, Decision]:
        """As wide as a projection: cut as it is; otherwise the same for every head."""
        found = {}
        for path in self._lists_of_scales():
            module = self.model.get_submodule(path)
            own = {leaf: p for leaf, p in module._parameters.items() if p is not None}
            cut = isinstance(module, nn.ModuleList)
            cut |= any(p.numel() in self.shapes.outputs.values() for p in own.values())
            if cut or not self.shapes.heads or all(p.dim() < 2 for p in own.values()):
                found[path] = Decision(COLWISE.name) if cut else WHOLE
                continue
            for name in (f"{path}.{leaf}" for leaf in own):  # heads have a dimension of theirs
                found[name] = self._cut(name, {self.shapes.heads}) or WHOLE
        return found

    def _cut(self, name: str, sizes: Set[int]) -> Decision | None:
        """A parameter cut along the first dimension that has one of some sizes."""
        shape = self.model.get_parameter(name).shape
        at = next((i for i, size in enumerate(shape) if size in sizes), None)
        return None if at is None else Decision(COLWISE.name, {"dim": at} if at else {})

    def _lists_of_scales(self) -> list[str]:
        """The modules, a list in the place of its members where it has one for every head."""
        found: dict[str, None] = {}
        for path in self.region.scales:
            outer, _, last = path.rpartition(".")
            listed = outer and isinstance(self.model.get_submodule(outer), nn.ModuleList)
            found[outer if listed and last.isdigit() else path] = None
        return list(found)

    def bare(self) -> dict[str, Decision]:
        """Parameters of code in the region: cut along heads or columns, if they have any."""
        sizes = {self.shapes.heads, self.shapes.width, *self.shapes.outputs.values()} - {0, 1}
        found = {}
        for name in self.region.bare:
            decision = self._cut(name, sizes)
            if decision is not None:
                found[name] = decision
            elif self.model.get_parameter(name).dim() > 1:
                found[name] = WHOLE
        return found


def opposite(decision: Decision) -> Decision:
    """What else may become of it."""
    return WHOLE if decision.style == COLWISE.name else Decision(COLWISE.name)
