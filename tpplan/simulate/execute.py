"""One training step of the rewritten model, on fake tensors and a fake process group."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tpplan.comm.meshes import ep_of, tp_of
from tpplan.comm.pace import Pace
from tpplan.compat import (
    FakeTensorMode,
    NeedsValuesError,
    answers,
    fake_world,
    quiet,
    uncached,
    uncompiled,
)
from tpplan.compiled import CompiledPlan
from tpplan.language import Diagnostic, PlanError
from tpplan.observe.calls import Call
from tpplan.observe.shadow import shadow_of
from tpplan.observe.trace import fake_inputs
from tpplan.observe.untouched import nothing_kept
from tpplan.planner.experts import hide, stacked_in
from tpplan.rewrite import apply
from tpplan.simulate.optimizers import take_step
from tpplan.simulate.steps import Step
from tpplan.simulate.tracker import Tracker
from tpplan.simulate.values import EACH, RealValues


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        optimizer: makes it from the parameters; None where no step is taken.
        max_norm: to which gradients are clipped; None where they are not.
        master_weights: whether 16-bit parameters have float32 copies.
        checkpointing: whether each element of the layer stack is recomputed in backward.
    """

    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None
    max_norm: float | None = 1.0
    master_weights: bool = True
    checkpointing: bool = False


@dataclass(frozen=True)
class Execution:
    """What one step did on the first rank: its steps in order, and the optimizer's bytes."""

    steps: tuple[Step, ...]
    optimizer: Mapping[str, int] = field(default_factory=dict)

    @property
    def stepping(self) -> tuple[Step, ...]:
        """The steps of the optimizer."""
        return tuple(step for step in self.steps if step.phase == "optimizer")


_NUMBERS = (
    "its code looks at numbers that it computes, of which a dry run has none; give them with "
    "inputs=, where it takes them as an argument"
)


def execute(
    model: nn.Module,
    compiled: CompiledPlan,
    call: Call,
    training: Training,
    stacks: tuple[str, ...] = (),
    pace: Pace | None = None,
    like: Execution | None = None,
) -> Execution:
    """Forward, backward and optimizer step of ``model`` rewritten by ``compiled``.

    Args:
        model: is not changed; may be on the meta device.
        stacks: paths of the lists of modules whose elements the steps are told apart by.
        pace: see ``apply``.
        like: one of the same model, trained in the same way but for recomputation, which changes
            nothing of the optimizer's step: that one's is taken for this.

    Raises:
        PlanError: where the rewritten model cannot be run.
    """
    about = model, compiled, call, training, stacks, pace, like
    try:
        return _executed(*about)
    except PlanError as error:
        if not isinstance(error.__cause__, NeedsValuesError):
            raise
    return _executed(*about, spread=True)


def _executed(
    model: nn.Module,
    compiled: CompiledPlan,
    call: Call,
    training: Training,
    stacks: tuple[str, ...],
    pace: Pace | None,
    like: Execution | None,
    spread: bool = False,
) -> Execution:
    """See ``execute`` and, for ``spread``, ``RealValues``."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with answers.Answering():
        shadow = shadow_of(model, mode)
    args, kwargs = fake_inputs(mode, call, keep_ids=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(nothing_kept(model))
        world = fake_world(compiled.tp, ep=compiled.ep)
        mesh = stack.enter_context(world) if compiled.tp * compiled.ep > 1 else None
        stack.enter_context(mode)
        _rewrite(shadow, compiled, mesh, pace)
        if training.checkpointing:
            _checkpoint(shadow, compiled)
            if "use_cache" in inspect.signature(shadow.forward).parameters:
                # transformers does so too: recomputation would append to the cache once more
                kwargs = {"use_cache": False, **kwargs}
        lists = {path: shadow.get_submodule(path) for path in stacks}
        dimensions = {} if mesh is None else _dimensions(mesh, compiled)
        tracker = Tracker(shadow, lists, dimensions, EACH if spread else ())
        stack.enter_context(quiet())
        stack.enter_context(uncompiled())
        stack.enter_context(RealValues(spread))
        stack.enter_context(tracker)
        stack.enter_context(uncached(mode))  # the tracker asks for the like once
        try:
            out = shadow(*args, **kwargs)
        except Exception as error:
            ep = f", ep {compiled.ep}" if compiled.ep > 1 else ""
            message = f"the sharded model cannot be run at tp {compiled.tp}{ep}: {error}"
            needs = isinstance(error, NeedsValuesError)
            raise PlanError([Diagnostic(message, hint=_NUMBERS if needs else None)]) from error
        with tracker.during("backward"):
            result = objective(out)
            if result is not None:
                result.backward(torch.ones_like(result))
            del out, result
        tracker.gradients(shadow)
        if like is not None:
            return Execution((*tracker.steps(), *like.stepping), like.optimizer)
        held = _stepped(shadow, training, tracker)
    return Execution(tracker.steps(), held)


def _rewrite(
    shadow: nn.Module, compiled: CompiledPlan, mesh: DeviceMesh | None, pace: Pace | None
) -> None:
    """Make of a model's shadow the first rank's."""
    with answers.Answering():
        apply(shadow, compiled, mesh, src_data_rank=None, outside=False, pace=pace)
    if mesh is None:
        hide(shadow, stacked_in(compiled))


def _stepped(model: nn.Module, training: Training, tracker: Tracker) -> Mapping[str, int]:
    """The optimizer's step; its bytes for each parameter."""
    if training.optimizer is None:
        return {}
    with tracker.during("optimizer"):
        return take_step(model, training.optimizer, training.max_norm, training.master_weights)


def _dimensions(mesh: DeviceMesh, compiled: CompiledPlan) -> dict[str, str]:
    """What the dimensions of the mesh are, by the names of their process groups."""
    parts = {"ep": ep_of(mesh, compiled.ep), "tp": tp_of(mesh, compiled.ep)}
    return {str(m.get_group().group_name): name for name, m in parts.items() if m is not None}


def _checkpoint(model: nn.Module, compiled: CompiledPlan) -> None:
    """Have every element of the layer stack keep its inputs only, and run again in backward."""
    for path, plan in compiled.modules.items():
        if plan.element is not None:
            element = model.get_submodule(path)
            again = functools.partial(checkpoint, element.forward, use_reentrant=False)
            element.forward = again  # type: ignore[method-assign]


def objective(out: Any) -> torch.Tensor | None:
    """What training would start its backward from: the loss, or else the first output."""
    loss = getattr(out, "loss", None)
    leaves = [loss] if isinstance(loss, torch.Tensor) else tree_leaves(out)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf.to_local() if isinstance(leaf, DTensor) else leaf
    return None
