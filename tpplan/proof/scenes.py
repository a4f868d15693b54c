"""The steps that a proof takes: what the unsharded model can do, and what it gives."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tpplan.compiled import CompiledPlan
from tpplan.language import Diagnostic, PlanError
from tpplan.observe.calls import Call, calls_for, random_ids, routed, shortened
from tpplan.observe.examples import GIVE_INPUTS
from tpplan.observe.untouched import View, by_itself, view
from tpplan.planner.known import Known
from tpplan.proof.calls import (
    beside,
    drawn_where_alike,
    length_of,
    loud,
    other_lengths,
    resized,
    with_options,
)
from tpplan.proof.exact import exact, widened
from tpplan.proof.miniature import miniature, misses, unsharded
from tpplan.proof.ranks import mean_over_ep
from tpplan.proof.rounding import Reordered
from tpplan.proof.step import (
    LOUD,
    Result,
    Scene,
    are_comparable,
    errors,
    leaves_of,
    parts_of,
    step,
)
from tpplan.styles import named

_ORDERS = 3
_CARRIED = 1e-4
"""Of what large numbers amplify rounding to anywhere: what they may make of it elsewhere."""
# gradients are as much larger once, as where a loss is scaled for half precision, and smaller
_OBJECTIVE = 2.0**16


class Staged(NamedTuple):
    """What ranks are compared with.

    Attributes:
        small: the model, plan: its own; scenes: the steps that it can take unsharded.
        expected: what each of them gives, on each rank of ep.
    """

    small: nn.Module
    plan: CompiledPlan
    scenes: list[Scene]
    expected: list[list[Result]]


class Played:
    """The unsharded model, one step after the other.

    Attributes:
        scenes: the steps that it could take; results: what they gave on each rank of ep.
    """

    def __init__(self, small: nn.Module, compiled: CompiledPlan) -> None:
        self.small, self.compiled = small, compiled
        self.scenes: list[Scene] = []
        self.results: list[list[Result]] = []
        self._plain = frozenset[str]()
        self._twins = self._fresh()

    def must_play(self, scene: Scene) -> bool:
        """Take the step; whether it gave finite numbers, which others are compared with.

        Without gradients of inputs of which the model takes none, as counted masks, and sounds
        that it says itself to need gradients of.
        """
        try:
            return self._play(scene)
        except RuntimeError:
            names = frozenset(leaves_of(scene.call)[2])
            if not self._runs(scene, names):
                raise
            self._plain |= {n for n in names if not self._runs(scene, names - {n})}
            self._twins = self._fresh()
            return self._play(scene)

    def _play(self, scene: Scene) -> bool:
        scene = replace(scene, plain=self._plain)
        found = self._everyones(self._twins, scene, len(self.scenes))
        if found:
            self.scenes.append(scene)
            self.results.append(found)
        return bool(found)

    def _runs(self, scene: Scene, plain: frozenset[str]) -> bool:
        args, kwargs, _ = leaves_of(scene.call, plain)
        try:
            with exact(), by_itself(packages=True):
                unsharded(self.small).train(scene.training)(*args, **kwargs)
        except Exception:
            return False
        return True

    def may_play(self, scene: Scene) -> bool:
        """Take the step unless the model refuses it: then no user does."""
        try:
            played = self.must_play(scene)
        except Exception:
            played = False
        if not played:  # the ranks will not, and code may count its calls
            self._twins = self._fresh()
        return played

    def may_train(self, call: Call, fixed: bool) -> bool:
        """Train twice, if the model does: what it keeps of one step may count in the next only.

        Both times longer than before, where it may be, and of lengths of which a rank has as many
        rows. The second time numbers are large.

        Args:
            fixed: whether the rewritten model may refuse it.

        Returns:
            Whether all of that was done.
        """
        dim, tp = self.compiled.plan.sequence_dim, self.compiled.tp
        length = length_of(call, dim)
        for n in (*(other_lengths(length, tp) if length else ()), length):
            trained = resized(call, dim, length, n) if n != length else call
            where = f", at length {n}" if n != length else ""
            scene = Scene(f"in training{where}", trained, training=True, optional=fixed)
            if self.may_play(replace(scene, objective=1 / _OBJECTIVE)):
                other = beside(n, tp) if n and tp > 1 else 0
                likes = (resized(trained, dim, n, other), trained) if other else (trained,)
                again = replace(scene, what=f"in training again{where}")
                return any(self.may_play_loud(replace(again, call=like)) for like in likes)
        return False

    def may_play_loud(self, scene: Scene) -> bool:
        """Take the step on large numbers, also of what is differentiated.

        And inside of regions, but where code overflows.
        """
        large = replace(scene, call=loud(scene.call, LOUD), scale=LOUD, objective=_OBJECTIVE)
        louder = replace(large, louder=entries_of(self.compiled))
        return self.may_play(louder) or self.may_play(large)

    def again(self, scenes: Sequence[Scene]) -> list[list[Result]]:
        """What steps give that were taken before; of one that is not finite now, nothing."""
        return [self._everyones(self._twins, scene, seed) for seed, scene in enumerate(scenes)]

    def _fresh(self) -> list[tuple[nn.Module, View]]:
        """The model of each rank of ep and what it keeps, after these steps."""
        made = [(unsharded(self.small), view()) for _ in range(self.compiled.ep)]
        for seed, scene in enumerate(self.scenes):
            self._everyones(made, scene, seed)
        return made

    def _everyones(
        self, twins: Sequence[tuple[nn.Module, View]], scene: Scene, seed: int
    ) -> list[Result]:
        """What a step gives on each rank of ep; nothing where that is not finite."""
        found, parts = [], parts_of(self.compiled)
        for place, (twin, own) in enumerate(twins):
            with exact(), own:
                found.append(step(twin, scene.on(place), seed, parts=parts))
        if not are_comparable(found):
            return []
        means = mean_over_ep([result.gradients for result in found], self.compiled)
        for result in found:
            result.gradients.update(means)
            result.measure()
        return found


def played(
    model: nn.Module, small: nn.Module, compiled: CompiledPlan, given: Sequence[Call], draw: bool
) -> tuple[list[Scene], list[list[Result]]]:
    """The steps that the unsharded model can take, and what they give on each rank of ep.

    The first one it must take. ``draw``: whether to draw ids, since none were the user's.
    """
    generator = torch.Generator().manual_seed(1)
    calls = [random_ids(small, call, generator) for call in given] if draw else [*given]
    calls = [widened(drawn_where_alike(call, generator)) for call in calls]
    whole = Played(small, compiled)
    for call in calls:
        if not whole.must_play(Scene("in evaluation", call)) or not whole.results[-1][0].outputs:
            raise ValueError("it gives no numbers that could be compared")
        fixed = not model.training
        if not whole.may_train(call, fixed):
            whole.may_play_loud(Scene("on large numbers", call))
        asked = unsharded(small)
        fuller = with_options(model.forward, call, functools.partial(_accepts, asked))
        if fuller is not call:
            names = ", ".join(name for name in fuller[1] if name not in call[1])
            whole.may_play(Scene(f"given {names}", fuller, optional=True))
        for asking in routed(model, call) if shares_experts(compiled) else ():
            whole.may_play(Scene("with routing", asking, True, optional=fixed))
    return whole.scenes, whole.results


def stage(model: nn.Module, compiled: CompiledPlan, inputs: Any, known: Known) -> Staged:
    """The smallest model that runs: some code reads the weight of another module, or a layer's.

    Raises:
        PlanError: where none does.
    """
    failure: Exception | None = None
    calls = calls_for(model, inputs)
    short = tuple(shortened(call) for call in calls)
    # some code takes inputs of one size only: speech, of which all frames are encoded
    sizes = (short,) if all(a is b for a, b in zip(short, calls, strict=True)) else (short, calls)
    smaller = ((True, True), (False, True), (False, False))
    stages = list(itertools.product(sizes, smaller))
    first = known.any_plan.once((model, inputs), "stage", lambda: [0])  # the one that ran
    for number in (*range(first[0], len(stages)), *range(first[0])):
        each, (skip, thin) = stages[number]
        try:
            small, plan = miniature(model, compiled, skip, thin)
            scenes, expected = played(model, small, compiled, each, inputs is None)
        except Exception as error:
            failure = failure or error
            continue
        if misses(small):  # which fails, or is left out, in some of the steps
            continue
        first[0] = number
        return Staged(small, plan, scenes, expected)
    message = f"the model cannot be run on random numbers: {type(failure).__name__}: {failure}"
    position = compiled.plan.rules[0].position
    raise PlanError([Diagnostic(message, position, GIVE_INPUTS)]) from failure


def rounding_of(
    small: nn.Module,
    compiled: CompiledPlan,
    scenes: Sequence[Scene],
    expected: Sequence[Sequence[Result]],
) -> list[dict[str, float]]:
    """By how much the unsharded model differs from itself in each step, its sums reordered."""
    own = [dict[str, float]() for _ in scenes]
    for order in range(_ORDERS):
        with by_itself(packages=True), Reordered(order):
            again = Played(small, compiled).again(scenes)
            for worst, everyones, results in zip(own, expected, again, strict=True):
                for due, got in zip(everyones, results, strict=False):
                    for name, error in errors(due, got, 0, 1):
                        worst[name] = max(error, worst.get(name, 0.0))
    for scene, worst in zip(scenes, own, strict=True):
        if scene.louder:  # which is little to lose by: smaller numbers were compared before
            least = _CARRIED * max(worst.values(), default=0.0)
            worst.update((name, max(error, least)) for name, error in [*worst.items()])
    return own


def entries_of(compiled: CompiledPlan) -> frozenset[str]:
    """The weights through which activations enter sharded regions."""
    entries = {
        path
        for path, plan in compiled.modules.items()
        if plan.projection or plan.multihead or plan.summed or named(plan.style).stacked
    }
    return frozenset(
        entry.name
        for entry in compiled.parameters.values()
        if entry.name.rpartition(".")[0] in entries
        and len(entry.shape) >= 2
        and not entry.placement.is_replicate()
    )


def shares_experts(compiled: CompiledPlan) -> bool:
    """Whether the model has experts of which each rank has a part."""
    return any(named(plan.style).stacked for plan in compiled.modules.values())


def _accepts(model: nn.Module, call: Call) -> bool:
    """Whether the unsharded model takes a call."""
    args, kwargs = copy.deepcopy(call)
    try:
        with exact(), torch.no_grad(), by_itself(packages=True):
            model(*args, **kwargs)
    except Exception:
        return False
    return True
