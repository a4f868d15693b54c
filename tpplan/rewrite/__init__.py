"""From a ``CompiledPlan`` to the user's model, sharded."""

from tpplan.rewrite.apply import apply, device_type, idle, plan_of

__all__ = ["apply", "device_type", "idle", "plan_of"]
