"""A style from one file: what scales the columns of a region, and does nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.language import Rule
from tpplan.language.styles import Words
from tpplan.layout import Rows
from tpplan.styles import Style, divisors, register
from tpplan.styles.style import Misfits

if TYPE_CHECKING:
    from tpplan.observe.trace import Call
    from tpplan.planner.sizes import Sizes
    from tpplan.planner.walk import Walk


class Scale(Style):
    """Vectors, of which each rank has its columns'."""

    name = "scale"
    columns = probed = True

    def complaint(self, module: nn.Module, tp: int) -> str | None:
        """It has vectors and nothing else."""
        wide = [name for name, p in module.named_parameters() if p.dim() != 1]
        return f"{wide[0]} is not a vector" if wide else None

    def placement(
        self, leaf: str, module: nn.Module, transposed: bool, rows: Rows | None
    ) -> Placement:
        """Cut like the columns."""
        return Shard(0)

    def lay_out(self, sizes: Sizes, path: str, rule: Rule, misfits: Misfits) -> None:
        """As many on each rank."""
        for p in sizes.model.get_submodule(path).parameters():
            if len(p) % sizes.tp:
                said = f"{self.name}: tp {sizes.tp} does not divide its {len(p)} columns"
                misfits.setdefault(divisors(len(p)), {})[path] = said

    def enter(self, walk: Walk, call: Call, given: int | None) -> None:
        """It is given columns."""
        if not walk.is_sharded(given):
            walk.flow.unsplit.append(call.path)

    def leave(self, walk: Walk, call: Call) -> None:
        """And gives them."""
        walk.gives_columns(call)


SCALE = Scale()
register(SCALE, Words("scale the columns of a region"))
