"""What users do with graphs, hooks and modes goes on working on a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.compare import Errors, Findings, beyond, error, full, same, step
from tests.models import (
    hf,
    sharded,
    token_ids,
    weighed,
    weights_like,
)
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.calls import (
    Run,
    compare_calls,
    labelled,
    logits_of,
)
from tpplan.simulate.recorder import Recorder


def checkpointing_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Activation checkpointing of every layer, both variants torch has."""
    found = Findings()
    for family in ("Llama", "Qwen3"):
        reference = hf(family)
        model = sharded(reference, mesh, sp)
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            name = f"{family}, use_reentrant={reentrant}"
            with found.case(name):
                found.add(name, step(reference, model, labelled(2, 16, 56)))

            def two_lengths(m: Any) -> Mapping[str, torch.Tensor]:
                first, second = (labelled(2, n, n)(m)["loss"] for n in (9, 14))
                return {"first": first, "second": second, "objective": first + 2 * second}

            with found.case(f"{name}, two lengths in flight"):
                errors = step(reference, model, two_lengths)
            found.add(f"{name}, two lengths in flight", errors)
    return found.errors


def modes_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Several graphs in flight, a loss on a part of the outputs, a forward without gradients."""
    found = Findings()
    reference = hf("Qwen3")
    model = sharded(reference, mesh, sp)

    def two_forwards(m: Any) -> Mapping[str, torch.Tensor]:
        first, second = logits_of(2, 13, 70)(m), logits_of(1, 6, 71)(m)
        objective = first["objective"] - 2 * second["objective"]
        return {"first": first["logits"], "second": second["logits"], "objective": objective}

    def one_position(m: Any) -> Mapping[str, torch.Tensor]:
        logits = m(input_ids=token_ids(2, 13, 72)).logits[:, -1]
        return {"logits": logits, "objective": weighed(logits)}

    def head_and_base(m: Any) -> Mapping[str, torch.Tensor]:
        hidden = m.model(input_ids=token_ids(2, 13, 73)).last_hidden_state
        logits = m.lm_head(hidden[:, 4:9])
        return {"logits": logits, "objective": weighed(logits, hidden)}

    calls = {"two forwards": two_forwards, "one position": one_position, "by hand": head_and_base}
    compare_calls(reference, model, calls, found)
    with torch.no_grad():
        ids = token_ids(2, 13, 74)
        found.add("no_grad", error(reference(ids).logits, model(ids).logits))
    with torch.inference_mode():
        found.add("inference_mode", error(reference(ids).logits, model(ids).logits))
    return found.errors


def hooked(
    m: Any, ids: torch.Tensor, install: Callable[[Any, dict[str, Any]], Any]
) -> dict[str, torch.Tensor]:
    """What the hooks of a layer see, and what comes of them."""
    seen: dict[str, Any] = {}
    handle = install(m.model.layers[0], seen)
    try:
        logits = m(input_ids=ids).logits
        objective = weighed(logits)
        objective.backward(retain_graph=True)  # what the hooks see of it is compared
    finally:
        handle.remove()
    m.zero_grad()
    kept = seen.pop("retained", None)
    if kept is not None:
        seen["gradient"] = kept.grad.clone()
        kept.grad = None
    return {**{n: full(t) for n, t in seen.items()}, "logits": logits, "objective": objective}


def tensor_hook(layer: Any, seen: dict[str, Any]) -> Any:
    def after(_: Any, __: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda g: seen.__setitem__("gradient", g.clone()))

    return layer.register_forward_hook(after)


def changing_tensor_hook(layer: Any, seen: dict[str, Any]) -> Any:
    def after(_: Any, __: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda g: g * 3)

    return layer.register_forward_hook(after)


def retain(layer: Any, seen: dict[str, Any]) -> Any:
    def after(_: Any, __: Any, out: torch.Tensor) -> None:
        out.retain_grad()
        seen["retained"] = out

    return layer.register_forward_hook(after)


def replace(layer: Any, seen: dict[str, Any]) -> Any:
    return layer.register_forward_hook(lambda _, __, out: out * 3)


def in_place(layer: Any, seen: dict[str, Any]) -> Any:
    return layer.register_forward_hook(lambda _, __, out: out.mul_(3))


def before(layer: Any, seen: dict[str, Any]) -> Any:
    return layer.register_forward_pre_hook(lambda _, args: (args[0] * 3, *args[1:]))


def backward(layer: Any, seen: dict[str, Any]) -> Any:
    def after(_: Any, inputs: Any, outputs: Any) -> None:
        seen["gradient of the output"] = outputs[0].clone()

    return layer.register_full_backward_hook(after)


def value(layer: Any, seen: dict[str, Any]) -> Any:
    return layer.register_forward_hook(lambda _, __, out: seen.__setitem__("output", out.clone()))


INSTALLERS = {
    "forward hook": value,
    "tensor hook": tensor_hook,
    "tensor hook that changes the gradient": changing_tensor_hook,
    "retain_grad": retain,
    "forward hook that replaces": replace,
    "forward hook that changes in place": in_place,
    "forward pre-hook": before,
    "backward hook": backward,
}


def hooks_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Hooks of every kind on a layer: what they see, and what they change."""
    found = Findings()
    ids = token_ids(2, 13, 75)

    reference = hf("Llama")
    model = sharded(reference, mesh, sp)
    for name, install in INSTALLERS.items():
        with found.case(name):

            def run(m: Any, install: Any = install) -> dict[str, torch.Tensor]:
                return hooked(m, ids, install)

            found.add(name, step(reference, model, run))
    return found.errors


def parts_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Modules that the user calls on their own, with whole tensors."""
    found = Findings()
    reference = hf("Qwen3")
    model = sharded(reference, mesh, sp)
    given = weights_like(torch.empty(2, 13, 64), 80)
    ids = token_ids(2, 10, 81)

    def alone(path: str) -> Run:
        def run(m: Any) -> Mapping[str, torch.Tensor]:
            x = given.clone().requires_grad_()
            part = m.get_submodule(path)
            call: dict[str, Any] = {}
            if path.endswith(("layers.0", "self_attn")):
                call["position_embeddings"] = m.model.rotary_emb(x, torch.arange(13)[None])
                call["attention_mask"] = None
            out = part(hidden_states=x, **call) if call else part(x)
            out = out[0] if isinstance(out, tuple) else out
            objective = weighed(out)
            (grad,) = torch.autograd.grad(objective, x, retain_graph=True)
            return {"output": out, "gradient of the input": grad, "objective": objective}

        return run

    def prompt(m: Any) -> Mapping[str, torch.Tensor]:
        soft = given[:, :3].clone().requires_grad_()
        embeds = torch.cat([soft, m.get_input_embeddings()(ids)], 1)
        logits = m(inputs_embeds=embeds).logits
        objective = weighed(logits)
        (grad,) = torch.autograd.grad(objective, soft, retain_graph=True)
        return {"logits": logits, "gradient of the prompt": grad, "objective": objective}

    def by_pieces(m: Any) -> Mapping[str, torch.Tensor]:
        first = m(input_ids=ids[:, :6], use_cache=True)
        second = m(input_ids=ids[:, 6:], past_key_values=first.past_key_values)
        objective = weighed(first.logits, second.logits)
        return {"first": first.logits, "second": second.logits, "objective": objective}

    layer = "model.layers.0"
    paths = (layer, f"{layer}.mlp", f"{layer}.self_attn", "model.norm", "lm_head")
    calls = {f"{path} alone": alone(path) for path in paths}
    calls |= {"a learned prompt": prompt, "by pieces through the KV cache": by_pieces}
    compare_calls(reference, model, calls, found)
    return found.errors


def autocast_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Under autocast each module answers in the dtype it did, with the error bfloat16 has."""
    found = Findings()
    whole = hf("Llama", mlp_bias=False)
    model = sharded(whole, mesh, sp)
    ids = token_ids(2, 13, 82)
    dtypes: list[dict[str, torch.dtype]] = []
    logits = []
    for m in (whole, model):
        seen: dict[str, torch.dtype] = {}
        handles = [
            part.register_forward_hook(
                lambda _, __, out, path=path, seen=seen: seen.__setitem__(path, out.dtype)
            )
            for path, part in m.named_modules()
            if isinstance(part, torch.nn.Linear)
        ]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = m(input_ids=ids, labels=ids)
        out.loss.backward()
        for handle in handles:
            handle.remove()
        dtypes.append(seen)
        logits.append(full(out.logits))
    for path, expected in dtypes[0].items():
        got = dtypes[1][path]
        found.add(f"{path}: {got} for {expected}", same(got == expected))
    # bfloat16 keeps 8 bits: rounding alone makes two orders of summation differ by this much
    found.add("logits", same(error(*logits) < 2e-2))
    grads = [{n: full(p.grad) for n, p in m.named_parameters()} for m in (whole, model)]
    for name, grad in grads[0].items():
        found.add(f"gradient of {name}", same(error(grads[1][name], grad) < 2**-4))
    with Recorder() as recorder, torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids).logits.sum().backward()
    # a float32 stream is sent as what its products read, its gradients are summed as they are
    sent = {(c.kind, c.dtype) for c in recorder.collectives if c.module.startswith("model.layers")}
    expected_kinds = {("reduce_scatter", "bfloat16"), ("all_gather", "bfloat16")}
    expected_kinds |= {("reduce_scatter", "float32")}
    found.add(f"sent {sent}", same(not sp or sent == expected_kinds))
    return found.errors


def twice_job(mesh: DeviceMesh, family: str, sp: bool) -> Errors:
    """A loss that holds a gradient: of the input, or of some parameters."""
    found = Findings()
    # the fused attention ops of torch have no second derivative
    reference = hf(family, attn_implementation="eager")
    model = sharded(reference, mesh, sp)
    given = weights_like(torch.empty(2, 13, 64), 83)

    def of_input(m: Any) -> Mapping[str, torch.Tensor]:
        x = given.clone().requires_grad_()
        loss = weighed(m(inputs_embeds=x).logits)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        objective = loss + grad.pow(2).sum()
        (second,) = torch.autograd.grad(objective, x, retain_graph=True)
        return {"gradient": grad, "gradient of the gradient": second, "objective": objective}

    def of_parameters(m: Any) -> Mapping[str, torch.Tensor]:
        loss = weighed(m(input_ids=token_ids(2, 13, 84)).logits)
        names = ("embed_tokens.weight", "q_proj.weight", "o_proj.weight", "layernorm.weight")
        some = [p for name, p in m.named_parameters() if name.endswith(names)]
        grads = torch.autograd.grad(loss, some, create_graph=True)
        total = sum(whole(g).pow(2).sum() for g in grads)
        return {"total": total, "objective": loss + total}

    compare_calls(
        reference, model, {"of the input": of_input, "of parameters": of_parameters}, found
    )
    return found.errors


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as an ordinary full tensor that is still in the graph."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


# --- tests


@SIZES
@MODES
def test_gradient_checkpointing(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, checkpointing_job, sp))


@SIZES
@MODES
def test_hooks_on_a_layer(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, hooks_job, sp))


@SIZES
@MODES
def test_graphs_in_flight(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, modes_job, sp))


@SIZES
@MODES
def test_parts_on_their_own(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, parts_job, sp))


@MODES
def test_autocast(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, autocast_job, sp))


@MODES
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_differentiating_twice(ranks: Ranks, family: str, sp: bool) -> None:
    assert not beyond(ranks.run(2, twice_job, family, sp))
