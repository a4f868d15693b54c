"""``colwise``: each rank computes its own columns of the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules.conv import _ConvNd

from tpplan.compiled import ModulePlan
from tpplan.language import Rule
from tpplan.language.styles import WHOLE
from tpplan.layout import Rows
from tpplan.roles import linear
from tpplan.roles.lowered import LocalParameters
from tpplan.roles.members import OwnMembers
from tpplan.roles.norm import GatedWidthNorm, WidthNorm
from tpplan.roles.reads import Lent
from tpplan.styles.style import (
    Factor,
    Misfits,
    Roles,
    Style,
    cut_along,
    divisors,
    equal_parts,
    is_matrix,
    kept,
    made_weight,
    runs_as,
    without_weight,
)

if TYPE_CHECKING:
    from tpplan.observe.trace import Call
    from tpplan.planner.sizes import Sizes
    from tpplan.planner.walk import Walk


_NORMS = ("num_groups", "num_channels")
_COUNTS = ("groups", "out_channels", "in_channels")


class Colwise(Style):
    """A product, whatever works on columns or heads, or a list with a module for each head."""

    name = "colwise"
    columns = probed = True
    bare = frozenset({"dim", "packed"})
    hf = ("colwise",)

    def complaint(self, module: nn.Module, tp: int) -> str | None:
        """No weight, or modules of which the ranks cannot run different ones."""
        if runs_as(module, nn.Identity):
            return None  # where others of the family have a layer
        if runs_as(module, nn.LayerNorm) or runs_as(module, nn.RMSNorm):
            return None  # with a scale or without
        if not self.is_list(module):
            own = [p for p in module._parameters.values() if p is not None]
            # scales of columns, whatever they are called; a bias is none, where the weight is made
            scales = own and all(p.dim() == 1 for p in own) and not made_weight(module)
            return None if scales else without_weight(module)
        if len(module) % tp:  # type: ignore[arg-type]
            return f"tp {tp} does not divide its {len(module)} modules"  # type: ignore[arg-type]
        return _unlike(module)  # type: ignore[arg-type]

    def is_list(self, module: nn.Module) -> bool:
        """A module for each head, of which a rank runs those of its own heads."""
        return isinstance(module, nn.ModuleList)

    def low_rank(self, options: Mapping[str, object]) -> tuple[Factor, Factor] | None:
        """A works on the whole input; B makes columns of that, which lie as the module's do."""
        return (WHOLE, {}), (self.name, kept(options, "packed"))

    def placement(
        self, leaf: str, module: nn.Module, transposed: bool, rows: Rows | None
    ) -> Placement:
        """Cut by outputs."""
        columns = transposed or isinstance(module, nn.Embedding)
        dim = 1 if is_matrix(module, leaf) and columns else 0
        return Shard(dim) if rows is None else Rows(dim, rows.pieces)

    def place(self, parameter: torch.Tensor, rule: Rule, tp: int) -> Placement:
        """Cut along ``dim``, the first by default; where it is packed, each of its equal parts."""
        whole = cut_along(parameter, rule.options.get("dim", 0), tp)
        packed = rule.options.get("packed")
        if not isinstance(packed, Mapping) or "sizes" in packed:  # these hang on the module
            return whole
        return equal_parts(packed, int(parameter.shape[whole.dim]), tp, whole.dim)

    def lay_out(self, sizes: Sizes, path: str, rule: Rule, misfits: Misfits) -> None:
        """Rows by heads of a product; of everything else as many on each rank."""
        module = sizes.model.get_submodule(path)
        if path in sizes.columns:
            rows = sizes.geometry.rows(path, sizes.tp)
            if rows is not None:
                sizes.layouts[path] = rows
            return
        if "packed" in rule.options and module._parameters.get("weight") is not None:
            sizes.layouts[path] = sizes.geometry.rows_in(path, sizes.tp)
        for leaf, parameter in module._parameters.items():
            if parameter is None or path in sizes.layouts:
                continue
            dim = self.placement(leaf, module, False, None).dim  # type: ignore[attr-defined]
            size = int(parameter.shape[dim]) if parameter.dim() else 1
            if size % sizes.tp:
                said = f"{rule.style}: tp {sizes.tp} does not divide the {size} rows of its {leaf}"
                misfits.setdefault(divisors(size), {})[path] = said
                return
        counts = _COUNTS if isinstance(module, _ConvNd) else _NORMS
        if isinstance(module, _ConvNd) or runs_as(module, nn.GroupNorm):
            _count_groups(sizes, path, rule, misfits, *counts)

    def enter(self, walk: Walk, call: Call, given: int | None) -> None:
        """A product makes columns of what is whole; everything else works on columns."""
        sharded = walk.is_sharded(given)
        if call.path in walk.columns:
            walk.refuse_sharded(call, given)
        elif given is not None and not sharded:
            walk.flow.unsplit.append(call.path)

    def leave(self, walk: Walk, call: Call) -> None:
        """Columns."""
        walk.gives_columns(call)

    def roles(self, plan: ModulePlan, module: nn.Module, fused: type[nn.Module] | None) -> Roles:
        """A projection, a norm over the sharded width, a list; else its own code on its part."""
        if plan.projection:
            return ([] if fused is None else [fused]) + [linear.Colwise], None
        if plan.norm is not None:
            return [WidthNorm if plan.norm.gated is None else GatedWidthNorm], None
        if self.is_list(module):
            return [OwnMembers], None
        if isinstance(module, _ConvNd):  # code that goes on with a cache reads its weight
            return [Lent, LocalParameters], None
        return super().roles(plan, module, fused)

    def reasons(self, plan: ModulePlan) -> tuple[str, str]:
        """Of a norm; all else sends nothing by itself."""
        if plan.norm is None:
            return super().reasons(plan)
        if plan.norm.centred:
            return "means and squares over the sharded width", "gradients of means and squares"
        return "sum of squares over the sharded width", "gradient of the sum of squares"


def _unlike(members: nn.ModuleList) -> str | None:
    """What keeps the ranks from summing the gradients of different members with each other."""
    held = [list(member.named_parameters(remove_duplicate=False)) for member in members]
    if len({tuple((name, p.shape, p.dtype) for name, p in each) for each in held}) > 1:
        return "its modules have different parameters, and each rank runs others of them"
    every = [m for member in members for _, m in member.named_modules(remove_duplicate=False)]
    inner = [id(m) for m in every if any(p is not None for p in m._parameters.values())]
    if len(set(inner)) < len(inner):
        return "a module is in it several times, and each rank runs others of its modules"
    return None


def _count_groups(
    sizes: Sizes, path: str, rule: Rule, misfits: Misfits, counted: str, *channels: str
) -> None:
    """torch's norms and convolutions of groups of channels count them: each rank has its own."""
    module, rows = sizes.model.get_submodule(path), sizes.layouts.get(path)
    groups = int(getattr(module, counted))
    if groups % sizes.tp and rows is None:
        said = f"{rule.style}: tp {sizes.tp} does not divide its {groups} groups"
        misfits.setdefault(divisors(groups), {})[path] = said
        return
    whole = {name: int(getattr(module, name)) for name in (counted, *channels)}
    # of parts that ranks share each has more than its even share
    own = groups // sizes.tp if rows is None else rows.length() * groups // whole[channels[0]]
    sizes.attributes[path] = {name: (n, n * own // groups) for name, n in whole.items()}


COLWISE = Colwise()
