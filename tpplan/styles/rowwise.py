"""``rowwise``: each rank multiplies its columns of the input, and the ranks sum what they get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.compiled import ModulePlan
from tpplan.language import Rule
from tpplan.language.styles import WHOLE
from tpplan.layout import NOTHING, MisfitError, Rows
from tpplan.roles import linear
from tpplan.roles.linear import (
    RowwiseInside,
    RowwisePartial,
    RowwiseScattered,
    RowwiseTogether,
)
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
    without_weight,
)

if TYPE_CHECKING:
    from tpplan.observe.trace import Call
    from tpplan.planner.sizes import Sizes
    from tpplan.planner.walk import Walk


class Rowwise(Style):
    """A product that ends a sharded region."""

    name = "rowwise"
    sums = True
    bare = frozenset({"dim"})
    hf = ("rowwise",)

    def complaint(self, module: nn.Module, tp: int) -> str | None:
        """It must have a matrix."""
        wrong = without_weight(module)
        if wrong is None and module._parameters["weight"].dim() != 2:  # type: ignore[union-attr]
            return f"{type(module).__name__} does not multiply by a matrix"
        return wrong

    def scatters(self, options: Mapping[str, object]) -> bool:
        """As the plan says."""
        return options.get("output") == "shard"

    def stays(self, options: Mapping[str, object]) -> bool:
        """As the plan says."""
        return options.get("output") == "inside"

    def low_rank(self, options: Mapping[str, object]) -> tuple[Factor, Factor] | None:
        """A sums over the ranks, and B goes on with the sum."""
        if self.scatters(options):
            return None
        return (self.name, {**kept(options, "packed"), **kept(options, "output")}), (WHOLE, {})

    def placement(
        self, leaf: str, module: nn.Module, transposed: bool, rows: Rows | None
    ) -> Placement:
        """Cut by inputs; the bias is added once, after the sum."""
        if not is_matrix(module, leaf):
            return Replicate()
        return Shard(0 if transposed else 1) if rows is None else rows

    def place(self, parameter: torch.Tensor, rule: Rule, tp: int) -> Placement:
        """Cut along ``dim``, which the code sums over; a matrix as the weight of a Linear."""
        dim = rule.options.get("dim", 1 if parameter.dim() == 2 else None)
        if dim is None:
            message = f"which dimension of {tuple(parameter.shape)} is summed over?"
            raise MisfitError(message, "state it with 'dim:'")
        return cut_along(parameter, dim, tp)

    def lay_out(self, sizes: Sizes, path: str, rule: Rule, misfits: Misfits) -> None:
        """As many inputs on each rank, and as many outputs where they are shared out."""
        weight = sizes.model.get_submodule(path)._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            return  # said before
        tp = sizes.tp
        dim = 0 if path in sizes.transposed else 1
        width, packed = int(weight.shape[dim]), rule.options.get("packed")
        if not width:
            misfits.setdefault("", {})[path] = f"{rule.style}: {NOTHING}"
            return
        if width % tp:
            said = f"{rule.style}: tp {tp} does not divide its {width} inputs"
            misfits.setdefault(divisors(width), {})[path] = said
        elif isinstance(packed, Mapping) and "sizes" in packed:
            rows = sizes.sized_rows(f"{path}.weight", rule, weight, misfits, dim)
            if rows is not None and rows.shared():
                said = f"{rule.style}: packed: tp {tp} does not divide the units of each part"
                misfits.setdefault("", {})[path] = said
            elif rows is not None:
                sizes.layouts[path] = rows
        elif isinstance(packed, Mapping):
            try:
                sizes.layouts[path] = equal_parts(packed, width, tp, dim)
            except MisfitError as error:
                message, hint = error.args
                said = f"{rule.pattern.text}: {rule.style}: {message}"
                sizes.complaints.say(said, rule.option_positions["packed"], hint)
        outputs = int(weight.numel()) // width
        if self.scatters(rule.options) and outputs % tp:
            said = f"output: tp {tp} does not divide its {outputs} outputs"
            misfits.setdefault(divisors(outputs), {})[path] = said

    def enter(self, walk: Walk, call: Call, given: int | None) -> None:
        """It is given columns, of the rows of the stream."""
        if given is None:
            return
        if not walk.is_sharded(given):
            walk.flow.unsharded.append(call.path)
        if call.path not in walk.staying:
            walk.check_rows(call, given)

    def leave(self, walk: Walk, call: Call) -> None:
        """The stream, or columns of it."""
        if call.path in walk.partial:
            walk.gives_parts(call)
        elif call.path in walk.scattered:
            walk.gives_columns(call)
        elif call.path in walk.staying:
            walk.goes_on(call)
        else:
            walk.gives_sum(call, call.outputs)

    def roles(self, plan: ModulePlan, module: nn.Module, fused: type[nn.Module] | None) -> Roles:
        """By what becomes of the sum: it is whole, cut, or waits for others."""
        if plan.partial:
            return [RowwisePartial], None
        if self.scatters(plan.options):
            return [RowwiseScattered], None
        if self.stays(plan.options):
            return [RowwiseInside], None
        return [RowwiseTogether if plan.together else linear.Rowwise], None

    def reasons(self, plan: ModulePlan) -> tuple[str, str]:
        """f* and its conjugate."""
        return "its partial outputs, summed", "gradient of its output"


ROWWISE = Rowwise()
