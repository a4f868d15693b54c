"""What a plan does to a model, by executing the rewritten model abstractly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from tpplan.comm.pace import Pace
from tpplan.compiled import CompiledPlan
from tpplan.cost.hardware import DEFAULT, HardwareSource, load_hardware
from tpplan.cost.pace import pace_of
from tpplan.cost.run import DryRun
from tpplan.language import FrozenMap, Plan, PlanError
from tpplan.observe.caches import only_new_searched
from tpplan.observe.calls import Call, call_for, shape_of
from tpplan.planner import compile_plan
from tpplan.planner.known import Known
from tpplan.planner.match import match
from tpplan.simulate.execute import Execution, Training, execute
from tpplan.simulate.folding import Fold, find_folds, shortened_model, unfolded, unfolded_names
from tpplan.simulate.unfold import NotRepeatingError, unfold


@dataclass(frozen=True)
class Setting:
    """How a plan is compiled: what ``parallelize`` takes; and what was ``known`` of the model.

    Settings that are made of one another for several tp share that.
    """

    plan: Plan
    tp: int
    sequence_parallel: bool | None = None
    kernels: str | Mapping[str, str] | None = None
    inputs: Any = None
    ep: int = 1
    known: Known = field(default_factory=Known, compare=False, repr=False)

    def compile(self, model: nn.Module) -> CompiledPlan:
        """The plan, compiled onto ``model``."""
        how = (self.sequence_parallel, self.kernels, self.inputs)
        return compile_plan(model, self.plan, self.tp, *how, self.ep, self.known)

    def folds(self, model: nn.Module) -> tuple[Fold, ...]:
        """See ``find_folds``."""
        about = model, self.plan
        return self.known.once(
            about, "folds", lambda: find_folds(model, match(self.plan, model)[0])
        )

    def shortened(self, model: nn.Module, longer: Fold | None = None) -> nn.Module:
        """The shortest model that stands for ``model``, or with a period of a fold more."""
        about, folds = (model, self.plan), self.folds(model)
        periods = {fold: int(fold == longer) for fold in folds}
        return self.known.once(about, longer, lambda: shortened_model(model, periods))


def with_labels(model: nn.Module, inputs: Any, batch: int, seq: int) -> dict[str, Any]:
    """A call of ``model`` with its token ids as labels too.

    Raises:
        ValueError: where its forward takes no labels, or is not called with token ids.
    """
    args, kwargs = call_for(model, inputs, batch, seq)
    ids = kwargs.get("input_ids", args[0] if args else None)
    if "labels" not in inspect.signature(model.forward).parameters or ids is None:
        raise ValueError(
            f"{type(model).__name__} takes no labels by that name: give inputs with what its loss "
            "needs, or leave the loss out"
        )
    return {**kwargs, **({} if "input_ids" in kwargs else {"input_ids": ids}), "labels": ids}


@only_new_searched()
def dry_run(
    model: nn.Module,
    setting: Setting,
    batch: int,
    seq: int,
    training: Training,
    fold: bool = True,
    hardware: HardwareSource = DEFAULT,
    both: bool = True,
) -> DryRun:
    """What ``setting`` does to ``model``: one training step on its ranks, executed abstractly.

    The model is not changed; it may be on the meta device. Needs no process group, and leaves one
    that is running alone.

    Args:
        batch, seq: the shape of the token ids, where the setting has no inputs.
        fold: whether of equal layers only some are executed.
        hardware: what it is timed on.
        both: whether it is executed with activation checkpointing and without.

    Raises:
        PlanError: as ``parallelize`` does, and where there is no such hardware.
    """
    timed_on = load_hardware(hardware)
    pace = pace_of(timed_on, setting.tp)
    call = call_for(model, setting.inputs, batch, seq)
    folds = setting.folds(model) if fold else ()
    found = _folded(model, setting, call, training, folds, both, pace) if folds else None
    executed = FrozenMap({f.stack: (f.kept, f.length) for f in folds} if found else None)
    if found is None:
        compiled = setting.compile(model)
        stacks = _stacks(compiled)

        def whole(training: Training) -> Execution:
            return execute(model, compiled, call, training, stacks, pace)

        found = compiled, whole(training), _other(whole, training) if both else None
    compiled, run, other = found
    name, buffers = type(model).__name__, sum(b.nbytes for b in model.buffers())
    size = shape_of(call)
    return DryRun(name, compiled, *size, buffers, training, run, other, executed, timed_on)


def _stacks(compiled: CompiledPlan) -> tuple[str, ...]:
    """The lists of modules that the elements of the layer stack are in."""
    elements = (path for path, plan in compiled.modules.items() if plan.element is not None)
    places = (path.rpartition(".") for path in elements)
    return tuple(dict.fromkeys(stack for stack, _, name in places if name.isdigit()))


def _folded(
    model: nn.Module,
    setting: Setting,
    call: Call,
    training: Training,
    folds: tuple[Fold, ...],
    both: bool,
    pace: Pace,
) -> tuple[CompiledPlan, Execution, Execution | None] | None:
    """As executed on short models; None where those do not tell about the long one."""
    stacks = tuple(fold.stack for fold in folds)
    times = {fold: fold.times for fold in folds}
    try:
        shortest = setting.shortened(model)
        compiled = setting.compile(shortest)
        longer = {}
        for fold in folds:
            more = setting.shortened(model, fold)
            # unfolded as for the whole model: what is made of that one's plan is executed
            shorter = [f.shortened(int(f == fold)) for f in folds]
            longer[fold] = more, unfolded(compiled, shorter, more)

        done: dict[Fold | None, Execution] = {}

        def once(
            fold: Fold | None, model: nn.Module, plan: CompiledPlan, training: Training
        ) -> Execution:
            done[fold] = execute(model, plan, call, training, stacks, pace, done.get(fold))
            return done[fold]

        def run(training: Training) -> Execution:
            short = once(None, shortest, compiled, training)
            runs = {fold: once(fold, *more, training).steps for fold, more in longer.items()}
            held = unfolded_names(short.optimizer, folds, model)
            return Execution(unfold(short.steps, runs, times), held)

        found = run(training)
    except (NotRepeatingError, PlanError, IndexError):
        return None  # the whole model says what is wrong, or does what the short one does not
    plan = unfolded(compiled, folds, model)

    def either(training: Training) -> Execution:
        try:
            return run(training)
        except NotRepeatingError:  # recomputation may run in another order
            return execute(model, plan, call, training, stacks, pace)

    return plan, found, _other(either, training) if both else None


def _other(run: Callable[[Training], Execution], training: Training) -> Execution | None:
    """The run with activation checkpointing, or without where the first was with it."""
    try:
        return run(replace(training, checkpointing=not training.checkpointing))
    except (PlanError, RuntimeError):
        return None
