"""The plan that is meant by "auto", where no shipped one is the model's: found and proved now."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch import nn

from tpplan.language import Diagnostic, Plan, PlanError
from tpplan.planner import speaks_of_all
from tpplan.shipped import PlanSource, load_plan, not_listed
from tpplan.wrapping import adapted_model


def plan_for(
    model: nn.Module,
    plan: PlanSource,
    tp: int,
    inputs: Any = None,
    sequence_parallel: bool | None = None,
) -> Plan:
    """The plan that is meant; of "auto" a suggestion, where no shipped plan is the model's.

    One of its family is, if that speaks of all of its layers.

    Args:
        sequence_parallel: what is asked of the plan.

    Raises:
        PlanError: where there is none, and where what was found cannot do what is asked.
    """
    inner = adapted_model(model)
    try:
        loaded = load_plan(plan, inner)
        listed = plan != "auto" or inner is not model or type(model).__name__ in loaded.models
        if listed or speaks_of_all(model, loaded):
            return loaded
        missing = not_listed(model)
    except PlanError as error:
        if plan != "auto" or inner is not model:
            raise
        missing = error
    from tpplan.suggestion import find

    tp = max(tp, 2)
    try:
        found = find(model, tp, inputs)
    except PlanError as error:
        raise PlanError([*missing.diagnostics, *error.diagnostics]) from error
    if sequence_parallel and found.without:
        message = (
            f"no plan was found that shards the sequence of {type(model).__name__}, one without "
            f"was; under sequence parallelism {found.without}"
        )
        hint = (
            "leave sequence_parallel out, or write what tpplan.suggest gives to a file and change "
            "it: of that one every problem has its line"
        )
        raise PlanError([*missing.diagnostics, Diagnostic(message, hint=hint)])
    if not dist.is_initialized() or dist.get_rank() == 0:
        told = (
            f"no shipped plan is for {type(model).__name__}: it gets one that was found and proved "
            f"now. To keep it, write tpplan.suggest(model, tp={tp}).text to a file"
        )
        warnings.warn(told, stacklevel=4)
    return found.plan
