"""What becomes of a case on a rank: refused, right, or one of the things that must not be."""

from __future__ import annotations

import contextlib
import copy
import itertools
import linecache
import re
import traceback
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import tpplan
from benchmarks.random_models.model import Case
from tpplan.compat import simulate
from tpplan.compiled import CompiledPlan
from tpplan.language import Plan, parse
from tpplan.proof.rounding import Reordered
from tpplan.rewrite import apply

TOLERANCE, SINGLE = 1e-8, 1e-4
"""Of errors in float64, and in float32."""
EXAMPLE = (2, 8)
RUNS = ((2, 8, True), (3, 7, False), (1, 13, True))
"""Batch, length, and whether the model trains."""
LARGE = 1e4
"""Of outputs: what is larger is chaos, where a last digit changes a gradient's sign."""
_ORDERS, _ALIKE = 3, 4.0
"""In how many orders an unsharded model is run for its own rounding, and how much more may be."""
RIGHT, REFUSED = "right", "refused"
WORST_FIRST = ("harness", "crash", "fails", "hang", "wrong", "refused", "right")
_numbers = itertools.count()


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        kind: right, refused, wrong, crash (while compiling), fails (while running), hang, harness.
        reason: in a line; detail: all there is to say.
        positioned: of a refusal, whether it says where in the plan.
    """

    kind: str
    reason: str = ""
    detail: str = ""
    positioned: bool = True


def built(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """The case's model and the names its source defines; always the same numbers."""
    name = f"<model {next(_numbers)}>"
    lines = case.source.splitlines(keepends=True)
    linecache.cache[name] = (len(case.source), None, lines, name)
    space: dict[str, Any] = {"__name__": "random_model"}
    exec(compile(case.source, name, "exec"), space)
    torch.manual_seed(0)
    model: nn.Module = space["make"]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():  # unit norms and zero biases hide mistakes
            if p.numel() and bool((p == p.flatten()[0]).all()):
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    model = model if case.late_double else model.double()
    _tame(model, inputs(case, space, *EXAMPLE, not case.late_double))
    return model, space


def _tame(model: nn.Module, given: dict[str, Any]) -> None:
    """Smaller matrices where the activations explode: rounding would be all that is compared."""
    for _ in range(20):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                out = copy.deepcopy(model).eval()(**given)
            except Exception:  # which is for the verdict
                return
            found = [float(t.abs().max()) for t in _tensors(out) if t.is_floating_point()]
            if max(found, default=0.0) <= LARGE:
                return
            for p in model.parameters():
                if p.dim() > 1:
                    p.mul_(0.7)


def _tensors(out: Any) -> list[torch.Tensor]:
    """All that a model gives."""
    leaves = tree_leaves(vars(out) if is_dataclass(out) else out)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.numel()]


def inputs(case: Case, space: Mapping[str, Any], batch: int, length: int, double: bool) -> Any:
    """A call's arguments, by keyword."""
    given = space["call"](batch, length, torch.Generator().manual_seed(length))
    wide = torch.float64 if double else torch.float32
    return {
        name: t.to(wide) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for name, t in given.items()
    }


def plan_of(case: Case) -> Plan:
    """The plan as it is read."""
    return parse(case.plan, "plan", path="plan.yaml")


def refusal(_: DeviceMesh, case: Case, tp: int, sequence_parallel: bool) -> Verdict | None:
    """The refusal (or crash) of a case, without ranks; None where the plan is accepted."""
    found = _compiled(case, tp, sequence_parallel)
    return found if isinstance(found, Verdict) else None


def simulated(_: DeviceMesh | None, case: Case, tp: int, sequence_parallel: bool) -> Verdict:
    """The worst verdict of ranks simulated in this process, on a plan that is compiled once."""
    compiled = _compiled(case, tp, sequence_parallel)
    if isinstance(compiled, Verdict):
        return compiled
    # seeds are the process's own: nothing is built while other ranks run
    pairs = [_Pair(case) for _ in range(tp)]

    def job(mesh: DeviceMesh) -> Verdict:
        pair = pairs[mesh.get_local_rank()]
        try:
            apply(pair.model, compiled, mesh)
        except Exception:
            return _raised("crash")
        return pair.verdict(True)

    try:
        return worst(simulate(tp, job))
    except Exception:
        return _raised("fails")


def worst(found: Iterable[Verdict]) -> Verdict:
    """Of what several ranks say."""
    return min(found, key=lambda v: WORST_FIRST.index(v.kind))


def _compiled(case: Case, tp: int, sequence_parallel: bool) -> CompiledPlan | Verdict:
    model, space = built(case)
    example = inputs(case, space, *EXAMPLE, not case.late_double)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            before = torch.get_rng_state()
            compiled = tpplan.check(model, plan_of(case), tp, sequence_parallel, inputs=example)
        except tpplan.PlanError as error:
            return _untouched(case, model, example) or _refused(error)
        except Exception:
            return _raised("crash")
    if not torch.equal(before, torch.get_rng_state()):
        return Verdict("wrong", "compiling draws from the global generator")
    return compiled


class _Pair:
    """The model to shard, beside the one that stays whole; both with the same numbers."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model, self.space = built(case)
        self.reference, self.known = built(case)

    def verdict(self, double: bool) -> Verdict:
        """Of several steps, once the model is sharded; every rank must ask."""
        tolerance = TOLERANCE if double else SINGLE
        for module in (self.model, self.reference):
            if double:
                module.double()
            for inner in module.modules():
                if isinstance(inner, nn.Dropout):
                    inner.p = 0.0
        self.space["DROPPING"] = self.known["DROPPING"] = False
        for number, (batch, length, training) in enumerate(RUNS):
            given = inputs(self.case, self.space, batch, length, double)
            try:
                theirs = _run(self.reference.train(training), given, number)
            except Exception:
                return replace(_raised("harness"), reason="the model itself cannot be run")
            if not all(bool(t.isfinite().all()) for t in theirs.values() if t is not None):
                return Verdict("harness", "the model's own numbers are not finite")
            try:
                ours = _run(self.model.train(training), given, number)
            except Exception:
                return _raised("fails")
            wrong = differences(theirs, ours, tolerance)
            if wrong and (wrong := self._beyond_rounding(wrong, number, double)):
                said = "; ".join(f"{name}: {what}" for name, what in wrong.items())
                where = f"{'training' if training else 'evaluation'}, {batch} x {length}"
                return Verdict("wrong", f"{len(wrong)} differ ({where})", f"{where}: {said}"[:2000])
            for module in (self.model, self.reference):
                _train(module, 1e-3 / max(1.0, _largest(theirs)))
        return _state(self.reference, self.model, tolerance) or Verdict(RIGHT)

    def _beyond_rounding(
        self, wrong: Mapping[str, str], number: int, double: bool
    ) -> dict[str, str]:
        """Of what differs, what does so by more than rounding, as ``verify`` tells it.

        That is by more than four times as much as in the unsharded model, with the sums of its
        products in another order; some models make much of little.

        Args:
            number: of the step at which it differs.
        """
        own: dict[str, float] = {}
        for seed in range(_ORDERS):
            orders: list[Any] = [contextlib.nullcontext(), Reordered(seed)]
            pair = [built(self.case)[0] for _ in orders]
            for step, (batch, length, training) in enumerate(RUNS[: number + 1]):
                given = inputs(self.case, self.space, batch, length, double)
                found = []
                for model, order in zip(pair, orders, strict=True):
                    with order:
                        moved = model.double() if double else model
                        found.append(_run(moved.train(training), given, step))
                if step == number:
                    for name, what in differences(found[0], found[1], 0.0).items():
                        own[name] = max(own.get(name, 0.0), _number(what))
                for model in pair:
                    _train(model, 1e-3 / max(1.0, _largest(found[0])))
        return {n: w for n, w in wrong.items() if not _number(w) <= _ALIKE * own.get(n, 0.0)}


def _number(what: str) -> float:
    """The error that ``differences`` says; infinite where it is no number."""
    try:
        return float(what)
    except ValueError:
        return float("inf")


def judge(mesh: DeviceMesh, case: Case, sequence_parallel: bool, double: bool = True) -> Verdict:
    """The verdict of this rank; every rank of the mesh must be asked.

    Args:
        double: whether to compare in float64.
    """
    pair = _Pair(case)
    example = inputs(case, pair.space, *EXAMPLE, not case.late_double)
    warnings.simplefilter("ignore")
    try:
        # proved by whoever asked for a refusal before
        tpplan.parallelize(
            pair.model, plan_of(case), mesh, sequence_parallel, inputs=example, prove=False
        )
    except tpplan.PlanError as error:
        return _refused(error)
    except Exception:
        return _raised("crash")
    return pair.verdict(double)


def _run(model: nn.Module, given: dict[str, Any], seed: int) -> dict[str, torch.Tensor | None]:
    """Outputs and gradients by name; of a random objective of all outputs."""
    model.zero_grad()
    fed = {
        name: t.clone().requires_grad_()
        if isinstance(t, torch.Tensor) and t.is_floating_point()
        else t
        for name, t in given.items()
    }
    out = model(**fed)
    tensors = _tensors(out)
    found: dict[str, torch.Tensor | None] = {}
    generator = torch.Generator().manual_seed(seed)
    objective = torch.zeros((), dtype=torch.float64)
    for i, t in enumerate(tensors):
        found[f"output {i}"] = _whole(t.detach())
        if t.requires_grad:
            weight = torch.randn(t.shape, generator=generator, dtype=torch.float64)
            objective = objective + (_whole(t) * weight).sum()
    if objective.requires_grad:
        objective.backward()  # type: ignore[no-untyped-call]
    for name, p in model.named_parameters():
        found[f"gradient of {name}"] = None if p.grad is None else _whole(p.grad)
    for name, t in fed.items():
        if isinstance(t, torch.Tensor) and t.requires_grad:
            found[f"gradient of the input {name}"] = t.grad
    return found


def _train(model: nn.Module, rate: float) -> None:
    """A step of gradient descent: the next run is one of other weights."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(rate * p.grad)


def _whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def _largest(run: Mapping[str, torch.Tensor | None]) -> float:
    """Of all gradients."""
    gradients = [t for name, t in run.items() if name.startswith("grad") and t is not None]
    return max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)


def differences(
    theirs: Mapping[str, torch.Tensor | None],
    ours: Mapping[str, torch.Tensor | None],
    tolerance: float = TOLERANCE,
) -> dict[str, str]:
    """What is not the same in two runs, and by how much.

    A gradient's error is measured by its largest value, or by a thousandth of the largest of all:
    some true gradients are zero.
    """
    largest = _largest(theirs)
    found = {}
    for name in dict.fromkeys((*theirs, *ours)):
        a, b = theirs.get(name), ours.get(name)
        if a is None or b is None:
            if a is not b and float((a if b is None else b).abs().max()) > tolerance:  # type: ignore[union-attr]
                found[name] = "missing" if b is None else "there is none"
        elif a.shape != b.shape:
            found[name] = f"{tuple(b.shape)} for {tuple(a.shape)}"
        elif a.numel():
            floor = 1e-3 * largest if name.startswith("grad") else 0.0
            scale = max(float(a.abs().max()), floor, 1e-30)
            error = float((a.double() - b.double()).abs().max()) / scale
            if not error <= tolerance:
                found[name] = f"{error:.2g}"
    return found


def _state(reference: nn.Module, model: nn.Module, tolerance: float) -> Verdict | None:
    """Whether names and values of all parameters and buffers are still the model's."""
    theirs, ours = dict(reference.state_dict()), dict(model.state_dict())
    if list(theirs) != list(ours):
        return Verdict("wrong", "state_dict() has other names", f"{list(theirs)} {list(ours)}")
    off = differences(theirs, {name: _whole(t) for name, t in ours.items()}, tolerance)
    return Verdict("wrong", "state_dict() has other values", str(off)) if off else None


def _untouched(case: Case, model: nn.Module, given: dict[str, Any]) -> Verdict | None:
    """What a refused plan must have left as it was."""
    reference, _ = built(case)
    with torch.no_grad():
        theirs, ours = (_tensors(m.eval()(**given)) for m in (reference, model))
    same = all(
        type(a) is type(b) and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(theirs, ours, strict=True)
    )
    if same:
        return None
    return Verdict("wrong", "a refused plan changed the model", f"{theirs} {ours}"[:2000])


def _refused(error: tpplan.PlanError) -> Verdict:
    positioned = any(d.position is not None for d in error.diagnostics)
    return Verdict(REFUSED, error.diagnostics[0].message, str(error), positioned)


def _raised(kind: str) -> Verdict:
    text = traceback.format_exc()
    return Verdict(kind, text.strip().splitlines()[-1][:200], text[-4000:])


_CLUTTER = (
    (re.compile(r"'[^']*'|\"[^\"]*\""), "…"),
    (re.compile(r"\b[\w*?]+(\.[\w*?{},\[\]]+)+"), "…"),
    (re.compile(r"-?\d+(\.\d+)?(e-?\d+)?"), "#"),
    (re.compile(r"\(.*?\)"), "()"),
)


def cause(verdict: Verdict) -> str:
    """The verdict's reason without what is this model's own, to group by."""
    text = verdict.reason
    for pattern, instead in _CLUTTER:
        text = pattern.sub(instead, text)
    return re.sub(r"^(…|[\w.]+)(, (…|[\w.]+))*: ", "", text)[:110]
