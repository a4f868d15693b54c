"""Which module is the first to diverge, when the sharded model differs from the unsharded one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from tpplan.comm import chunk
from tpplan.compiled import CompiledPlan
from tpplan.language import Rule
from tpplan.layout import Rows
from tpplan.observe.numbers import largest
from tpplan.observe.untouched import by_itself
from tpplan.proof.ranks import (
    Reference,
    backward,
    gradient_errors,
    gradients_of,
    places_of,
    relative,
    results,
    simulated,
    whole,
)
from tpplan.proof.step import share
from tpplan.rewrite import apply
from tpplan.styles import named

_SUSPECT = 1e-4


@dataclass(frozen=True)
class Divergence:
    """The first module whose output (in order of execution) or gradient (backwards) differs."""

    module: str
    what: str
    error: float

    def describe(self) -> str:
        """For messages."""
        return f"{self.what} of {self.module or 'the model'} (by {self.error:.1e})"


@dataclass(frozen=True)
class Seen:
    """The first floating tensor that a module was given (row-parallel layers only) or gave."""

    path: str
    given: bool
    tensor: torch.Tensor


def first_divergence(reference: Reference, compiled: CompiledPlan) -> Divergence | None:
    """Run both once more with every module watched; None where nothing comparable differs."""

    def seen(model: nn.Module, place: int) -> list[Seen]:
        own = reference.on(place)
        return watched(model, compiled, lambda model: backward(results(model, own.call), own.seed))

    def on_rank(mesh: DeviceMesh) -> tuple[int, Divergence] | None:
        model = copy.deepcopy(reference.model)
        model.zero_grad(set_to_none=True)
        place, rank = places_of(mesh, compiled)
        apply(model, compiled, mesh, src_data_rank=None, outside=False)
        found = compare(expected[place], seen(model, place), compiled, rank)
        return found or _in_gradients(reference.on(place), model, expected[place])

    expected = []
    for place in range(compiled.ep):
        with by_itself(packages=True):
            expected.append(seen(copy.deepcopy(reference.model), place))
    found = simulated(compiled, on_rank)
    return min((f for f in found if f is not None), key=lambda f: f[0], default=(0, None))[1]


def watched(
    model: nn.Module, compiled: CompiledPlan, run: Callable[[nn.Module], None]
) -> list[Seen]:
    """What is seen while ``run`` runs ``model``, in order of execution."""
    seen: list[Seen] = []

    def watch(path: str, given: bool) -> Callable[..., None]:
        return lambda *call: seen.append(Seen(path, given, _first(call[-1])))

    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            plan = compiled.modules.get(path)
            if plan is not None and named(plan.style).sums:
                hooks.enter_context(module.register_forward_pre_hook(watch(path, True)))
            hooks.enter_context(module.register_forward_hook(watch(path, False)))
        run(model)
    return seen


def _first(out: Any) -> torch.Tensor:
    if hasattr(out, "to_tuple"):
        out = out.to_tuple()
    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return whole(leaf.detach()).clone()
    return torch.empty(0)


def compare(
    expected: list[Seen], got: list[Seen], compiled: CompiledPlan, rank: int
) -> tuple[int, Divergence] | None:
    """The first of what was seen on a rank that is not its part of what was seen unsharded."""
    for index, (theirs, ours) in enumerate(zip(expected, got, strict=False)):
        if not theirs.given and _gives_part(compiled, theirs.path):
            continue
        rows = None if theirs.given else _rows_of(compiled, theirs.path)
        error = _difference(theirs.tensor, ours.tensor, rank, compiled.tp, rows)
        if error > _SUSPECT and theirs.given:
            # not the layer's own doing: what the module around it computes on its columns
            around, _, leaf = theirs.path.rpartition(".")
            return index, Divergence(around, f"the input of '{leaf}' inside", error)
        if error > _SUSPECT:
            return index, Divergence(theirs.path, "the output", error)
    return None


def _gives_part(compiled: CompiledPlan, path: str) -> bool:
    """Whether what a module gives is a rank's part of a sum."""
    plan = compiled.modules.get(path)
    return plan is not None and (plan.partial or named(plan.style).stacked)


def _in_gradients(
    reference: Reference, model: nn.Module, expected: list[Seen]
) -> tuple[int, Divergence] | None:
    errors = gradient_errors(reference.gradients, gradients_of(model))
    last = {seen.path: index for index, seen in enumerate(expected)}
    worst = max(errors.values(), default=0.0)
    # a clear error, or the worst of the small ones
    wrong = {n: e for n, e in errors.items() if e > (_SUSPECT if worst > _SUSPECT else worst / 2)}
    if not wrong:
        return None
    # backward runs from the end: the first wrong gradient is that of the module called last
    name = max(wrong, key=lambda n: last.get(n.rpartition(".")[0], -1))
    path, _, leaf = name.rpartition(".")
    return len(expected), Divergence(path, f"the gradient of '{leaf}'", wrong[name])


def _rows_of(compiled: CompiledPlan, path: str) -> Rows | None:
    """Which columns of a column-parallel layer's output a rank has, where they are not even."""
    plan = compiled.modules.get(path)
    if plan is None or not plan.projection:
        return None
    placement = compiled.parameter(f"{path}.weight").placement
    return placement if isinstance(placement, Rows) else None


def _difference(
    full: torch.Tensor, ours: torch.Tensor, rank: int, size: int, rows: Rows | None
) -> float:
    """The error of what a rank holds: all of it, or its part along one dimension; 0 if unknown."""
    if rows is not None:
        part = Rows(full.dim() - 1, rows.pieces).take(full, rank)
        return relative(part, ours)
    if full.shape == ours.shape:
        return relative(full, ours)
    if full.dim() != ours.dim():
        return 0.0
    dims = [d for d in range(full.dim()) if full.size(d) != ours.size(d)]
    if len(dims) != 1 or ours.size(dims[0]) != chunk(full.size(dims[0]), size):
        return 0.0
    part = share(full, dims[0], rank, size)
    return relative(part, ours.narrow(dims[0], 0, part.size(dims[0])), largest(full))


def rule_near(compiled: CompiledPlan, path: str) -> Rule | None:
    """The rule on a module, or the first one inside it, or around it."""
    own = compiled.modules.get(path)
    if own is not None and own.rule is not None:
        return own.rule
    inside = (m.rule for p, m in compiled.modules.items() if p.startswith(f"{path}.") and m.rule)
    found = next(inside, None)
    while found is None and path:
        path = path.rpartition(".")[0]
        around = compiled.modules.get(path)
        found = None if around is None else around.rule
    return found
