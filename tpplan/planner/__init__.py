"""Match, resolve, check: from a plan and what was observed of a model to a ``CompiledPlan``."""

from tpplan.planner.compile import compile_plan, speaks_of_all

__all__ = ["compile_plan", "speaks_of_all"]
