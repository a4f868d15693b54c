"""From a ``CompiledPlan`` to the user's model, sharded."""

from tpplan.rewrite.apply import apply, idle, plan_of

__all__ = ["apply", "idle", "plan_of"]
