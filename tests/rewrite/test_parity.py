"""A sharded model computes what the unsharded one does: outputs and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from tests.compare import Errors, Findings, beyond, full, same, step
from tests.models import (
    FAMILIES,
    SHARDED_LOGITS,
    VOCAB,
    hf,
    padded,
    randomize,
    sharded,
    token_ids,
)
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.calls import (
    Run,
    compare_calls,
    every_call,
    labelled,
    some_calls,
)


def families_job(mesh: DeviceMesh, family: str, sp: bool) -> Errors:
    """Every call; of a gradient that is zero in float64, float32 has the rounding only."""
    found, calls = Findings(), every_call()
    reference = hf(family)
    model = sharded(reference, mesh, sp)
    compare_calls(reference, model, calls, found)
    alone = "batch 1, length 1"  # attention to one position has no gradient
    exact = copy.deepcopy(reference).double()
    for each in (exact, reference, model):
        each.zero_grad()
        calls[alone](each)["objective"].backward()
    largest = max(_size(p) for p in exact.parameters())
    for name, p in exact.named_parameters():
        if _size(p) < 1e-13 * largest:
            rounded = max(_size(m.get_parameter(name)) for m in (reference, model))
            found.add(f"{alone}: gradient of {name}", rounded / largest)
    return found.errors


def _size(parameter: torch.Tensor) -> float:
    grad = parameter.grad
    return 0.0 if grad is None else full(grad).abs().max().item()


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
                if batch > 1:
                    got = model.generate(ids, **how, use_cache=False)
                    found.add(f"{name}, no cache", same(torch.equal(got, expected)))
            if len(expected[0, length:].unique()) < 3:
                found.add(f"{name}: the test is weak, it repeats one token", same(False))
        # and training goes on afterwards
        found.add(family, step(reference, model, labelled(2, 9, 55)))
    return found.errors


def double_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """In float64 nothing but rounding is left, which 1e-12 bounds.

    Not with labels: transformers takes the loss of logits in float32 (see test_loss for float64).
    """
    found = Findings()
    reference = hf("Qwen3").double()
    calls = {name: run for name, run in every_call().items() if not name.startswith("labels")}
    compare_calls(reference, sharded(reference, mesh, sp), calls, found)
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
