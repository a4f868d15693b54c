"""From a ``CompiledPlan`` to the user's model, sharded."""

from tpplan.rewrite.apply import apply, plan_of

__all__ = ["apply", "plan_of"]
