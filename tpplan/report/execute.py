"""A dry run: the rewritten model, forward and backward, on fake tensors and a fake group."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tpplan.compat import FakeTensorMode, fake_world, quiet
from tpplan.language import Diagnostic, Plan, PlanError
from tpplan.planner import CompiledPlan, compile_plan
from tpplan.planner.shadow import call_for, shadow_of
from tpplan.planner.trace import fake_inputs
from tpplan.report.recorder import Collective, Recorder
from tpplan.report.report import Report
from tpplan.rewrite import apply


def dry_run(
    model: nn.Module,
    plan: Plan,
    tp: int,
    batch: int,
    seq: int,
    sequence_parallel: bool | None = None,
    kernels: str | Mapping[str, str] | None = None,
    inputs: Any = None,
) -> Report:
    """What ``plan`` does to ``model`` on ``tp`` ranks, by executing it abstractly.

    The model is not changed; it may be on the meta device. Needs no process group, and leaves one
    that is running alone.

    Args:
        batch, seq: the shape of the token ids.
        inputs: a call the model accepts, instead of token ids.

    Raises:
        PlanError: as ``parallelize`` does.
    """
    compiled = compile_plan(model, plan, tp, sequence_parallel, kernels, inputs)
    call = call_for(model, inputs, batch, seq)
    collectives = execute(model, compiled, call)
    return Report(type(model).__name__, compiled, batch, seq, tuple(collectives))


def execute(
    model: nn.Module, compiled: CompiledPlan, call: tuple[tuple[Any, ...], dict[str, Any]]
) -> list[Collective]:
    """The collectives of one forward and backward of the rewritten model, on the first rank."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shadow = shadow_of(model, mode).eval()
    shadow.training = model.training  # whether a loss leaves the logits sharded goes by it
    args, kwargs = fake_inputs(mode, call)
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(fake_world(compiled.tp)) if compiled.tp > 1 else None
        stack.enter_context(mode)
        apply(shadow, compiled, mesh, src_data_rank=None)
        stack.enter_context(quiet())
        stack.enter_context(recorder)
        try:
            out = shadow(*args, **kwargs)
        except Exception as error:
            message = f"the sharded model cannot be run at tp {compiled.tp}: {error}"
            raise PlanError([Diagnostic(message)]) from error
        with recorder.during("backward"):
            result = _result(out)
            if result is not None:
                result.backward(torch.ones_like(result))
    return recorder.collectives


def _result(out: Any) -> torch.Tensor | None:
    """What training would start its backward from: the loss, or else the first output."""
    loss = getattr(out, "loss", None)
    leaves = [loss] if isinstance(loss, torch.Tensor) else tree_leaves(out)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf.to_local() if isinstance(leaf, DTensor) else leaf
    return None
