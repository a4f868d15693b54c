"""Thin experts in a proof: what they take and give is made as wide as the stream, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpplan.compat import unmoded
from tpplan.compiled import CompiledPlan, ParameterPlan, ThinExperts
from tpplan.language import FrozenMap
from tpplan.planner.attributes import assign


class Narrow:
    """Around experts that are thin: what they take and give is multiplied by fixed factors."""

    def __init__(self, hidden: int, generator: torch.Generator) -> None:
        self.hidden, self.seed = hidden, int(torch.randint(2**31, (), generator=generator))

    def __call__(self, forward: Callable[..., torch.Tensor], given: Any) -> torch.Tensor:
        """``forward`` of arguments of which the first tensor is (..., width); as wide."""
        leaves, structure = tree_flatten(given)
        first = next(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
        width = leaves[first].shape[-1]
        generator = torch.Generator().manual_seed(self.seed)
        with unmoded():  # nothing is random to `exact`
            before, after = (
                torch.randn(*size, generator=generator, dtype=torch.float64) / size[0] ** 0.5
                for size in ((width, self.hidden), (self.hidden, width))
            )
        leaves[first] = leaves[first] @ before
        args, kwargs = tree_unflatten(leaves, structure)
        made: torch.Tensor = forward(*args, **kwargs) @ after
        return made


def thin_experts(
    modules: Mapping[str, nn.Module], compiled: CompiledPlan
) -> dict[str, ThinExperts]:
    """Of modules by path, those with experts that are to be thin."""
    found = {path: compiled.modules[path].thin for path in modules if path in compiled.modules}
    return {path: thin for path, thin in found.items() if thin is not None}


def narrow_down(twin: nn.Module, few: ThinExperts, generator: torch.Generator) -> None:
    """Have thin experts take and give what is as wide as the stream, by fixed factors."""
    for name, (whole, _) in few.attributes.items():
        assign(twin, name, whole)
    vars(twin)["_tpplan_narrow"] = Narrow(few.hidden, generator)


def with_thin(compiled: CompiledPlan, experts: Mapping[str, ThinExperts]) -> CompiledPlan:
    """The plan for a model of which some experts are thin."""
    plans = {
        path: replace(compiled.modules[path], attributes=few.attributes)
        for path, few in experts.items()
    }
    return replace(
        compiled,
        modules=FrozenMap({**compiled.modules, **plans}),
        parameters=FrozenMap({**compiled.parameters, **_thin_parameters(compiled, experts)}),
    )


def _thin_parameters(
    compiled: CompiledPlan, experts: Mapping[str, ThinExperts]
) -> dict[str, ParameterPlan]:
    found = {}
    for path, few in experts.items():
        for leaf, shape in few.shapes.items():
            entry = compiled.parameter(f"{path}.{leaf}")
            placed = few.cut.get(leaf, entry.placement)
            found[entry.name] = replace(entry, shape=shape, local_shape=shape, placement=placed)
    return found
