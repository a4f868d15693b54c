"""A model as it runs: one trace, of which all calls must be alike."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from tpplan.compat import FakeTensorMode, NeedsValuesError
from tpplan.language import Diagnostic, PlanError
from tpplan.observe.calls import Call, calls_for, drawn_ids
from tpplan.observe.chance import same_randomness
from tpplan.observe.examples import cannot_run
from tpplan.observe.shadow import computing_shadow_of, shadow_of
from tpplan.observe.trace import Numbers, Trace, record
from tpplan.observe.untouched import nothing_kept
from tpplan.planner.experts import hide, holds_stacks

_SEEDS = range(4)


def trace_of(model: nn.Module, inputs: Any, again: bool = True) -> Trace:
    """What ``model`` does in evaluation on fake tensors; the model is not changed.

    Args:
        inputs: a call the model accepts, where token ids are not one, or a list of calls.
        again: whether it is run in training too, under several seeds, and has to do the same.

    Raises:
        PlanError: where it cannot be run so, or does something else from call to call.
    """
    calls, stacked = calls_for(model, inputs), stacked_experts(model)
    with same_randomness(), nothing_kept(model):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            return _stable(_hidden(shadow_of(model, mode), stacked), mode, calls, again)
        except NeedsValuesError as error:
            computing = computing_shadow_of(model)
            if computing is None:
                raise cannot_run(error) from error
            return _stable(
                _hidden(computing, stacked), Numbers(), drawn_ids(model, calls, inputs), again
            )


def stacked_experts(model: nn.Module) -> set[str]:
    """The modules that hold several stacks of matrices of one number, as those of experts are."""
    modules = model.named_modules()
    return {p for p, m in modules if holds_stacks(m) and not isinstance(m, _ConvNd)}


def _hidden(shadow: nn.Module, stacked: Iterable[str]) -> nn.Module:
    hide(shadow, stacked)
    return shadow


def _stable(
    shadow: nn.Module, mode: FakeTensorMode | Numbers, calls: Sequence[Call], again: bool
) -> Trace:
    """The trace in evaluation, of a model that does the same under every seed, in training too."""
    found = None
    for training in (True, False) if again else (False,):
        told = []
        for seed in (_SEEDS[0], *_SEEDS) if again else _SEEDS[:1]:
            torch.manual_seed(seed)
            random.seed(seed)
            try:
                found = record(shadow.train(training), mode, calls)
            except (PlanError, *NeedsValuesError):
                raise
            except Exception as error:
                raise cannot_run(error) from error
            told.append(tuple((op.name, found.calls[op.call].path) for op in found.ops))
        # what a model computes once and keeps is in its first call alone
        if len(set(told[1:])) > 1:
            when = "in training" if training else "in evaluation"
            message = f"the model does something else from call to call {when}"
            hint = "a plan is of one structure: switch off what drops or picks layers at random"
            raise PlanError([Diagnostic(message, hint=hint)])
    assert found is not None
    return found
