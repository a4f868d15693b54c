"""The whole way: anatomy, search, weighing, and the proof of what is given back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpplan.compat import one_thread
from tpplan.cost import DEFAULT, load_hardware
from tpplan.cost.hardware import HardwareSource
from tpplan.language import Diagnostic, FrozenMap, Plan, PlanError
from tpplan.language.styles import ROWS
from tpplan.models import RUNNABLE, ModelError, made_runnable, size_of
from tpplan.observe.calls import call_for, shape_of
from tpplan.observe.examples import with_other_inputs
from tpplan.observe.untouched import as_before
from tpplan.planner import compile_plan
from tpplan.proof import Verification, VerificationError, verify
from tpplan.styles import named
from tpplan.suggestion.draft import Decision
from tpplan.suggestion.patterns import Names
from tpplan.suggestion.search import Say, Search
from tpplan.suggestion.short import shortened, stand_in
from tpplan.suggestion.text import plan_from, written
from tpplan.suggestion.trial import examine
from tpplan.suggestion.weigh import Candidate, Task, weighed
from tpplan.version import __version__

_LITTLE = 0.01
"""What has a smaller share of the parameters may be left whole, where that costs less."""
_LEFT = 3


@dataclass(frozen=True)
class Suggestion:
    """A plan that was found and proved.

    Attributes:
        plan: its ``text`` is the file.
        candidates: the plans that held and what they cost, the chosen one first; one of which
            nothing is known where the model cannot be executed at that length.
        refused: of each region that has not the first layout that was tried, or is whole: what
            was said of those before.
        tried: how many plans were compiled; proof: what verify found, None where the model is
            too large to compute with, and only its miniature was proved.
        without: why it does not shard the sequence; "" where it does.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    refused: Mapping[str, tuple[str, ...]]
    tried: int
    proof: Verification | None
    task: Task
    without: str


@functools.partial(with_other_inputs, sized=False)
def find(
    model: nn.Module,
    tp: int,
    inputs: Any = None,
    *,
    batch: int = 1,
    seq: int = 2048,
    hardware: HardwareSource | None = None,
    told: Say = lambda _: None,
) -> Suggestion:
    """Write a plan for ``model`` on ``tp`` ranks; the model is not changed.

    Args:
        inputs: a call the model accepts, where token ids of shape (batch, sequence) are not one,
            or a list of calls.
        batch, seq, hardware: what the plans that hold are weighed for.
        told: is told what is being done.

    Raises:
        PlanError: where no plan can be proved, and where the model changes from call to call.
    """
    if tp < 2:
        raise PlanError([Diagnostic(f"a plan is suggested for at least 2 ranks, not {tp}")])
    shape = shape_of(call_for(model, inputs, batch, seq))
    task = Task(tp, *shape, load_hardware(hardware or DEFAULT), inputs)
    # whatever the caller does with the model itself
    with one_thread(), torch.enable_grad(), as_before(model):
        return _found(model, task, told)


def _found(model: nn.Module, task: Task, told: Say) -> Suggestion:
    tp, inputs = task.tp, task.inputs
    told("tracing the model")
    folds, short, anatomy = shortened(model, inputs, tp)
    search = Search(stand_in(model, short, anatomy, inputs, tp), anatomy, tp, inputs, told)
    search.run()
    if not any(slot.region and not slot.left_whole for slot in anatomy.slots):
        raise _nothing(search)
    names = Names(model)
    chosen, candidates = _cheapest(model, search, names, task, told)
    told("proving the whole of it")
    modes = (True, False) if not search.without else (False,)
    plan = plan_from(written(chosen.decisions, names, chosen.keys)[0])
    known = search.memory.of_another_plan()
    for mode in modes:
        if folds:  # equal layers are proved once, and the whole of it compiled
            compile_plan(model, plan, tp, mode, inputs=inputs, known=known)
            search.on(short).prove(chosen.decisions, mode)
        elif search.model is model:
            search.prove(chosen.decisions, mode)  # most likely it was
        else:
            examine(model, plan, tp, mode, inputs, search.memory)
    told("verifying it")
    proof = _verified(model, plan, tp, inputs, modes)
    head = _head(model, tp, search, proof)
    plan = plan_from(written(chosen.decisions, names, chosen.keys, head)[0])
    refused = {slot.name: tuple(slot.refused) for slot in anatomy.slots if slot.refused}
    return Suggestion(
        plan=plan,
        candidates=candidates,
        refused=FrozenMap(refused),
        tried=search.tried,
        proof=proof,
        task=task,
        without=search.without,
    )


def _nothing(search: Search) -> PlanError:
    """What is said where no region of a model can be sharded."""
    found = [
        Diagnostic(f"{slot.name}: {slot.refused[0] if slot.refused else 'is no region'}")
        for slot in search.anatomy.slots
        if slot.region
    ]
    message = "no part of the model was found that can be sharded"
    hint = "write a plan, or change what the code does there; see the language's page"
    return PlanError([Diagnostic(message, hint=hint), *found])


@dataclass(frozen=True)
class _Form:
    """A plan to be weighed: its rules, and the entries beside them."""

    name: str
    decisions: Mapping[str, Decision]
    keys: Mapping[str, object]
    sequence_parallel: bool


def _cheapest(
    model: nn.Module, search: Search, names: Names, task: Task, told: Say
) -> tuple[_Form, tuple[Candidate, ...]]:
    """Of the plans that hold the one to write, and all with their costs."""
    forms = {form.name: form for form in _forms(search)}
    candidates = [
        Candidate(
            form.name,
            plan_from(written(form.decisions, names, form.keys)[0]),
            form.sequence_parallel,
        )
        for form in forms.values()
    ]
    found = weighed(model, candidates, task, told, search.memory)
    return forms[found[0].name], tuple(found)


def _forms(search: Search) -> Iterator[_Form]:
    """In both modes, with each way to share experts, and with little things left whole."""
    decisions = search.decisions()
    modes = (False,) if search.without else (True, False)
    first = "TP" if search.without else "TP+SP"
    for mode in modes:
        keys = dict(search.keys) if mode else {**search.keys, ROWS: False}
        yield _Form("TP+SP" if mode else "TP", decisions, keys, mode)
    main = dict(search.keys) if modes[0] else {ROWS: False}
    styles = {decision.style for decision in decisions.values()}
    words = {w: o for style in sorted(styles) for w, o in named(style).ways().items()}
    for word, options in list(words.items())[1:]:
        changed = {
            path: Decision(d.style, options, d.why) if word in named(d.style).ways() else d
            for path, d in decisions.items()
        }
        if search.holds(changed, modes[0]):
            yield _Form(f"{first}, experts by {word}", changed, main, modes[0])
    for name, changed in search.with_little_whole(_LITTLE, _LEFT):
        if search.holds(changed, modes[0]) and search.holds(changed, False):
            yield _Form(f"{first}, {name} whole", changed, main, modes[0])


def _verified(
    model: nn.Module, plan: Plan, tp: int, inputs: Any, modes: tuple[bool, ...]
) -> Verification | None:
    """The plan on a model that can be computed with: this one, or the same code made small.

    Raises:
        PlanError: where it computes something else.
    """
    if size_of(model) > RUNNABLE and inputs is not None:
        return None  # a call of the large model may not be one of the small
    try:
        small, _ = made_runnable(model)
    except ModelError:
        return None
    small = _redrawn(small)
    try:
        found = [verify(small, plan, tp, sequence_parallel=m, inputs=inputs) for m in modes]
    except VerificationError as error:
        message = f"what was found is not what the model computes: {error}"
        raise PlanError(
            [Diagnostic(message, hint="write a plan; no suggestion is right")]
        ) from error
    return max(found, key=lambda v: max(v.output_error, v.gradient_error))


def _redrawn(model: nn.Module) -> nn.Module:
    """A copy with numbers of its own, the same on every rank and at every call."""
    fresh = copy.deepcopy(model).float().cpu()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in fresh.parameters():
            if parameter.is_floating_point():
                flat = parameter.flatten()
                scale = parameter.dim() < 2 and bool(flat.numel()) and bool(flat[0] == 1)
                parameter.normal_(1.0 if scale else 0.0, 0.05, generator=generator)
    return fresh


def _head(model: nn.Module, tp: int, search: Search, proof: Verification | None) -> list[str]:
    """The comment that a file begins with."""
    torch_version = torch.__version__.partition("+")[0]
    modes = "TP" if search.without else "TP and TP+SP"
    lines = [
        f"Suggested by tpplan {__version__} for {type(model).__name__} at tp {tp}; yours to edit.",
        f"Proved with torch {torch_version}, {modes}: simulated ranks against the unsharded model,",
    ]
    if proof is None:
        lines.append("on a miniature in float64, outputs and every gradient.")
    else:
        error = max(proof.output_error, proof.gradient_error)
        lines.append(f"outputs and every gradient {_below(error)}.")
    if search.without:
        lines.append(f"Without sequence parallelism: {search.without}")
    return lines


def _below(error: float) -> str:
    """The power of ten that an error is below."""
    power = -7
    while error >= 10.0**power:
        power += 1
    return f"within 1e{power:+03d}"
