"""A model and its sharded copy, side by side through whatever happens to them."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

import tpplan
from tests.compare import (
    Errors,
    Findings,
    compare_gradients,
    compare_parameters,
    error,
    full,
    gradient_errors,
)
from tests.life.blocks import BLOCKS, built, tokens
from tests.models import weights_like
from tpplan.compiled import CompiledPlan
from tpplan.rewrite import apply

TOLERANCE = 1e-8  # everything is float64
SHAPES = [(2, 8), (3, 7), (1, 12), (2, 3)]  # batch, length: some that tp does not divide
Way = Callable[..., Any]  # how a model is called: with the model, and its inputs
Outcome = tuple[dict[str, torch.Tensor], torch.Tensor, list[torch.Tensor]]


def plainly(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The usual way."""
    return model(*args, **kwargs)


# how a model sends, beside weights' gradients that are deferred: its numbers are the same
WAYS: Mapping[str, dict[str, Any]] = {
    "whole": {},
    "in pieces": {"overlap": "chunked"},
    "rows kept": {"save": "shard"},
    "in pieces, rows kept": {"overlap": "chunked", "save": "shard"},
}
_WAY = "whole"
_COMPILED: dict[tuple[str, int, bool], CompiledPlan] = {}


@contextlib.contextmanager
def sending(way: str) -> Iterator[None]:
    """Within it, models are made that send so."""
    global _WAY
    before, _WAY = _WAY, way
    try:
        yield
    finally:
        _WAY = before


def compiled(role: str, tp: int, sp: bool) -> CompiledPlan:
    """The plan of a role, compiled once: that takes longer than most events."""
    if (role, tp, sp) not in _COMPILED:
        _COMPILED[role, tp, sp] = _compiled(role, tp, sp)
    return _COMPILED[role, tp, sp]


def told(plan: CompiledPlan, role: str) -> None:
    """Take over what another process compiled."""
    _COMPILED.setdefault((role, plan.tp, plan.sequence_parallel), plan)


def _compiled(role: str, tp: int, sp: bool) -> CompiledPlan:
    block = BLOCKS[role]
    args, kwargs = block.call(2, 8, 0)
    given = tuple(a.float() if a.is_floating_point() else a for a in args)
    inputs = given if not kwargs else given[0]
    return tpplan.check(built(block), block.plan, tp, sp, inputs=inputs)


class Life:
    """A model and its sharded copy, and what was found to differ.

    Attributes:
        reference: unsharded; the same on every rank.
        model: sharded over ``mesh``.
    """

    def __init__(
        self,
        role: str,
        mesh: DeviceMesh,
        sp: bool,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        found: Findings | None = None,
    ) -> None:
        self.role, self.mesh, self.sp, self.seed = role, mesh, sp, seed
        self.block, self.dtype = BLOCKS[role], dtype
        self.found = found or Findings()
        self.reference = built(self.block, seed).to(dtype)
        plan = compiled(role, mesh.size(), sp)
        plan = replace(plan, plan=replace(plan.plan, **WAYS[_WAY]))
        self.model = apply(built(self.block, seed), plan, mesh, None).to(dtype)
        self._inputs = itertools.count(1000 * seed + 1)

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        """The model and its sharded copy."""
        return self.reference, self.model

    def inputs(self, batch: int = 2, length: int = 8) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs that were not used before, the same on every rank."""
        args, kwargs = self.block.call(batch, length, next(self._inputs))
        return tuple(a.to(self.dtype) if a.is_floating_point() else a for a in args), kwargs

    def two_at_once(self, *shapes: tuple[int, int]) -> Way:
        """A way to call a model that takes inputs of its own, of several shapes."""
        calls = [(leaves(args), kwargs) for args, kwargs in (self.inputs(*s) for s in shapes)]

        def way(model: Any, *_: Any, **__: Any) -> Any:
            return [model(*args, **kwargs) for args, kwargs in calls]

        return way

    def step(
        self,
        name: str,
        shape: tuple[int, int] = (2, 8),
        way: Way = plainly,
        clear: bool = True,
        repeat: int = 1,
    ) -> None:
        """Forward and backward of both; outputs, and the gradients of inputs and parameters.

        Args:
            way: how a model is called.
            clear: whether gradients start from nothing.
            repeat: how often the graph is gone through backward.
        """
        args, kwargs = self.inputs(*shape)
        outcomes = []
        for model in self.both:
            if clear:
                model.zero_grad()
            outputs, objective, given = forward(model, args, kwargs, way)
            for turn in range(repeat):
                objective.backward(retain_graph=turn + 1 < repeat)
            outcomes.append((outputs, {str(i): x.grad for i, x in enumerate(given)}))
        (theirs, of_theirs), (ours, of_ours) = outcomes
        self.compare(f"{name}: output", theirs, ours)
        self.found.add(f"{name}: gradient of input", gradient_errors(of_theirs, of_ours))
        self.found.add(name, compare_gradients(*self.both))

    def answer(self, name: str, shape: tuple[int, int] = (2, 8), way: Way = plainly) -> None:
        """Outputs alone."""
        args, kwargs = self.inputs(*shape)
        theirs, ours = (named(way(model, *args, **kwargs)) for model in self.both)
        self.compare(f"{name}: output", theirs, ours)

    def compare(
        self, name: str, theirs: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]
    ) -> None:
        """Named tensors of the one and the other."""
        errors: Errors = {n: error(t, full(ours[n])) for n, t in theirs.items()}
        self.found.add(name, errors)

    def update(self, name: str) -> None:
        """A step of the optimizers; the parameters after it."""
        optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in self.both]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.found.add(f"{name}: parameters", compare_parameters(*self.both))

    def fresh(self) -> nn.Module:
        """Another unsharded model with the same numbers, in float32."""
        return built(self.block, self.seed)

    def single(self) -> Life:
        """The same in float32."""
        return Life(self.role, self.mesh, self.sp, torch.float32, self.seed, self.found)

    def twin(self) -> Life:
        """Deep copies of both."""
        twin = copy.copy(self)
        twin.reference, twin.model = copy.deepcopy(self.reference), copy.deepcopy(self.model)
        return twin

    def apart(self) -> None:
        """From now on every group of ranks has inputs of its own."""
        first = int(self.mesh.mesh.flatten()[0])
        self._inputs = itertools.count(1000 * self.seed + 100 * (first + 1))

    @property
    def tokens(self) -> bool:
        """Whether the inputs are token ids, with labels."""
        return self.block.call is tokens

    def sibling(self, seed: int, role: str | None = None, mesh: DeviceMesh | None = None) -> Life:
        """Another model in the same process; what differs is found together."""
        mesh = mesh or self.mesh
        return Life(role or self.role, mesh, self.sp, self.dtype, seed, self.found)

    def pairs(self, *paths: str) -> Iterator[tuple[str, nn.Module, nn.Module]]:
        """A module of both, by its path."""
        for path in paths:
            yield path, self.reference.get_submodule(path), self.model.get_submodule(path)


def named(out: Any) -> dict[str, torch.Tensor]:
    """All tensors of an output."""
    tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    return {str(i): t for i, t in enumerate(tensors)}


def forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], way: Way) -> Outcome:
    """Outputs, a scalar in which each of their elements has a weight, the inputs as leaves.

    Where a model has a loss, that is the scalar: a random weighing of the logits beside it would
    be another use of logits that the loss leaves sharded.
    """
    given = leaves(args)
    outputs = named(way(model, *given, **kwargs))
    with_gradient = [t for t in outputs.values() if t.requires_grad]
    if any(t.dim() == 0 for t in with_gradient):
        objective = torch.stack([t for t in with_gradient if t.dim() == 0]).sum()
    else:
        parts = [(t * weights_like(t, i)).sum() for i, t in enumerate(with_gradient)]
        objective = torch.stack(parts).sum()
    return outputs, objective, [a for a in given if a.is_floating_point()]


def leaves(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the inputs, of which gradients are asked."""
    return tuple(a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args)
