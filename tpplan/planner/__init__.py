"""Walk, match, resolve, check: from a plan and a model to a ``CompiledPlan``."""

from tpplan.planner.compile import compile_plan
from tpplan.planner.compiled import (
    Argument,
    Boundary,
    CompiledPlan,
    Draws,
    Element,
    ModulePlan,
    ParameterPlan,
    WidthNorm,
)
from tpplan.planner.forms import (
    GatedForm,
    GeluForm,
    KernelChoice,
    NormForm,
    UnbiasedForm,
)

__all__ = [
    "Argument",
    "Boundary",
    "CompiledPlan",
    "Draws",
    "Element",
    "GatedForm",
    "GeluForm",
    "KernelChoice",
    "ModulePlan",
    "NormForm",
    "ParameterPlan",
    "UnbiasedForm",
    "WidthNorm",
    "compile_plan",
]
