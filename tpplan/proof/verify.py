"""``verify``: the sharded model against the unsharded one, forward and every gradient.

The reference is the model itself, on one rank, with weights under which no mistake hides (none
zero, none one) and its own randomness switched off. The ranks are threads of this process, or
real gloo processes.
"""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpplan.compat import as_written
from tpplan.compiled import CompiledPlan
from tpplan.language import Diagnostic, Plan, PlanError
from tpplan.observe.calls import Call, calls_for, in_float32, random_ids, routed
from tpplan.observe.examples import cannot_run
from tpplan.observe.shadow import not_copied
from tpplan.observe.untouched import as_before
from tpplan.planner import compile_plan
from tpplan.planner.closures import on_copies
from tpplan.planner.match import match
from tpplan.proof.exact import exact, widened
from tpplan.proof.floor import floor_of
from tpplan.proof.locate import Divergence, first_divergence, rule_near
from tpplan.proof.processes import run_processes
from tpplan.proof.ranks import (
    Outcome,
    Reference,
    differentiate,
    run_rank,
    simulated,
    with_batches,
)
from tpplan.proof.rounding import own_rounding
from tpplan.proof.stopped import Stopped, inlined
from tpplan.rewrite import idle
from tpplan.simulate.steps import PHASES
from tpplan.styles import named

BATCH, LENGTH = 2, 13  # a length that no tp divides
_EXACT = 1e-4
"""What is left in float64 of an error that is rounding, as a share of the tolerance in float32."""
_ALIKE = 4.0
"""How much larger it may be than the unsharded model's own rounding, for each gradient."""


class VerificationError(AssertionError):
    """The sharded model computes something else than the unsharded one.

    Attributes:
        divergence: the first module whose output or gradient differs, where it was found.
    """

    def __init__(self, message: str, divergence: Divergence | None = None) -> None:
        super().__init__(message)
        self.divergence = divergence


@dataclass(frozen=True)
class Check:
    """What was found in one mode.

    Attributes:
        output_error: max|Δ| / max|reference| over all outputs.
        gradient_error: the worst over all parameters of
            max|Δ| / max(max|g|, 1e-3 of the largest |g| in the model); of ``worst_parameter``.
        counts, floor: collectives, phase -> kind -> number; measured, and the least possible.
        rank_share: the largest share of the parameters' bytes that one rank holds.
        idle: what the plan asks for and does not come to in this mode.
        rounding: the worst error in float32 where it is above the tolerance and nothing but
            rounding: the two errors are then those in float64. It is taken for that where they
            are 1e-4 of the tolerance, and every gradient above the tolerance in float32 is at most
            four times as far off as the same gradient of the unsharded model: from itself in
            float64, and with the terms of its matrix products in other orders. Fused kernels take
            no float64: only that second condition is theirs.
    """

    sequence_parallel: bool
    output_error: float
    gradient_error: float
    worst_parameter: str
    counts: Mapping[str, Mapping[str, int]]
    floor: Mapping[str, Mapping[str, int]]
    rank_share: float
    seconds: float
    rounding: float = 0.0
    idle: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """A plan that was verified; the errors are the worst of the modes that were run.

    ``tolerance``: that all of them are within.
    """

    model: str
    plan: str
    tp: int
    checks: tuple[Check, ...]
    note: str | None = None
    tolerance: float = 1e-5
    ep: int = 1

    @property
    def output_error(self) -> float:
        """The worst over the modes."""
        return max(check.output_error for check in self.checks)

    @property
    def gradient_error(self) -> float:
        """The worst over the modes."""
        return max(check.gradient_error for check in self.checks)

    @property
    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Collectives in the last mode that was run."""
        return self.checks[-1].counts

    @property
    def floor(self) -> Mapping[str, Mapping[str, int]]:
        """The least possible number of collectives in the last mode that was run."""
        return self.checks[-1].floor

    @property
    def rank_share(self) -> float:
        """The largest share of the parameters' bytes that one rank holds."""
        return max(check.rank_share for check in self.checks)

    @property
    def seconds(self) -> float:
        """Of all modes together."""
        return sum(check.seconds for check in self.checks)


def verify(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    tp: int = 2,
    *,
    sequence_parallel: bool | None = None,
    inputs: Any = None,
    processes: bool = False,
    tolerance: float = 1e-5,
    seed: int = 0,
    note: str | None = None,
    ep: int = 1,
) -> Verification:
    """Run ``plan`` on ``tp`` ranks and compare outputs and every gradient.

    Args:
        ep: how many times as many, each ``tp`` of them with a batch of their own; the gradients
            of the experts that these share must be the mean over the batches.
        model: or a function that makes one; it is not changed.
        sequence_parallel: one mode only; None for plain TP and, where the plan has it, TP+SP.
        inputs: a call the model accepts, or a list of calls, each of which is compared; None for
            random token ids of shape (2, 13).
        processes: real gloo processes instead of threads.
        tolerance: of the errors, see ``Check``; for float32.

    Raises:
        PlanError: where the plan does not fit the model.
        VerificationError: naming the first module that diverges.
    """
    made = model if isinstance(model, nn.Module) else model()
    if any(p.is_meta for p in made.parameters()):
        message = "verify computes: it needs a model with real weights, not one on the meta device"
        raise PlanError([Diagnostic(message)])
    # what a model of transformers keeps of its routers is lost where a process is sent the model
    rules, _ = match(plan, made)
    mixture = not processes and any(named(r.style).stacked for r in rules.modules.values())
    modes = [False, True] if sequence_parallel is None else [sequence_parallel]
    if sequence_parallel is None and (not plan.sequence_parallel or (tp == 1 and ep > 1)):
        modes = [False]
    how = plan, tp, inputs, ep
    with as_before(made), as_written(), on_copies(made, plan):
        references = references_of(made, inputs, seed, mixture)
        checks = tuple(
            _check(reference, how, mode, processes, tolerance)
            for mode in modes
            for reference in references
        )
    for message in checks[0].idle:
        if all(message in check.idle for check in checks):
            warnings.warn(message, stacklevel=4)
    return Verification(type(made).__name__, plan.name, tp, checks, note, tolerance, ep)


def references_of(
    model: nn.Module, inputs: Any, seed: int, mixture: bool = False
) -> list[Reference]:
    """The unsharded model with its results: outputs, gradients, and the call that gave them.

    Args:
        mixture: whether to ask for what routers gave, too.
    """
    calls = calls_for(model, inputs, BATCH, LENGTH)
    if mixture:
        calls = tuple((routed(model, call) or [call])[0] for call in calls)
    return [_reference(model, in_float32(call), inputs is None, seed) for call in calls]


def _reference(model: nn.Module, call: Call, drawn: bool, seed: int) -> Reference:
    try:
        fresh = copy.deepcopy(model).float().cpu().eval()
    except RuntimeError as error:
        raise not_copied(model, error) from error
    generator = torch.Generator().manual_seed(seed)
    _unhide(fresh, generator)
    # a model may change when it runs: the one that is sharded has not run
    twin = copy.deepcopy(fresh)
    if drawn:
        call = random_ids(twin, call, generator)
    called: set[str] = set()
    for path, module in twin.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: called.add(path))  # type: ignore[misc]
    try:
        outputs, gradients = differentiate(twin, call, seed)
    except Exception as error:
        raise cannot_run(error) from error
    return Reference(fresh, call, seed, outputs, gradients, frozenset(called))


def _unhide(model: nn.Module, generator: torch.Generator) -> None:
    """Stir every parameter whose values are all alike: zero biases and unit norms hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.flatten()
            if not parameter.is_floating_point() or not flat.numel():
                continue
            if bool((flat == flat[0]).all()):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * noise.to(parameter.dtype))


def _check(
    reference: Reference,
    how: tuple[Plan, int, Any, int],
    sequence_parallel: bool,
    processes: bool,
    tolerance: float,
) -> Check:
    start = time.perf_counter()
    (plan, tp, inputs, ep), (args, kwargs) = how, reference.call
    shown = inputs if isinstance(inputs, list) else kwargs or args
    compiled = compile_plan(reference.model, plan, tp, sequence_parallel, inputs=shown, ep=ep)
    reference = with_batches(reference, compiled)
    try:
        outcomes = _run(reference, compiled, processes)
    except Exception as error:
        raise _failed(compiled, error) from error
    name, gradient_error = _worst_gradient(outcomes)
    output_error, rounding = max(o.output_error for o in outcomes), 0.0
    if not output_error <= tolerance or not gradient_error <= tolerance:
        wide, own = _in_float64(reference, compiled)
        found = max((o.output_error for o in wide), default=float("inf"))
        _, wrong = _worst_gradient(wide)
        errors = [("", output_error)]
        errors += [pair for o in outcomes for pair in o.gradient_errors.items()]
        rounded = all(e <= max(tolerance, _ALIKE * own.get(n, 0.0)) for n, e in errors)
        if not wide or not rounded or not max(found, wrong) <= _EXACT * tolerance:
            raise _diverged(reference, compiled, output_error, name, gradient_error)
        rounding = max(output_error, gradient_error)
        output_error, gradient_error = found, wrong
    total = sum(p.numel() * p.element_size() for p in reference.model.parameters())
    return Check(
        sequence_parallel=compiled.sequence_parallel,
        output_error=output_error,
        gradient_error=gradient_error,
        worst_parameter=name,
        rounding=rounding,
        idle=tuple(idle(compiled, None)),
        counts=outcomes[0].counts,
        floor=floor_of(reference, compiled),
        rank_share=max(o.bytes_held for o in outcomes) / max(total, 1),
        seconds=time.perf_counter() - start,
    )


def _worst_gradient(outcomes: list[Outcome]) -> tuple[str, float]:
    return max(
        ((n, e) for o in outcomes for n, e in o.gradient_errors.items()),
        key=lambda pair: pair[1] if pair[1] == pair[1] else float("inf"),
        default=("", 0.0),
    )


def _in_float64(
    reference: Reference, compiled: CompiledPlan
) -> tuple[list[Outcome], dict[str, float]]:
    """The same in float64, where a mistake stays and rounding goes; nothing where it cannot run.

    The gradient of a scalar is a sum over all activations, and may cancel to almost nothing. With
    it comes what rounding makes of the unsharded model.
    """
    twin = copy.deepcopy(reference.model).double()
    twin.zero_grad(set_to_none=True)
    try:
        with exact():  # also where its code asks for float32
            call = widened(reference.call)
            found = differentiate(twin, call, reference.seed)
            wide = Reference(twin, call, reference.seed, *found, reference.called, wide=True)
            wide = with_batches(wide, compiled)
        # on simulated ranks in any case: real processes abort where the mode is on
        return _run(wide, compiled, processes=False), own_rounding(reference, wide)
    except Exception:  # a model that takes no float64
        return [], {}


def _run(reference: Reference, compiled: CompiledPlan, processes: bool) -> list[Outcome]:
    if processes:
        return run_processes(reference, compiled)
    return simulated(compiled, lambda mesh: run_rank(mesh, reference, compiled))


def _mode(compiled: CompiledPlan) -> str:
    ep = f", ep {compiled.ep}" if compiled.ep > 1 else ""
    return f"{'TP+SP' if compiled.sequence_parallel else 'TP'} at tp {compiled.tp}{ep}"


def _failed(compiled: CompiledPlan, error: Exception) -> VerificationError:
    path = ""
    if isinstance(error, Stopped):
        path, error = error.path, error.error
    cure = inlined(compiled, path)
    notes = "; ".join(getattr(error, "__notes__", ()))
    where = f" ({notes})" if notes else ""
    text = str(error).strip().splitlines() or [""]
    message = (
        f"{_mode(compiled)}: the sharded model fails{where}: {type(error).__name__}: {text[0]}"
        f"{'' if cure is None else f'. Help: {cure}'}"
    )
    return VerificationError(message)


def _diverged(
    reference: Reference,
    compiled: CompiledPlan,
    output_error: float,
    parameter: str,
    gradient_error: float,
) -> VerificationError:
    divergence = first_divergence(reference, compiled)
    message = (
        f"{_mode(compiled)}: the sharded model differs from the unsharded one: outputs by "
        f"{output_error:.1e}, gradients by {gradient_error:.1e} (worst: {parameter or 'none'})"
    )
    if divergence is not None:
        rule = rule_near(compiled, divergence.module)
        message += f"\nfirst to diverge: {divergence.describe()}"
        if rule is not None:
            message += f"\nlikely rule: {os.path.basename(rule.position.file)}:{rule.position.line}"
            message += f": {rule.pattern.text}: {rule.style}"
    return VerificationError(message, divergence)


def describe(result: Verification) -> str:
    """A few lines for the terminal."""
    ep = f", ep {result.ep}" if result.ep > 1 else ""
    lines = [f"{result.model} with {result.plan}, tp {result.tp}{ep}"]
    if result.note:
        lines.append(result.note)
    for check in result.checks:
        mode = "TP+SP" if check.sequence_parallel else "TP   "
        lines.append(
            f"{mode}  outputs {check.output_error:.1e}  gradients {check.gradient_error:.1e} "
            f"(worst: {check.worst_parameter})  {check.rank_share:.0%} of the parameters on a "
            f"rank  {check.seconds:.1f} s"
        )
        if check.rounding:
            lines.append(
                f"       errors in float64; in float32 rounding makes {check.rounding:.1e}"
            )
        for phase in PHASES:
            counted = {k: n for k, n in check.counts.get(phase, {}).items() if n}
            least = {k: n for k, n in check.floor.get(phase, {}).items() if n}
            if counted or least:
                lines.append(f"       {phase}: {_listed(counted)}; floor {_listed(least)}")
    lines.append(f"PASS: outputs and every gradient within {result.tolerance:g}")
    return "\n".join(lines)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "none"
