"""Models with packed projections and shared key-value heads compute and train as others do."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.compare import (
    Errors,
    Findings,
    beyond,
    compare_gradients,
    compare_parameters,
    error,
    full,
    gradient_errors,
    local,
    same,
    step,
)
from tests.models import token_ids, weighed
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.rows import (
    ALL,
    CASES,
    built,
    by_rows,
    canonical,
    copies_agree,
    labelled,
    loss_of,
    sharded,
)

pytestmark = pytest.mark.turns(48)

# --- values, gradients, autograd


def gradients_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Values and gradients, by ``backward``, ``autograd.grad`` and accumulation, and zeroing."""
    found = Findings()
    for case in ALL if mesh.size() == 4 and sp else ("gpt2", "llama 1"):
        reference = built(case)
        model = sharded(case, reference, mesh, sp)
        ids = token_ids(2, 13, 1)
        with found.case(case):
            placed = any(CASES[case][3] in name for name in by_rows(model))
            found.add(f"{case}: has rows", same(placed))
            found.add(case, canonical(reference, model))
            found.add(case, step(reference, model, labelled(2, 13, 2)))
            gathered = {n: full(p.grad) for n, p in model.named_parameters()}
            expected = {n: p.grad for n, p in reference.named_parameters()}
            found.add(f"{case}: gathered", gradient_errors(expected, gathered))
            for m in (reference, model):
                loss_of(m, ids).backward()  # on top of what is there
            found.add(f"{case}: accumulated", compare_gradients(reference, model))
            model.zero_grad(set_to_none=False)
            zero = not any(local(p.grad).any() for p in model.parameters())
            found.add(f"{case}: set to zero", same(zero))
            reference.zero_grad()
            for m in (reference, model):
                loss_of(m, ids).backward()
            found.add(f"{case}: after zero_grad", compare_gradients(reference, model))
            model.zero_grad()
            found.add(f"{case}: cleared", same(all(p.grad is None for p in model.parameters())))
            names = [*by_rows(model)][::2]
            some = [
                dict(
                    zip(
                        names,
                        torch.autograd.grad(loss_of(m, ids), [m.get_parameter(n) for n in names]),
                        strict=True,
                    )
                )
                for m in (reference, model)
            ]
            found.add(f"{case}: autograd.grad", gradient_errors(*some))
    return found.errors


def one_head_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Ranks hold one KV head each where there are fewer than ranks."""
    found = Findings()
    for case, heads in (("llama 2", 2), ("llama 1", 1)):
        reference = built(case)
        model = sharded(case, reference, mesh, sp)
        for layer, own in zip(model.model.layers, reference.model.layers, strict=True):
            for name in ("k_proj", "v_proj"):
                local = getattr(layer.self_attn, name).weight.to_local()
                whole = getattr(own.self_attn, name).weight
                head = mesh.get_local_rank() * heads // mesh.size()
                expected = whole[8 * head : 8 * head + 8]
                found.add(f"{case}: {name}", same(torch.equal(local, expected)))
    return found.errors


def hooks_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Hooks on parameters, and frozen ones."""
    found = Findings()
    for case in ("gpt2", "phi3", "llama 1"):
        reference = built(case)
        model = sharded(case, reference, mesh, sp)
        seen: dict[str, list[torch.Tensor]] = {}
        handles = []
        for title, m in (("reference", reference), ("model", model)):
            for name, p in m.named_parameters():
                mine = seen.setdefault(f"{title} {name}", [])

                def before(g: torch.Tensor, mine: Any = mine) -> torch.Tensor:
                    mine.append(g.detach().clone())
                    return g * 2

                def after(p: torch.Tensor, mine: Any = mine) -> None:
                    assert p.grad is not None
                    mine.append(p.grad.detach().clone())

                handles.append(p.register_hook(before))
                handles.append(p.register_post_accumulate_grad_hook(after))
        with found.case(case):
            found.add(f"{case}: with hooks", step(reference, model, labelled(2, 9, 3)))
            for i, kind in enumerate(("hook", "post")):
                sides = [
                    {n: seen[f"{title} {n}"][i] for n, _ in model.named_parameters()}
                    for title in ("reference", "model")
                ]
                found.add(f"{case}: {kind}", gradient_errors(*sides))
            found.add(f"{case}: once each", same(all(len(s) == 2 for s in seen.values())))
            for handle in handles:
                handle.remove()
            for half in (0, 1):
                for m in (reference, model):
                    for i, p in enumerate(m.parameters()):
                        p.requires_grad_(i % 2 == half)
                found.add(f"{case}: frozen {half}", step(reference, model, labelled(1, 9, 4)))
    return found.errors


# --- norms and optimizers


def clipping_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Norms of gradients and of parameters count every row once; clipping scales all alike."""
    found = Findings()
    for case in ("gpt2", "bigcode", "llama 2"):
        reference = built(case)
        model = sharded(case, reference, mesh, sp)
        for m in (reference, model):
            loss_of(m, token_ids(2, 13, 5)).backward()
        before = [{n: p.grad.clone() for n, p in m.named_parameters()} for m in (reference, model)]
        for foreach, kind in itertools.product((True, False), (2.0, 1.0, math.inf)):
            title = f"{case}, foreach={foreach}, norm {kind}"
            with found.case(title):
                for m, grads in zip((reference, model), before, strict=True):
                    for name, p in m.named_parameters():
                        p.grad = grads[name].clone()
                totals = [
                    nn.utils.get_total_norm([p.grad for p in m.parameters()], kind, foreach=foreach)
                    for m in (reference, model)
                ]
                found.add(f"{title}: total", error(totals[0], full(totals[1])))
                limit = 0.5 * totals[0].item()
                norms = [
                    nn.utils.clip_grad_norm_(m.parameters(), limit, kind, foreach=foreach)
                    for m in (reference, model)
                ]
                found.add(f"{title}: clipped", error(norms[0], full(norms[1])))
                found.add(f"{title}: gradients", compare_gradients(reference, model))
                values = [
                    nn.utils.get_total_norm(list(m.parameters()), kind, foreach=foreach)
                    for m in (reference, model)
                ]
                found.add(f"{title}: of values", error(values[0], full(values[1])))
        for m in (reference, model):
            nn.utils.clip_grad_value_(m.parameters(), 0.05)
        found.add(f"{case}: clip_grad_value_", compare_gradients(reference, model))
    return found.errors


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5, amsgrad=True, foreach=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3, eps=1e-5),
}


def optimizers_job(mesh: DeviceMesh, sp: bool, case: str, names: tuple[str, ...]) -> Errors:
    """Some steps with accumulation and clipping; copies stay equal, states are canonical."""
    found = Findings()
    whole = built(case)
    fresh = sharded(case, whole, mesh, sp)
    for name in names:
        reference, model = copy.deepcopy(whole), copy.deepcopy(fresh)
        title = f"{case}, {name}"
        with found.case(title):
            both = [(m, OPTIMIZERS[name](m.parameters())) for m in (reference, model)]
            for i in range(2):
                for m, optimizer in both:
                    for j in range(2):
                        (loss_of(m, token_ids(2, 9, 10 * i + j)) / 2).backward()
                    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            found.add(title, compare_parameters(reference, model))
            moved = max(compare_parameters(whole, reference).values())
            found.add(f"{title}: moved", same(moved > 1e-4))
            found.add(title, copies_agree(dict(model.named_parameters())))
            states = [optimizer.state_dict() for _, optimizer in both]
            found.add(f"{title}: keys", same(states[0].keys() == states[1].keys()))
            parameters = list(model.parameters())
            for i, theirs in states[0]["state"].items():
                ours = states[1]["state"][i]
                found.add(f"{title}: keys of {i}", same(theirs.keys() == ours.keys()))
                for key, value in theirs.items():
                    if not isinstance(value, torch.Tensor) or value.dim() == 0:
                        continue
                    found.add(f"{title}: {key} of {i}", error(value, full(ours[key])))
                    alike = type(ours[key]) is type(parameters[i].data)
                    found.add(f"{title}: {key} of {i} is placed alike", same(alike))
                    found.add(title, copies_agree({f"{key} of {i}": ours[key]}))
    return found.errors


def scaler_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A GradScaler unscales every rank's rows, and one rank's infinity skips the step of all."""
    found = Findings()
    for case in ("gpt2", "llama 1"):
        reference = built(case)
        model = sharded(case, reference, mesh, sp)
        for m in (reference, model):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(loss_of(m, token_ids(2, 9, 1))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        found.add(f"{case}: unscaled", compare_gradients(reference, model))
        found.add(f"{case}: stepped", compare_parameters(reference, model))
        before = copy.deepcopy(reference)
        scaler.scale(loss_of(model, token_ids(2, 9, 2))).backward()
        rows = next(iter(by_rows(model).values()))
        if mesh.get_local_rank() == 1:
            rows.grad.to_local().view(-1)[0] = math.inf
        scaler.step(optimizer)
        found.add(f"{case}: skipped", compare_parameters(before, model))
    return found.errors


def reads_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Whoever's code reads such a parameter finds the whole; what it cannot write, it is told."""
    found = Findings()
    reference = built("gpt2")
    model = sharded("gpt2", reference, mesh, sp)
    name = next(iter(by_rows(model)))
    p, q = reference.get_parameter(name), model.get_parameter(name)
    reads: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda t: t.sum(),
        "row": lambda t: t[3],
        "product": lambda t: t.t() @ t,
        "cat": lambda t: torch.cat([t, t]),
        "norm of columns": lambda t: t.norm(dim=0),
        "penalty": lambda t: (t * t).sum() + t.abs().mean(),
    }
    for title, read in reads.items():
        with found.case(title):
            found.add(title, error(read(p), full(read(q))))
            grads = [torch.autograd.grad(read(t).sum(), t)[0] for t in (p, q)]
            found.add(f"{title}: gradient", error(grads[0], full(grads[1])))
    for m, t in ((reference, p), (model, q)):
        m.zero_grad()
        (t * t).sum().backward()  # a penalty, whose gradient meets the model's
        (t.t() @ t).sum().backward()
        loss_of(m, token_ids(2, 9, 1)).backward()
    found.add("with a penalty", compare_gradients(reference, model))
    for m in (reference, model):
        torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5).step()
    found.add("after a step", compare_parameters(reference, model))
    with torch.no_grad():
        for t in (p, q):
            t[0] = 0.0
            t.T[1:3].mul_(2)
    found.add("writes through views", error(p, full(q)))
    return found.errors


# --- torch.compile


def compile_job(mesh: DeviceMesh, sp: bool, case: str) -> Errors:
    """One graph, the same numbers."""
    found = Findings()
    reference = built(case, layers=1)
    model = sharded(case, reference, mesh, sp)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = token_ids(2, 16, 0)

    def run(m: Any) -> Mapping[str, torch.Tensor]:
        logits = (whole if m is model else m)(ids).logits
        return {"objective": weighed(logits), "logits": logits}

    found.add(case, step(reference, model, run))
    for name in by_rows(model):
        grads = [full(m.get_parameter(name).grad) for m in (reference, model)]
        found.add(f"{case}: {name} gathered", error(*grads))
    return found.errors


# --- tests: each job where the ranks, the mode and the model make a difference


@SIZES
@MODES
def test_gradients(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, gradients_job, sp))


@pytest.mark.turns(24)
@pytest.mark.parametrize(
    ("job", "tp", "sp"),
    [
        (one_head_job, 4, True),
        (hooks_job, 4, True),
        (hooks_job, 2, False),
        (clipping_job, 4, True),
        (scaler_job, 4, True),
        (reads_job, 2, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).removesuffix("_job"),
)
def test_training(ranks: Ranks, job: Any, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, job, sp))


@pytest.mark.turns(24)
@pytest.mark.parametrize(
    ("case", "sp", "names"),
    [
        ("llama 2", True, tuple(OPTIMIZERS)[::2]),
        ("llama 1", False, tuple(OPTIMIZERS)[1::2]),
        ("gpt2", True, ("AdamW foreach", "AdamW fused")),
        ("phi3", False, ("AdamW fused",)),
        ("bigcode", True, ("AdamW foreach", "SGD momentum")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_optimizers(ranks: Ranks, case: str, sp: bool, names: tuple[str, ...]) -> None:
    assert not beyond(ranks.run(4, optimizers_job, sp, case, names))


@pytest.mark.turns(24)
@pytest.mark.parametrize(("case", "sp"), [("gpt2", True), ("llama 1", False)])
def test_compile(ranks: Ranks, case: str, sp: bool) -> None:
    assert not beyond(ranks.run(2, compile_job, sp, case))
