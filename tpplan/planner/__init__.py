"""Walk, match, resolve, check: from a plan and a model to a ``CompiledPlan``."""

from tpplan.planner.compile import compile_plan
from tpplan.planner.compiled import (
    Argument,
    Boundary,
    CompiledPlan,
    Draws,
    Element,
    KernelChoice,
    ModulePlan,
    ParameterPlan,
    WidthNorm,
)

__all__ = [
    "Argument",
    "Boundary",
    "CompiledPlan",
    "Draws",
    "Element",
    "KernelChoice",
    "ModulePlan",
    "ParameterPlan",
    "WidthNorm",
    "compile_plan",
]
