"""What runs leaves nothing behind, and what backward recomputes knows where it ran."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, compare_gradients, error, full, same, step
from tests.models import token_ids, weighed, weights_like
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.blocks import PLAN, WIDTH, Layer, Model, Parallel, checkpointing

pytestmark = pytest.mark.turns(48)

TOLERANCE = 1e-10
Run = Callable[[Any], Mapping[str, torch.Tensor]]


def both(mesh: DeviceMesh, sp: bool, layer: Callable[[], Layer] = Layer) -> tuple[Any, Any]:
    """An unsharded model and a sharded copy of it."""
    reference = Model(layer)
    plan = PLAN
    if layer is Parallel:  # whose second norm is of the stream itself
        plan = {**PLAN, "rules": dict(PLAN["rules"])}
    model = copy.deepcopy(reference)
    inputs = (token_ids(2, 8, 0),)
    return reference, tpplan.parallelize(
        model, plan, mesh, sequence_parallel=sp, inputs=inputs, prove=False
    )


def logits(length: int, seed: int = 1) -> Run:
    ids = token_ids(2, length, seed)

    def run(m: Any) -> Mapping[str, torch.Tensor]:
        out = m(ids)
        return {"logits": out, "objective": weighed(out)}

    return run


def in_flight(m: Any) -> Mapping[str, torch.Tensor]:
    """Forwards of several lengths, two of them with as many rows on a rank."""
    outs = [m(token_ids(2, length, length)) for length in (7, 8, 3)]
    return {**{f"{i}": out for i, out in enumerate(outs)}, "objective": weighed(*outs)}


def on_input(path: str, ways: Callable[..., Any] | None = None) -> Run:
    """A module called by itself, with a whole tensor; ``ways``: how it is called."""

    def run(m: Any) -> Mapping[str, torch.Tensor]:
        part = m.get_submodule(path)
        if isinstance(part, nn.Embedding):
            given: torch.Tensor = token_ids(2, 7, 3)
            out = part(given) if ways is None else ways(part, given)
            return {"output": out, "objective": weighed(out)}
        width = 2 * WIDTH if path.endswith(("mlp.out", "act")) else WIDTH
        given = weights_like(torch.empty(2, 7, width, dtype=torch.float64), 5).requires_grad_()
        out = part(given) if ways is None else ways(part, given)
        objective = weighed(out)
        if ways is not None:  # reentrant checkpointing knows backward() only
            return {"output": out, "objective": objective}
        (gradient,) = torch.autograd.grad(objective, given, retain_graph=True)
        return {"output": out, "gradient of the input": gradient, "objective": objective}

    return run


def set_part(models: tuple[Any, ...], part: Any) -> None:
    """How the layers run their parts."""
    for m in models:
        for layer in m.model.layers:
            layer.part = part


def plain(f: Any, x: torch.Tensor) -> torch.Tensor:
    return f(x)  # type: ignore[no-any-return]


# --- partial sums


def sums_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Layers reduced together: whatever happens, no part of a sum is left to the next forward."""
    found = Findings()
    reference, model = both(mesh, sp, Parallel)
    layer = model.model.layers[0]
    found.add("together", same(bool(layer.attn.out._tpplan.plan.together)))

    def right(name: str, run: Run) -> None:
        with found.case(name):
            found.add(name, step(reference, model, run))
            found.add(f"after {name}", step(reference, model, logits(7, 2)))

    right("a step", logits(8))
    right("attention alone", on_input("model.layers.0.attn"))
    right("MLP alone", on_input("model.layers.1.mlp"))
    for m in (reference, model):

        def fail(*_: Any) -> None:
            raise KeyError("on purpose")

        handle = m.model.layers[0].mlp.fc.register_forward_hook(fail)
        with pytest.raises(KeyError):
            m(token_ids(2, 8, 1))
        handle.remove()
    right("an exception", logits(8))
    for reentrant in (False, True):
        for m in (reference, model):
            m.model.whole = checkpointing(reentrant)
        right(f"layers checkpointed, reentrant={reentrant}", in_flight)
        for m in (reference, model):
            m.model.whole = plain
        set_part((reference, model), checkpointing(reentrant))
        right(f"branches checkpointed, reentrant={reentrant}", in_flight)
        set_part((reference, model), plain)

    set_part((model,), None)
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.out did not run"):
        model(token_ids(2, 8, 1))
    set_part((model,), plain)
    right("a branch that did not run", logits(8))

    def hooked(m: Any) -> Mapping[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}

        def look(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
            seen["attention"] = out
            return out * 2

        handle = m.model.layers[0].attn.register_forward_hook(look)
        out = m(token_ids(2, 8, 4))
        handle.remove()
        return {"logits": out, "objective": weighed(out)}

    right("a hook on a branch", hooked)
    with torch.no_grad():
        found.add("no_grad", error(reference(token_ids(2, 8, 4)), model(token_ids(2, 8, 4))))
    return found.errors


# --- activation checkpointing


def recomputed_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Checkpointing of a part of a layer, of layers, of the base model, of modules alone."""
    found = Findings()
    reference, model = both(mesh, sp)

    def right(name: str, run: Run) -> None:
        with found.case(name):
            found.add(name, step(reference, model, run))

    for reentrant in (False, True):
        ways = checkpointing(reentrant)
        kind = f"reentrant={reentrant}"
        set_part((reference, model), ways)
        for length in (8, 7, 3, 1):
            right(f"parts, {kind}, length {length}", logits(length))
        right(f"parts, {kind}, in flight", in_flight)
        right(f"parts of a layer alone, {kind}", on_input("model.layers.0", plain))
        for m in (reference, model):
            m.model.whole = ways
        right(f"parts and layers, {kind}", in_flight)
        set_part((reference, model), plain)
        right(f"layers, {kind}", in_flight)
        for m in (reference, model):
            m.model.whole = plain

        def base(m: Any, ways: Any = ways) -> Mapping[str, torch.Tensor]:
            # an input that needs a gradient, without which a reentrant one has none
            needs = torch.ones((), requires_grad=True)
            hidden = ways(lambda _: m.model(token_ids(2, 7, 6)), needs)
            return {"hidden": hidden, "objective": weighed(hidden)}

        right(f"the base model, {kind}", base)

        def loss(m: Any, ways: Any = ways) -> Mapping[str, torch.Tensor]:
            hidden = m.model(token_ids(2, 7, 6))
            out = ways(m.head, hidden)
            return {"logits": out, "objective": weighed(out)}

        right(f"the head, {kind}", loss)
        layer = "model.layers.0"
        for path in (layer, f"{layer}.attn", f"{layer}.mlp", f"{layer}.mlp.fc", "model.norm"):
            right(f"{path} alone, {kind}", on_input(path, ways))
            right(f"{path} alone, {kind}, afterwards", logits(7))
    return found.errors


# --- copies


def copies_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A copy that runs in the middle of its original, at another length."""
    found = Findings()
    reference, model = both(mesh, sp, Parallel)
    other = copy.deepcopy(model)
    whole = copy.deepcopy(reference)
    for inner, outer in ((whole, reference), (other, model)):

        def run_inside(*_: Any, inner: Any = inner) -> None:
            inner.zero_grad()
            weighed(inner(token_ids(1, 5, 9))).backward()

        outer.model.layers[0].mlp.register_forward_hook(run_inside)
    found.add("the original", step(reference, model, logits(8)))
    found.add("the copy", compare_gradients(whole, other))
    return found.errors


# --- modules by themselves


def alone_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Every module that takes a tensor, called by the user, whole in and whole out."""
    found = Findings()
    for layer in (Layer, Parallel):
        reference, model = both(mesh, sp, layer)
        for path, module in reference.named_modules():
            if isinstance(module, Model | nn.ModuleList) or path == "model":
                continue
            name = f"{layer.__name__} {path}"
            with found.case(name):
                found.add(name, step(reference, model, on_input(path)))
        found.add("afterwards", step(reference, model, logits(7)))
    return found.errors


def compiled_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Each layer compiled by itself, without a break."""
    found = Findings()
    reference, model = both(mesh, sp, Parallel)
    torch._dynamo.reset()
    for inner in model.model.layers:
        inner.compile(fullgraph=True, backend="aot_eager")
    found.add("a step", step(reference, model, logits(8)))
    found.add("another", step(reference, model, logits(8, 2)))
    return found.errors


# --- what somebody does with a layer's output later


def kept_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A layer's output that is looked at after the next layers ran."""
    found = Findings()
    reference, model = both(mesh, sp)

    def watching(m: Any, look: Callable[[torch.Tensor, dict[str, Any]], None]) -> Any:
        kept: list[torch.Tensor] = []
        handle = m.model.layers[0].register_forward_hook(lambda _, __, out: kept.append(out))
        out = m(token_ids(2, 8, 4))
        handle.remove()
        seen: dict[str, Any] = {}
        look(kept[0], seen)
        objective = weighed(out)
        if "asked" in seen:
            seen["gradient"] = torch.autograd.grad(objective, seen.pop("asked"), retain_graph=True)[
                0
            ]
        else:
            objective.backward(retain_graph=True)
            retained = seen.pop("retained", None)
            if retained is not None:
                seen["gradient"] = retained.grad.clone()
                retained.grad = None
            m.zero_grad()
        return {"logits": out, "gradient": full(seen["gradient"]), "objective": objective}

    looks: dict[str, Callable[[torch.Tensor, dict[str, Any]], Any]] = {
        "retain_grad": lambda x, seen: (x.retain_grad(), seen.update(retained=x)),
        "hook": lambda x, seen: x.register_hook(lambda g: seen.update(gradient=g.clone())),
        "autograd.grad": lambda x, seen: seen.update(asked=x),
    }
    for name, look in looks.items():
        with found.case(name):
            found.add(name, step(reference, model, lambda m, look=look: watching(m, look)))

    def changed(m: Any) -> Mapping[str, torch.Tensor]:
        handle = m.model.layers[0].register_forward_hook(lambda _, __, out: kept.append(out))
        kept: list[torch.Tensor] = []
        out = m(token_ids(2, 8, 4))
        handle.remove()
        kept[0].register_hook(lambda g: g * 3)
        return {"logits": out, "objective": weighed(out)}

    found.add("a hook that changes the gradient", step(reference, model, changed))
    return found.errors


# --- a GeLU that adds the bias of the layer before it


def put_doubling_hook(mlp: Any, part: str, handles: list[Any], once: bool) -> None:
    """What passes between the two is doubled; ``once``: by a hook that removes itself."""

    def double(m: Any, args: Any, out: Any = None) -> Any:
        if once:
            handles.pop(0).remove()
        return out * 2 if out is not None else (args[0] * 2,)

    kind = "forward_hook" if part == "fc" else "forward_pre_hook"
    handles.append(getattr(getattr(mlp, part), f"register_{kind}")(double))


def biased_job(mesh: DeviceMesh | None, sp: bool) -> Errors:
    """Hooks that look between the two, another activation, another layer, calls of each."""
    found = Findings()
    reference = Model()
    model = copy.deepcopy(reference)
    inputs = (token_ids(2, 8, 0),)
    tpplan.parallelize(
        model,
        PLAN,
        mesh,
        sequence_parallel=sp,
        inputs=inputs,
        kernels={"gelu": "triton"},
        prove=False,
    )
    mlps = [m.model.layers[0].mlp for m in (reference, model)]

    def right(name: str, run: Run, models: Any = (reference, model)) -> None:
        with found.case(name):
            found.add(name, step(*models, run))

    right("a step", logits(8))
    fused = model.model.layers[0].mlp.fc._tpplan.partner.fused
    found.add("fused", same(fused))
    for path in ("mlp", "mlp.fc", "mlp.act", "mlp.out"):
        right(f"{path} alone", on_input(f"model.layers.0.{path}"))
        right(f"after {path} alone", logits(7))
    for part, once in itertools.product(("fc", "act"), (False, True)):
        handles: list[Any] = []
        for mlp in mlps:
            put_doubling_hook(mlp, part, handles, once)
        right(f"a hook on {part}, once={once}", logits(8))
        for handle in handles:
            handle.remove()
    right("hooks removed", logits(8))
    for reentrant in (False, True):
        ways = checkpointing(reentrant)
        for m in (reference, model):
            m.model.whole = ways
        right(f"layers checkpointed, reentrant={reentrant}", logits(8))
        for m in (reference, model):
            m.model.whole = plain
        set_part((reference, model), ways)
        right(f"MLPs checkpointed, reentrant={reentrant}", logits(8))
        set_part((reference, model), plain)
    twins = tuple(copy.deepcopy(m) for m in (reference, model))
    right("a copy", logits(8), twins)
    for mlp in (m.model.layers[0].mlp for m in twins):
        mlp.act = nn.ReLU()
    right("another activation", logits(8), twins)
    if mesh is None:
        for m in twins:
            m.model.layers[1].mlp.fc = copy.deepcopy(twins[0].model.layers[1].mlp.fc)
        right("another layer", logits(8), twins)
    return found.errors


JOBS = [sums_job, recomputed_job, copies_job, alone_job, kept_job]


@SIZES
@MODES
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__.removesuffix("_job"))
def test_life(ranks: Ranks, job: Any, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, job, sp), TOLERANCE)


@MODES
def test_fused_biases(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, biased_job, sp), TOLERANCE)


def test_fused_biases_of_a_whole_model() -> None:
    assert not beyond([biased_job(None, False)], TOLERANCE)


@MODES
@pytest.mark.turns(32)
def test_layers_compiled(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, compiled_job, sp), TOLERANCE)
