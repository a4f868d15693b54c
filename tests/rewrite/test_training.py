"""Training goes on unchanged: optimizers, clipping, hooks, freezing, loading, FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tpplan
from tests.compare import (
    Errors,
    Findings,
    beyond,
    compare_gradients,
    compare_parameters,
    error,
    full,
    gradient_errors,
    same,
    step,
)
from tests.models import hf, sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.calls import logits_of

pytestmark = pytest.mark.turns(48)

STEPS, MICROBATCHES, MAX_NORM = 3, 2, 0.5


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The model's own loss on random ids."""
    return model(input_ids=ids, labels=ids).loss


def labelled(batch: int, length: int, seed: int) -> Any:
    """A call for ``step``."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        out = model(input_ids=ids, labels=ids)
        return {"logits": full(out.logits), "loss": out.loss, "objective": out.loss}

    return run


def optimizer_of(parameters: Iterable[nn.Parameter], variant: str) -> torch.optim.Optimizer:
    """AdamW whose eps does not amplify the rounding of gradients that are nearly zero."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5, **{variant: True})


def train(model: Any, variant: str, batches: list[list[torch.Tensor]]) -> list[float]:
    """A step for each list of microbatches; the norms that were clipped."""
    optimizer = optimizer_of(model.parameters(), variant)
    norms = []
    for microbatches in batches:
        for ids in microbatches:
            (loss_of(model, ids) / len(microbatches)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        norms.append(full(norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def relative(expected: list[float], got: list[float]) -> float:
    """The worst relative error of some numbers."""
    return max(abs(g - e) / abs(e) for e, g in zip(expected, got, strict=True))


# --- optimizers


def optimizers_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Three steps of AdamW with accumulation and clipping."""
    found = Findings()
    batches = [[token_ids(2, 13, 10 * i + j) for j in range(MICROBATCHES)] for i in range(STEPS)]
    for family, variants in (("Llama", ("foreach", "fused")), ("Qwen3", ("foreach",))):
        whole = hf(family, tie_word_embeddings=family == "Qwen3")
        fresh = sharded(whole, mesh, sp)
        for variant in variants:
            reference, model = copy.deepcopy(whole), copy.deepcopy(fresh)
            name = f"{family}, {variant}"
            with found.case(name):
                expected, got = train(reference, variant, batches), train(model, variant, batches)
            found.add(f"{name}: clipped norms", relative(expected, got))
            found.add(f"{name}: norms beyond {MAX_NORM}", same(min(expected) > MAX_NORM))
            found.add(name, compare_parameters(reference, model))
            moved = max(compare_parameters(whole, reference).values())
            found.add(f"{name}: parameters moved", same(moved > 1e-3))
            found.add(f"{name}: afterwards", step(reference, model, labelled(2, 16, 3)))
    return found.errors


# --- parameters are ordinary members of the autograd graph


def autograd_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """``autograd.grad``, of all parameters, of some, twice over one graph, and by accumulation."""
    found = Findings()
    reference = hf("Qwen3")
    model = sharded(reference, mesh, sp)
    names = [name for name, _ in reference.named_parameters()]
    ids = token_ids(2, 13, 1)

    def grads(m: Any, some: list[str]) -> dict[str, torch.Tensor | None]:
        parameters = [m.get_parameter(name) for name in some]
        return dict(zip(some, torch.autograd.grad(loss_of(m, ids), parameters), strict=True))

    for title, some in (
        ("all", names),
        ("one norm", ["model.layers.0.input_layernorm.weight"]),
        ("one weight", ["model.layers.1.mlp.up_proj.weight"]),
        ("a few", names[::5]),
    ):
        with found.case(title):
            found.add(title, gradient_errors(grads(reference, some), grads(model, some)))
    clean = all(p.grad is None for p in model.parameters())
    found.add("autograd.grad leaves .grad alone", same(clean))

    for m in (reference, model):
        loss = loss_of(m, ids)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    found.add("twice over one graph", compare_gradients(reference, model))
    for m in (reference, model):
        loss_of(m, ids).backward()  # on top of what is there
    found.add("accumulated", compare_gradients(reference, model))
    return found.errors


def parameter_hooks_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Hooks on parameters see the right gradient, once, and may change it."""
    found = Findings()
    reference = hf("Qwen3")
    model = sharded(reference, mesh, sp)
    model(input_ids=token_ids(1, 8, 2))  # the hooks come after a first forward
    seen: dict[str, dict[str, list[torch.Tensor]]] = {}
    handles = []

    def watch(title: str, m: nn.Module) -> None:
        before = seen.setdefault(f"{title} hook", {})
        after = seen.setdefault(f"{title} post", {})
        for i, (name, p) in enumerate(m.named_parameters()):

            def on_gradient(g: torch.Tensor, name: str = name, i: int = i) -> torch.Tensor | None:
                before.setdefault(name, []).append(g.clone())
                return g * 2 if i % 2 else None

            def on_accumulated(p: torch.Tensor, name: str = name) -> None:
                assert p.grad is not None
                after.setdefault(name, []).append(p.grad.clone())

            handles.append(p.register_hook(on_gradient))
            handles.append(p.register_post_accumulate_grad_hook(on_accumulated))

    watch("reference", reference)
    watch("model", model)
    found.add("with hooks", step(reference, model, labelled(2, 13, 3)))
    for kind in ("hook", "post"):
        expected, got = seen[f"reference {kind}"], seen[f"model {kind}"]
        counts = {name: (len(g), len(got.get(name, ()))) for name, g in expected.items()}
        wrong = {name: n for name, n in counts.items() if n != (1, 1)}
        found.add(f"{kind}: fired once each: {wrong}", same(not wrong))
        if not wrong:
            first = ({n: g[0] for n, g in side.items()} for side in (expected, got))
            found.add(kind, gradient_errors(*first))
    for handle in handles:
        handle.remove()
    found.add("hooks removed", step(reference, model, labelled(2, 13, 4)))
    return found.errors


def frozen_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Freezing and unfreezing after the rewrite, before and after a first forward."""
    found = Findings()
    reference = hf("Qwen3")
    model = sharded(reference, mesh, sp)

    def set_trained(trained: bool, *parts: str) -> None:
        for m in (reference, model):
            for name, p in m.named_parameters():
                if any(part in name for part in parts):
                    p.requires_grad_(trained)

    choices: dict[str, tuple[str, ...]] = {
        "embedding": ("embed_tokens",),
        "one layer": ("layers.0.",),
        "embedding and first layer": ("embed_tokens", "layers.0."),
        "norms": ("norm",),
        "one norm": ("layers.1.input_layernorm",),
        "q, k norms": ("q_norm", "k_norm"),
        "biases": ("bias",),
        "head": ("lm_head",),
        "all but the head": ("model.",),
        "all but biases": ("weight",),
    }
    for i, (title, parts) in enumerate(choices.items()):
        with found.case(title):
            set_trained(False, *parts)
            found.add(f"{title} frozen", step(reference, model, labelled(2, 13, 5 + i)))
            set_trained(True, *parts)
            found.add(f"{title} unfrozen", step(reference, model, labelled(2, 13, 50 + i)))

    # frozen before the rewrite
    reference = hf("Llama")
    for name, p in reference.named_parameters():
        p.requires_grad_("layers.0." not in name and "norm" not in name)
    model = sharded(reference, mesh, sp)
    found.add("frozen before", step(reference, model, labelled(2, 13, 6)))
    for m in (reference, model):
        m.requires_grad_(True)
    found.add("unfrozen after", step(reference, model, labelled(2, 13, 7)))
    return found.errors


def first_forward_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Training after a forward that recorded no graph; and after an error in the middle."""
    found = Findings()
    reference = hf("Qwen3")
    ids = token_ids(2, 13, 8)

    def without_grad(m: Any) -> None:
        with torch.no_grad():
            m(input_ids=ids)

    def inference(m: Any) -> None:
        with torch.inference_mode():
            m(input_ids=ids)

    def evaluation(m: Any) -> None:
        m.eval()
        m(input_ids=ids)
        m.train()

    def dropped_graph(m: Any) -> None:
        loss_of(m, ids)

    def broken(m: Any) -> None:
        def fail(*_: Any) -> None:
            raise KeyError("on purpose")

        handle = m.model.layers[1].mlp.register_forward_hook(fail)
        try:
            m(input_ids=ids)
        except KeyError:
            return
        finally:
            handle.remove()
        raise AssertionError("the hook did not raise")

    fresh = sharded(reference, mesh, sp)
    for first in (without_grad, inference, evaluation, dropped_graph, broken):
        model = copy.deepcopy(fresh)
        with found.case(first.__name__):
            first(model)
            found.add(first.__name__, step(reference, model, labelled(2, 9, 9)))
            first(model)
            found.add(f"{first.__name__} again", step(reference, model, labelled(2, 16, 10)))
    return found.errors


# --- other values, other dtypes


def dtype_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """``.to(dtype)`` after the rewrite, before and after a first step."""
    found = Findings()
    for family in ("Llama", "Qwen3"):
        whole = hf(family)
        fresh = sharded(whole, mesh, sp)
        for used in (False, True):
            model = copy.deepcopy(fresh)
            if used:
                loss = loss_of(model, token_ids(1, 8, 1))
                loss.backward()
                del loss
                model.zero_grad()
            reference = copy.deepcopy(whole).to(torch.float64)
            name = f"{family}, {'after' if used else 'before'} a step"
            with found.case(name):
                returned = model.to(torch.float64)
                found.add(f"{name}: same object", same(returned is model))
                found.add(f"{name}: values", compare_parameters(reference, model))
                # not labels: transformers takes the loss of logits in float32
                found.add(name, step(reference, model, logits_of(2, 13, 2)))
    return found.errors


def loading_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """``load_state_dict`` of DTensors and of full tensors, copied and assigned."""
    found = Findings()
    cases = [
        (kind, assign, used)
        for kind in ("DTensors", "full tensors")
        for assign in (False, True)
        # an unused model has no graph yet; on more ranks that is no different
        for used in ((False, True) if mesh.size() == 2 else (True,))
    ]
    whole, other = hf("Qwen3", seed=1), hf("Qwen3", seed=2)
    fresh, sharded_other = sharded(whole, mesh, sp), sharded(other, mesh, sp)
    for kind, assign, used in (*cases, ("some full tensors", True, True)):
        reference, model = copy.deepcopy(whole), copy.deepcopy(fresh)
        name = f"{kind}, assign={assign}, {'used' if used else 'fresh'}"
        with found.case(name):
            if used:
                loss_of(model, token_ids(1, 8, 1)).backward()
                model.zero_grad()
            source = sharded_other if kind == "DTensors" else other
            some = kind == "some full tensors"

            def chosen(m: nn.Module, some: bool = some) -> dict[str, torch.Tensor]:
                state = m.state_dict()
                return {n: t.clone() for n, t in state.items() if not some or "layers.1" in n}

            reference.load_state_dict(chosen(other), strict=not some)
            keys = model.load_state_dict(chosen(source), strict=not some, assign=assign)
            found.add(f"{name}: no unexpected keys", same(not keys.unexpected_keys))
            still = all(isinstance(p, DTensor) for p in model.parameters())
            found.add(f"{name}: still DTensors", same(still))
            found.add(f"{name}: values", compare_parameters(reference, model))
            found.add(name, step(reference, model, labelled(2, 13, 2)))
            for m in (reference, model):
                optimizer_of(m.parameters(), "fused").step()
            found.add(f"{name}: after a step", step(reference, model, labelled(2, 12, 3)))
    return found.errors


def wrong_loads_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """What ``load_state_dict`` refused before it refuses still, and says why."""
    found = Findings()
    whole = hf("Llama")
    model = sharded(whole, mesh, sp)
    state = whole.state_dict()
    first = "model.layers.0.mlp.up_proj.weight"
    wrong = {
        "missing key": {n: t for n, t in state.items() if n != first},
        "unexpected key": {**state, "model.layers.0.more": torch.zeros(1)},
        "wrong shape": {**state, first: torch.zeros(3, 3)},
        "a shard for the whole": {**state, first: model.get_parameter(first).to_local().detach()},
    }
    for name, content in wrong.items():
        message = ""
        try:
            model.load_state_dict(content)
        except RuntimeError as e:
            message = str(e)
        found.add(f"{name} is refused", same("state_dict" in message))
    return found.errors


def replicas_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Ranks that start from different values all end up with the first one's."""
    found = Findings()
    model = hf("Qwen3", seed=100 + dist.get_rank())
    reference = hf("Qwen3", seed=100)
    tpplan.parallelize(model, "llama.yaml", mesh, sequence_parallel=sp)
    found.add("values", compare_parameters(reference, model))
    found.add("a step", step(reference, model, labelled(2, 13, 1)))

    # src_data_rank=None keeps each rank's own
    own = hf("Qwen3", seed=100 + dist.get_rank())
    trusted = tpplan.parallelize(
        copy.deepcopy(own), "llama.yaml", mesh, sequence_parallel=sp, src_data_rank=None
    )
    found.add("src_data_rank=None", compare_parameters(own, trusted))
    return found.errors


# --- FSDP2


def fsdp_job(mesh: DeviceMesh, sp: bool, reshard: bool, syncs: bool) -> Errors:
    """Two data-parallel halves, each sharded over two ranks, train as one model on both."""
    found = Findings()
    reference = hf("Qwen3")
    model = sharded(reference, mesh, sp)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=reshard)
    half = mesh.get_local_rank("dp")
    both = [optimizer_of(m.parameters(), "foreach") for m in (reference, model)]
    for i in range(STEPS):
        for j in range(MICROBATCHES):
            if not syncs:
                model.set_requires_gradient_sync(j == MICROBATCHES - 1)
            halves = [token_ids(2, 13, 100 * i + 10 * j + k) for k in range(2)]
            for ids in halves:
                (loss_of(reference, ids) / (2 * MICROBATCHES)).backward()
            (loss_of(model, halves[half]) / MICROBATCHES).backward()
        expected = {n: p.grad for n, p in reference.named_parameters()}
        ours = {n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}
        found.add(f"step {i}: gradients", gradient_errors(expected, ours))
        norms = [nn.utils.clip_grad_norm_(m.parameters(), MAX_NORM) for m in (reference, model)]
        found.add(f"step {i}: clipped norm", error(norms[0], full(norms[1])))
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        for name, p in model.named_parameters():
            theirs = reference.get_parameter(name)
            found.add(f"step {i}: {name}", (full(p) - full(theirs)).abs().max().item())
    model.eval()
    reference.eval()
    with torch.no_grad():
        ids = token_ids(2, 9, 1)
        found.add("afterwards", error(reference(ids).logits, model(ids).logits))
    return found.errors


# --- tests


@SIZES
@MODES
@pytest.mark.parametrize(
    "job",
    [
        optimizers_job,
        autograd_job,
        parameter_hooks_job,
        frozen_job,
        first_forward_job,
        loading_job,
        replicas_job,
    ],
    ids=lambda job: job.__name__.removesuffix("_job"),
)
def test_training(ranks: Ranks, job: Any, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, job, sp))


@SIZES
@MODES
def test_to_another_dtype(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, dtype_job, sp), 1e-12)


@MODES
def test_wrong_state_dicts(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, wrong_loads_job, sp))


@MODES
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("syncs", [False, True])
def test_fsdp(ranks: Ranks, sp: bool, reshard: bool, syncs: bool) -> None:
    assert not beyond(ranks.run("2x2", fsdp_job, sp, reshard, syncs))
