"""Match, resolve, check: from a plan and what was observed of a model to a ``CompiledPlan``."""

from tpplan.planner.compile import compile_plan
from tpplan.planner.compiled import (
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
