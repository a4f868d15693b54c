"""One plan, tried on a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from tpplan.language import Plan, PlanError
from tpplan.planner import compile_plan
from tpplan.planner.known import Known
from tpplan.proof import prove


def examine(
    model: nn.Module,
    plan: Plan,
    tp: int,
    sequence_parallel: bool,
    inputs: Any,
    memory: Known,
) -> None:
    """Compile a plan and run it on simulated ranks.

    Args:
        memory: of other plans for the model.

    Raises:
        PlanError: where either refuses it.
    """
    known = memory.of_another_plan()
    compiled = compile_plan(model, plan, tp, sequence_parallel, inputs=inputs, known=known)
    prove(model, compiled, inputs, known)


def first_line(error: PlanError) -> str:
    """The first thing that an error says."""
    return error.diagnostics[0].message
