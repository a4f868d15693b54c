"""The proof of a compiled plan: the rewritten model itself, run on every rank before it is used.

A miniature of the model is rewritten as the model will be, on simulated ranks, and run forward and
backward beside the unsharded one: in evaluation and in training, at lengths of which tp divides
some, on small and large numbers and gradients, one step after the other. Every output, every
gradient and every buffer must be the same, in float64.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.compat import as_written, quiet, unfused
from tpplan.compiled import CompiledPlan
from tpplan.language import Diagnostic, Plan, PlanError
from tpplan.observe.chance import same_randomness
from tpplan.observe.untouched import by_itself, nothing_kept
from tpplan.planner.closures import on_copies
from tpplan.planner.known import Known
from tpplan.planner.match import fold
from tpplan.planner.stops import line_of, place_of, stopped_at
from tpplan.proof.calls import length_of
from tpplan.proof.decided import misdecided
from tpplan.proof.drawn import misdrawn
from tpplan.proof.exact import exact
from tpplan.proof.locate import Divergence, Seen, compare, rule_near, watched
from tpplan.proof.miniature import on_rank, unsharded
from tpplan.proof.noted import Misstep
from tpplan.proof.own_model import require_alike
from tpplan.proof.ranks import places_of, simulated
from tpplan.proof.scenes import Staged, rounding_of, stage
from tpplan.proof.step import ROUNDING, TIMES, Result, Scene, parts_of, step, worst
from tpplan.proof.stopped import Stopped, inlined
from tpplan.rewrite import apply
from tpplan.rewrite.world import broadcast
from tpplan.styles.replicate import REPLICATE


@dataclass(frozen=True)
class Finding:
    """Where a rank departs from the unsharded model."""

    scene: Scene
    rank: int
    what: str
    error: float
    misstep: Misstep | None = None


def prove(
    model: nn.Module, compiled: CompiledPlan, inputs: Any = None, known: Known | None = None
) -> None:
    """Run ``compiled`` on simulated ranks and compare; ``model`` is not changed.

    Args:
        inputs: a call the model accepts, where token ids are not one, or a list of calls.
        known: of other plans for the model, what it was found to need to be run.

    Raises:
        PlanError: naming what differs first, and the rule that is likely to blame.
    """
    if compiled.tp * compiled.ep == 1:
        return
    with _apart(model, compiled.plan):
        _prove(stage(model, compiled, inputs, known or Known()), model)


def prove_once(
    model: nn.Module, compiled: CompiledPlan, mesh: DeviceMesh, inputs: Any = None
) -> None:
    """``prove`` on the first rank of ``mesh``, on behalf of all of them.

    Meanwhile the others run the unsharded model only, of which each has one of its own.

    Raises:
        PlanError: the same on every rank.
        ValueError: on every rank, where their models do not compute the same.
    """
    failed: Exception | None = None
    staged: Staged | None = None
    try:
        with _apart(model, compiled.plan):
            staged = stage(model, compiled, inputs, Known())
            if not any(mesh.get_coordinate() or ()):
                _prove(staged, model)
    except Exception as error:
        failed = error
    own = list(failed.diagnostics) if isinstance(failed, PlanError) else None
    told: list[Diagnostic] | None = broadcast(own, mesh)
    if told is not None:
        raise PlanError(told)
    with _apart(model, compiled.plan):
        require_alike(staged, failed, mesh)


@contextlib.contextmanager
def _apart(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Within it, code of ``model`` runs as in no other place, and leaves nothing behind."""
    wide = (torch.float64, torch.complex128)
    kept = nothing_kept(model, lambda t: t.dtype in wide)
    with same_randomness(0), as_written(), kept, quiet(), unfused(), on_copies(model, plan):
        yield


def _prove(staged: Staged, model: nn.Module) -> None:
    small, plan, scenes, expected = staged
    if not any(scene.training for scene in scenes):
        message = (
            f"{type(model).__name__}: no step in training was compared; it gives no numbers, or "
            "none that are finite, on random inputs"
        )
        warnings.warn(f"{message}. Give inputs= on which it does", stacklevel=2)

    def first(own: Sequence[Mapping[str, float]]) -> Finding | None:
        """Where a rank departs first; ``own``: the unsharded model's rounding in each step."""
        try:
            found = simulated(plan, lambda mesh: _on_rank(mesh, small, plan, scenes, expected, own))
        except Stopped as stopped:
            raise _failed(plan, stopped.path, stopped.error) from stopped.error
        except Exception as error:
            raise _failed(plan, "", error) from error
        departed = [finding for finding in found if finding is not None]
        return min(departed, key=lambda f: scenes.index(f.scene), default=None)

    own = [dict[str, float]() for _ in scenes]
    finding = first(own)
    if finding is not None and math.isfinite(finding.error):  # rarely it is no mistake
        mistaken = finding.error > _most(finding.scene)
        taken = scenes.index(finding.scene) + 1 if mistaken else len(scenes)
        own = rounding_of(small, plan, scenes[:taken], expected[:taken])
        if not mistaken:
            finding = first(own)
    if finding is not None and finding.misstep is not None:
        raise _misstep(plan, finding, finding.misstep)
    if finding is not None:
        itself = own[scenes.index(finding.scene)].get(finding.what, 0.0)
        raise _departed(small, plan, scenes, finding, itself)


def _on_rank(
    mesh: DeviceMesh,
    small: nn.Module,
    compiled: CompiledPlan,
    scenes: Sequence[Scene],
    expected: Sequence[Sequence[Result]],
    own: Sequence[Mapping[str, float]],
) -> Finding | None:
    model = on_rank(small, compiled)
    parts = parts_of(compiled)
    place, rank = places_of(mesh, compiled)
    suspect = None  # of one rank: it may be alike on the others by chance
    with exact():
        apply(model, compiled, mesh, src_data_rank=None, outside=False)
        for seed, (scene, everyones) in enumerate(zip(scenes, expected, strict=True)):
            due, found = everyones[place], None
            try:
                got = step(model, scene.on(place), seed, due, parts)
            except Exception as error:
                refused = isinstance(error, RuntimeError | ValueError | TypeError | IndexError)
                if not scene.optional or not refused:  # else it will not be silent
                    raise Stopped.running(model, error) from error
            else:
                found = _departing(compiled, scene, rank, due, got, own[seed])
                if suspect is None and rank == 0 and compiled.ep == 1:
                    misstep = misdecided(due.notes.decided, got.notes.decided) or misdecided(
                        due.later.decided, got.later.decided, ordered=False
                    )
                    if misstep is not None:
                        suspect = Finding(scene, rank, misstep.what, float("inf"), misstep)
            if _on_any(found is not None):
                # a decision of an earlier step says more
                return found if suspect is None or suspect.scene is scene else suspect
    return suspect


def _departing(
    compiled: CompiledPlan,
    scene: Scene,
    rank: int,
    due: Result,
    got: Result,
    own: Mapping[str, float],
) -> Finding | None:
    """What a rank finds after a step."""
    found = worst(due, got, rank, compiled.tp, own, _most(scene))
    if found is not None:
        return Finding(scene, rank, *found)
    length = length_of(scene.call, compiled.plan.sequence_dim)
    misstep = misdrawn(due.notes.drawn, got.notes.drawn, compiled.tp, length)
    if misstep is not None:
        return Finding(scene, rank, misstep.what, float("inf"), misstep)
    return None


def _most(scene: Scene) -> float:
    """What is beyond is no rounding, but where large numbers may be all that amplifies it."""
    return math.inf if scene.louder else ROUNDING


def _on_any(departs: bool) -> bool:
    """Whether any rank departs: all stop then, none waits for one that stopped."""
    flag = torch.tensor(float(departs))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _failed(compiled: CompiledPlan, path: str, error: Exception) -> PlanError:
    text = (str(error).strip().splitlines() or [""])[0]
    named = [p for p in compiled.modules if p and re.search(rf"(?<![\w.]){re.escape(p)}\b", text)]
    path = max(named, key=len, default=path)
    rule = rule_near(compiled, path) or compiled.plan.rules[0]
    where = f"{fold([path])}: " if path else ""
    ranks = compiled.tp * compiled.ep
    message = f"{where}the rewritten model fails on {ranks} ranks: {type(error).__name__}: {text}"
    hint = (
        "this code computes with a parameter of which each rank has a part; leave what it reads "
        "whole on every rank, or let only modules with rules compute with it"
        if "mixed torch.Tensor and DTensor" in text
        else inlined(compiled, path)
    )
    hint = hint or "'tpplan explain' says what was inferred; see also docs/proved.md"
    place = stopped_at(place_of(error))
    return PlanError([Diagnostic(message, rule.position, hint, place, (path,))])


def _misstep(compiled: CompiledPlan, finding: Finding, found: Misstep) -> PlanError:
    """What results do not show: all draws are alike here, and ranks may decide alike by chance."""
    rule = rule_near(compiled, found.path) or compiled.plan.rules[0]
    message = f"{found.path or 'the model itself'} {found.what} ({finding.scene.what})"
    place = stopped_at(found.line and line_of(*found.line))
    return PlanError([Diagnostic(message, rule.position, found.hint, place, (found.path,))])


def _departed(
    small: nn.Module,
    compiled: CompiledPlan,
    scenes: Sequence[Scene],
    finding: Finding,
    itself: float,
) -> PlanError:
    """What differs, and where it starts: found by running once more with every module watched.

    Args:
        itself: by how much the unsharded model differs there from itself, its sums reordered.
    """
    steps = scenes[: scenes.index(finding.scene) + 1]

    def seen(model: nn.Module, place: int) -> list[Seen]:
        def run(model: nn.Module) -> None:
            for seed, scene in enumerate(steps):
                step(model, scene.on(place), seed, None)

        return watched(model, compiled, run)

    def compared(mesh: DeviceMesh) -> tuple[int, Divergence] | None:
        model = on_rank(small, compiled)
        place, rank = places_of(mesh, compiled)
        with exact():
            apply(model, compiled, mesh, src_data_rank=None, outside=False)
            got = seen(model, place)
        return compare(expected[place], got, compiled, rank)

    expected = []
    for place in range(compiled.ep):
        with exact(), by_itself(packages=True):
            expected.append(seen(unsharded(small), place))
    try:
        found = [f for f in simulated(compiled, compared) if f is not None]
    except Exception:  # collectives that only the comparison makes
        found = []
    first = min(found, key=lambda f: f[0], default=(0, None))[1]
    if first is not None:
        path, what = first.module, first.describe()
    else:
        path = finding.what.rpartition(" ")[2].rpartition(".")[0]
        what = f"{finding.what} (by {finding.error:.1e})"
    rule = rule_near(compiled, path) or compiled.plan.rules[0]
    where = f"{fold([path])}: " if path else "the model itself: "
    ranks = compiled.tp * compiled.ep
    message = (
        f"{where}on {ranks} ranks it computes something else than whole: {what} "
        f"differs {finding.scene.what}, on rank {finding.rank}"
    )
    hint = inlined(compiled, path) or (
        f"the unsharded model itself differs by {itself:.0e} there, its sums in another order: it "
        "amplifies rounding, which no proof can tell from a mistake; see docs/proved.md"
        if itself >= finding.error / TIMES
        else "its code does with a rank's part what needs the whole, or the plan cuts it otherwise "
        f"than the code does; leave it out of the plan, or say '{REPLICATE.name}'; see "
        "docs/proved.md"
    )
    return PlanError([Diagnostic(message, rule.position, hint, about=(path,))])
