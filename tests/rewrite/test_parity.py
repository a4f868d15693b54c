"""A sharded model computes what the unsharded one does: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from tests.compare import Errors, Findings, beyond, error, full, same, step
from tests.models import (
    FAMILIES,
    SHARDED_LOGITS,
    VOCAB,
    hf,
    padded,
    randomize,
    sharded,
    token_ids,
    weighed,
    weights_like,
)
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES

Run = Callable[[Any], Mapping[str, torch.Tensor]]


# --- what is called: functions of a model that return named tensors (see tests.compare.step)


def logits_of(batch: int, length: int, seed: int, **call: Any) -> Run:
    """Logits of random ids, and a random weighing of them as the loss."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        logits = model(input_ids=ids, **call).logits
        return {"logits": logits, "objective": weighed(logits)}

    return run


def masked(batch: int, length: int, seed: int, left: bool, positions: bool) -> Run:
    """With a padding mask, and the position ids a careful caller gives with it."""
    mask, position_ids = padded(batch, length, left)
    call = {"attention_mask": mask, **({"position_ids": position_ids} if positions else {})}
    return logits_of(batch, length, seed, **call)


def labelled(batch: int, length: int, seed: int) -> Run:
    """The model's own loss, where some labels are to be ignored."""
    ids = token_ids(batch, length, seed)
    labels = ids.clone()
    labels[:, :2] = -100

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        out = model(input_ids=ids, labels=labels)
        return {"logits": out.logits, "loss": out.loss, "objective": out.loss}

    return run


def base_model(batch: int, length: int, seed: int) -> Run:
    """A loss on what the model without its head yields."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        hidden = model.model(input_ids=ids).last_hidden_state
        return {"last_hidden_state": hidden, "objective": weighed(hidden)}

    return run


def embedded(batch: int, length: int, seed: int) -> Run:
    """``inputs_embeds``, whose gradient is compared too."""
    embeds = weights_like(torch.empty(batch, length, 64), seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        dtype = next(model.parameters()).dtype
        given = embeds.to(dtype).requires_grad_()
        logits = model(inputs_embeds=given).logits
        objective = weighed(logits)
        (grad,) = torch.autograd.grad(objective, given, retain_graph=True)
        return {"logits": logits, "gradient of inputs_embeds": grad, "objective": objective}

    return run


def last_logits(batch: int, length: int, seed: int) -> Run:
    """``logits_to_keep=1``."""
    return logits_of(batch, length, seed, logits_to_keep=1)


def hidden_states(batch: int, length: int, seed: int) -> Run:
    """``output_hidden_states``: each of them, and a loss on all of them."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        out = model(input_ids=ids, output_hidden_states=True)
        named = {f"hidden state {i}": h for i, h in enumerate(out.hidden_states)}
        return {**named, "logits": out.logits, "objective": weighed(out.logits, *out.hidden_states)}

    return run


def tuple_output(batch: int, length: int, seed: int) -> Run:
    """``return_dict=False``."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        logits = model(input_ids=ids, return_dict=False)[0]
        return {"logits": logits, "objective": weighed(logits)}

    return run


def every_call() -> dict[str, Run]:
    """All that is compared for a model whose logits are whole."""
    return {
        "batch 1, length 16": logits_of(1, 16, 11),
        "batch 3, length 13": logits_of(3, 13, 12),
        "batch 2, length 3": logits_of(2, 3, 13),
        "batch 1, length 1": logits_of(1, 1, 14),
        "left padding": masked(3, 13, 15, left=True, positions=False),
        "left padding, position ids": masked(3, 12, 16, left=True, positions=True),
        "right padding": masked(3, 10, 17, left=False, positions=False),
        "labels": labelled(3, 13, 18),
        "labels, length 16": labelled(1, 16, 19),
        "last_hidden_state": base_model(3, 13, 20),
        "last_hidden_state, length 8": base_model(1, 8, 21),
        "inputs_embeds": embedded(2, 13, 22),
        "inputs_embeds, length 3": embedded(1, 3, 23),
        "logits_to_keep": last_logits(3, 13, 24),
        "output_hidden_states": hidden_states(2, 7, 25),
        "return_dict=False": tuple_output(1, 6, 26),
    }


def some_calls() -> dict[str, Run]:
    """A few of them, for variants of the model."""
    names = ("batch 3, length 13", "left padding, position ids", "labels", "last_hidden_state")
    calls = every_call()
    return {name: calls[name] for name in names}


def compare_calls(reference: Any, model: Any, calls: Mapping[str, Run], found: Findings) -> None:
    """Each call on both models, one after the other on the same two."""
    for name, run in calls.items():
        with found.case(name):
            found.add(name, step(reference, model, run))


# --- jobs


def families_job(mesh: DeviceMesh, family: str, sp: bool) -> Errors:
    """Every call."""
    found = Findings()
    reference = hf(family)
    compare_calls(reference, sharded(reference, mesh, sp), every_call(), found)
    return found.errors


def variants_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Some calls on variants of the models."""
    found = Findings()
    calls = some_calls()
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "tied": ("Llama", {"tie_word_embeddings": True}),
        "tied Qwen2": ("Qwen2", {"tie_word_embeddings": True}),
        "eager": ("Llama", {"attn_implementation": "eager"}),
        "eager Qwen3": ("Qwen3", {"attn_implementation": "eager"}),
        "no biases": ("Llama", {"attention_bias": False, "mlp_bias": False}),
        "no padding id": ("Llama", {"pad_token_id": None}),
        "padding id on another rank": ("Llama", {"pad_token_id": VOCAB - 2}),
        "even vocabulary": ("Llama", {"vocab_size": 136}),
        "one layer": ("Llama", {"num_hidden_layers": 1}),
        "sliding window": ("Mistral", {"sliding_window": 5}),
    }
    every_size = ("tied", "padding id on another rank", "even vocabulary")
    for name, (family, changes) in variants.items():
        if mesh.size() > 2 and name not in every_size:
            continue
        with found.case(name):
            reference = hf(family, seed=7, **changes)
            model = sharded(reference, mesh, sp)
            if changes.get("tie_word_embeddings"):
                tied = model.lm_head.weight is model.model.embed_tokens.weight
                found.add(f"{name}: still one parameter", same(tied))
            inner = Findings()
            compare_calls(reference, model, calls, inner)
            found.add(name, inner.errors)
    return found.errors


def sharded_logits_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """``output: shard``: DTensor logits, and torch's vocab-parallel cross entropy."""
    found = Findings()

    def by_hand(ids: torch.Tensor, vocab: int) -> Run:
        def run(model: Any) -> Mapping[str, torch.Tensor]:
            logits = model(input_ids=ids).logits
            flat, labels = logits[:, :-1].reshape(-1, vocab), ids[:, 1:].reshape(-1)
            loss = F.cross_entropy(flat, labels)
            return {"logits": logits, "loss": loss, "objective": loss}

        return run

    for vocab in (136, VOCAB):
        reference = hf("Llama", seed=3, vocab_size=vocab)
        model = sharded(reference, mesh, sp, SHARDED_LOGITS)
        ids = token_ids(3, 13, 31)
        logits = model(input_ids=ids).logits
        found.add("logits are sharded", same(isinstance(logits, DTensor)))
        found.add("logits have the global shape", same(logits.shape == (3, 13, vocab)))
        calls = {
            f"cross_entropy, vocabulary {vocab}": by_hand(ids, vocab),
            f"labels, vocabulary {vocab}": labelled(2, 16, 32),
        }
        for name, run in calls.items():
            with found.case(name), loss_parallel():
                found.add(name, step(reference, model, run, plain=False))
    return found.errors


def checkpointing_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Activation checkpointing of every layer, both variants torch has."""
    found = Findings()
    for family in ("Llama", "Qwen3"):
        for reentrant in (False, True):
            reference = hf(family)
            model = sharded(reference, mesh, sp)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            name = f"{family}, use_reentrant={reentrant}"
            for length in (13, 16):
                with found.case(name):
                    errors = step(reference, model, labelled(2, length, 40 + length))
                found.add(f"{name}, length {length}", errors)

            def two_lengths(m: Any) -> Mapping[str, torch.Tensor]:
                first, second = (labelled(2, n, n)(m)["loss"] for n in (9, 14))
                return {"first": first, "second": second, "objective": first + 2 * second}

            with found.case(f"{name}, two lengths in flight"):
                errors = step(reference, model, two_lengths)
            found.add(f"{name}, two lengths in flight", errors)
    return found.errors


def generate_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Greedy decoding with a KV cache, token for token."""
    found = Findings()
    for family in ("Llama", "Qwen3"):
        reference = hf(family).eval()
        randomize(reference, 5, std=0.3)  # with small weights it would repeat one token
        model = sharded(reference, mesh, sp)
        for batch, length in ((1, 5), (2, 6)):
            ids = token_ids(batch, length, 50 + batch)
            mask, _ = padded(batch, length)
            how = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
            name = f"{family}, batch {batch}"
            with found.case(name):
                expected = reference.generate(ids, **how)
                found.add(name, same(torch.equal(model.generate(ids, **how), expected)))
                got = model.generate(ids, **how, use_cache=False)
                found.add(f"{name}, no cache", same(torch.equal(got, expected)))
            if len(expected[0, length:].unique()) < 3:
                found.add(f"{name}: the test is weak, it repeats one token", same(False))
        # and training goes on afterwards
        found.add(family, step(reference, model, labelled(2, 9, 55)))
    return found.errors


def double_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """In float64 nothing but rounding is left, which 1e-12 bounds."""
    found = Findings()
    reference = hf("Qwen3").double()
    compare_calls(reference, sharded(reference, mesh, sp), every_call(), found)
    return found.errors


def vocabulary_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Ids outside the vocabulary raise on every rank, and the model goes on working."""
    found = Findings()
    for vocab in (VOCAB, 136):
        reference = hf("Llama", vocab_size=vocab)
        model = sharded(reference, mesh, sp)
        for bad in (vocab, -1, vocab + 1000):
            ids = token_ids(2, 8, 60)
            ids[1, 3] = bad
            raised: list[str] = []
            for m in (reference, model):
                try:
                    m(input_ids=ids)
                    raised.append("nothing")
                except Exception as e:
                    raised.append(type(e).__name__)
            found.add(f"id {bad} of {vocab}: {raised}", same(raised[0] == raised[1] != "nothing"))
        found.add("afterwards", step(reference, model, labelled(2, 8, 61)))
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


def hooks_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Hooks of every kind on a layer: what they see, and what they change."""
    found = Findings()
    ids = token_ids(2, 13, 75)

    def hooked(m: Any, install: Callable[[Any, dict[str, Any]], Any]) -> dict[str, torch.Tensor]:
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
        return layer.register_forward_hook(
            lambda _, __, out: seen.__setitem__("output", out.clone())
        )

    installers = {
        "forward hook": value,
        "tensor hook": tensor_hook,
        "tensor hook that changes the gradient": changing_tensor_hook,
        "retain_grad": retain,
        "forward hook that replaces": replace,
        "forward hook that changes in place": in_place,
        "forward pre-hook": before,
        "backward hook": backward,
    }
    reference = hf("Llama")
    model = sharded(reference, mesh, sp)
    for name, install in installers.items():
        with found.case(name):

            def run(m: Any, install: Any = install) -> dict[str, torch.Tensor]:
                return hooked(m, install)

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
        logits.append(out.logits.detach())
    for path, expected in dtypes[0].items():
        got = dtypes[1][path]
        found.add(f"{path}: {got} for {expected}", same(got == expected))
    # bfloat16 keeps 8 bits: rounding alone makes two orders of summation differ by this much
    found.add("logits", same(error(*logits) < 2e-2))
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


def dropout_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Attention dropout works in eval mode, and is refused by name in training."""
    found = Findings()
    reference = hf("Llama", attention_dropout=0.1)
    model = sharded(reference, mesh, sp)
    message = ""
    try:
        model(input_ids=token_ids(2, 8, 84))
    except RuntimeError as e:
        message = str(e)
    found.add(f"training: {message}", same("layers.0.self_attn" in message))
    reference.eval()
    model.eval()
    found.add("eval", step(reference, model, labelled(2, 8, 85)))
    return found.errors


# --- tests


@SIZES
@MODES
@pytest.mark.parametrize("family", FAMILIES)
def test_families(ranks: Ranks, family: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, families_job, family, sp))


@SIZES
@MODES
def test_variants_of_the_model(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, variants_job, sp))


@SIZES
@MODES
def test_sharded_logits(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, sharded_logits_job, sp))


@SIZES
@MODES
def test_gradient_checkpointing(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, checkpointing_job, sp))


@SIZES
@MODES
def test_generate(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, generate_job, sp))


@SIZES
@MODES
def test_float64(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, double_job, sp), 1e-12)


@SIZES
@MODES
def test_ids_outside_the_vocabulary(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, vocabulary_job, sp))


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


@MODES
def test_dropout(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, dropout_job, sp))
