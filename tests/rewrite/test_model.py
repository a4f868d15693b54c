"""The model stays the user's: its structure, its checkpoints, its copies; and errors undo all."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import tpplan
from tests.compare import (
    Errors,
    Findings,
    beyond,
    compare_parameters,
    error,
    full,
    same,
    step,
)
from tests.models import FAMILIES, SHARDED_LOGITS, hf, randomize, sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES


def labelled(batch: int, length: int, seed: int) -> Any:
    """A call for ``step``."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        out = model(input_ids=ids, labels=ids)
        return {"logits": full(out.logits), "loss": out.loss, "objective": out.loss}

    return run


def attempt(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The class and the message of what a call raises."""
    try:
        function(*args, **kwargs)
    except Exception as e:
        return type(e).__name__, str(e)
    return "", ""


# --- structure


def structure_job(mesh: DeviceMesh, family: str, sp: bool) -> Errors:
    """Names, classes, signatures and text of the modules, and every value of the state dict."""
    found = Findings()
    whole = hf(family, tie_word_embeddings=family == "Qwen2")
    given = copy.deepcopy(whole)
    model = tpplan.parallelize(given, "llama.yaml", mesh, sequence_parallel=sp)
    found.add("the same object", same(model is given))
    before, after = dict(whole.named_modules()), dict(model.named_modules())
    found.add("module tree", same(list(before) == list(after)))
    for name, old in before.items():
        new = after[name]
        cls = type(old)
        found.add(f"{name}: isinstance", same(isinstance(new, cls)))
        names = (type(new).__name__, type(new).__qualname__, type(new).__module__)
        found.add(f"{name}: class name {names}", same(type(new).__name__ == cls.__name__))
        found.add(f"{name}: qualified name", same(names[1:] == (cls.__qualname__, cls.__module__)))
        signatures = inspect.signature(old.forward), inspect.signature(new.forward)
        found.add(f"{name}: signature {signatures}", same(signatures[0] == signatures[1]))
        found.add(f"{name}: training", same(old.training == new.training))
    found.add("repr", same(repr(model) == repr(whole)))
    found.add("str of a layer", same(str(model.lm_head) == str(whole.lm_head)))
    found.add("config", same(model.config.to_dict() == whole.config.to_dict()))

    expected, got = whole.state_dict(), model.state_dict()
    found.add("state dict keys", same(list(expected) == list(got)))
    for name, tensor in expected.items():
        found.add(f"{name}: DTensor", same(isinstance(got[name], DTensor)))
        found.add(f"{name}: shape and dtype", same(got[name].shape == tensor.shape))
        found.add(f"{name}: value", same(torch.equal(full(got[name]), tensor)))
    for m in (whole, model):
        names = [n for n, _ in m.named_parameters()]
        buffers = [n for n, _ in m.named_buffers()]
        found.add(f"names of {type(m)}", same((names, buffers) == _names(whole)))
    shapes = {n: (p.shape, p.requires_grad, p.is_leaf) for n, p in whole.named_parameters()}
    ours = {n: (p.shape, p.requires_grad, p.is_leaf) for n, p in model.named_parameters()}
    found.add("parameters", same(shapes == ours))
    found.add("parameters are Parameters", same(_are_parameters(model)))
    return found.errors


def _names(model: nn.Module) -> tuple[list[str], list[str]]:
    return [n for n, _ in model.named_parameters()], [n for n, _ in model.named_buffers()]


def _are_parameters(model: nn.Module) -> bool:
    return all(isinstance(p, nn.Parameter) for p in model.parameters())


def placements_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Each rank holds its share, and no more memory than that."""
    found = Findings()
    model = sharded(hf("Llama"), mesh, sp)
    tp = mesh.size()
    expected = {
        "embed_tokens.weight": Shard(0),
        "q_proj.weight": Shard(0),
        "q_proj.bias": Shard(0),
        "o_proj.weight": Shard(1),
        "o_proj.bias": Replicate(),
        "down_proj.weight": Shard(1),
        "input_layernorm.weight": Replicate(),
        "lm_head.weight": Shard(0),
    }
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        for ending, placement in expected.items():
            if name.endswith(ending):
                found.add(f"{name}: {p.placements}", same(p.placements == (placement,)))
        local = p.to_local()
        rows = p.numel() // tp if p.placements[0].is_shard() else p.numel()
        rows += 64  # the vocabulary is uneven: a row more or less
        held = local.untyped_storage().nbytes() // local.element_size()
        found.add(f"{name}: holds {held}", same(local.numel() <= held <= rows))
    return found.errors


# --- copies


def deepcopy_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A copy computes with its own weights, at every point of the original's life."""
    found = Findings()
    for family in ("Llama", "Qwen3"):
        reference = hf(family, tie_word_embeddings=family == "Qwen3")
        model = sharded(reference, mesh, sp)
        for moment in ("fresh", "after a step"):
            name = f"{family}, {moment}"
            if moment != "fresh":
                found.add(name, step(reference, model, labelled(2, 13, 1)))
            with found.case(name):
                twin = copy.deepcopy(model)
                twin_reference = copy.deepcopy(reference)
                found.add(f"{name}: class", same(type(twin) is type(model)))
                for n, p in model.named_parameters():
                    q = twin.get_parameter(n)
                    apart = q is not p and q.to_local().data_ptr() != p.to_local().data_ptr()
                    found.add(f"{name}: {n} is a copy", same(apart))
                    found.add(f"{name}: {n}: gradient not copied", same(q.grad is None))
                with torch.no_grad():
                    for p in (*model.parameters(), *reference.parameters()):
                        p.mul_(1.25)  # the original changes
                found.add(f"{name}: copy", step(twin_reference, twin, labelled(2, 13, 2)))
                found.add(f"{name}: original", step(reference, model, labelled(2, 13, 3)))
                optimizers = [
                    torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5)
                    for m in (twin, twin_reference)
                ]
                for optimizer in optimizers:
                    optimizer.step()  # the copy changes
                found.add(f"{name}: trained copy", compare_parameters(twin_reference, twin))
                found.add(f"{name}: and on", step(twin_reference, twin, labelled(2, 13, 4)))
                found.add(f"{name}: not the original", compare_parameters(reference, model))
                found.add(f"{name}: still", step(reference, model, labelled(2, 13, 5)))
            del twin, twin_reference, optimizers
            grads = all(p.grad is not None for p in model.parameters())
            found.add(f"{name}: gradients are the original's", same(grads))
    return found.errors


def parts_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A parameter that the user replaces, and ``functional_call``, are what is computed with."""
    found = Findings()
    reference, other = hf("Qwen3", seed=1), hf("Qwen3", seed=2)
    model, sharded_other = sharded(reference, mesh, sp), sharded(other, mesh, sp)
    found.add("before", step(reference, model, labelled(2, 13, 1)))
    replaced = ("mlp.up_proj.weight", "input_layernorm.weight", "q_norm.weight", "lm_head.weight")
    for name in [n for n, _ in reference.named_parameters() if n.endswith(replaced)]:
        path, _, leaf = name.rpartition(".")
        for m, source in ((reference, other), (model, sharded_other)):
            value = source.get_parameter(name).detach().clone()
            setattr(m.get_submodule(path), leaf, nn.Parameter(value))
    found.add("replaced", step(reference, model, labelled(2, 13, 2)))
    found.add("replaced, again", step(reference, model, labelled(2, 12, 3)))

    ids = token_ids(2, 13, 4)
    results = []
    for m, source in ((reference, other), (model, sharded_other)):
        given = {n: p.detach().clone().requires_grad_() for n, p in source.named_parameters()}
        out = torch.func.functional_call(m, given, (), {"input_ids": ids, "labels": ids})
        grads = torch.autograd.grad(out.loss, list(given.values()))
        results.append((out.logits, dict(zip(given, grads, strict=True))))
    found.add("functional_call", error(results[0][0], results[1][0]))
    for name, grad in results[0][1].items():
        # relative to the gradient itself: none of them is zero here but the key biases
        largest = max(grad.abs().max().item(), 1e-3)
        ours = full(results[1][1][name])
        found.add(f"functional_call: {name}", (ours - grad).abs().max().item() / largest)
    found.add("after functional_call", step(reference, model, labelled(2, 13, 5)))
    return found.errors


# --- errors


def refusals_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Clear errors, on every rank."""
    found = Findings()
    model = sharded(hf("Llama"), mesh, sp)
    kind, message = attempt(tpplan.parallelize, model, "llama.yaml", mesh)
    found.add(f"twice: {kind}: {message}", same(kind == "ValueError" and "before" in message))
    twin = copy.deepcopy(model)
    kind, message = attempt(tpplan.parallelize, twin, "llama.yaml", mesh)
    found.add(f"a copy: {kind}: {message}", same(kind == "ValueError" and "before" in message))
    inner = model.model
    kind, message = attempt(tpplan.parallelize, inner, "llama.yaml", mesh)
    found.add(f"a part: {kind}: {message}", same(kind in ("ValueError", "PlanError")))

    rank = dist.get_rank()
    cases = {
        "other ids": {"input_ids": token_ids(2, 8, rank)},
        "other labels": {"input_ids": token_ids(2, 8, 0), "labels": token_ids(2, 8, rank)},
        "other length": {"input_ids": token_ids(2, 8 + rank, 0)},
        "other batch size": {"input_ids": token_ids(1 + rank, 8, 0)},
        "rows in another order": {"input_ids": token_ids(4, 8, 0).roll(rank, 0)},
        "embeddings": {
            "inputs_embeds": torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(rank))
        },
    }
    fresh = sharded(hf("Llama"), mesh, sp)
    for name, call in cases.items():
        model = copy.deepcopy(fresh)
        kind, message = attempt(model, **call)
        clear = kind == "ValueError" and "same inputs" in message
        found.add(f"{name}: {kind}: {message[:80]}", same(clear))
        kind, message = attempt(model.model, input_ids=token_ids(2, 8, rank))
        found.add(f"{name}, base model: {kind}", same(kind == "ValueError"))

    fresh = sharded(hf("Llama", attn_implementation="eager"), mesh, sp)
    for told in (False, True):  # None, as transformers gives it on, is what the config says
        fresh.config.output_attentions = told
        for asked in (False, True, None):
            kind, message = attempt(fresh, input_ids=token_ids(2, 8, 0), output_attentions=asked)
            refused = kind == "ValueError" and "attention weights of its own heads" in message
            due = told if asked is None else asked
            right = refused if due else kind == ""
            found.add(f"attention weights, {told}, {asked}: {message}", same(right))
    return found.errors


class _Stop(Exception):
    pass


def snapshot(model: nn.Module) -> Any:
    """All of a model that an error must leave as it was, to compare."""
    return {
        name: (
            type(m),
            id(m),
            [(k, id(v)) for k, v in vars(m).items()],
            [(k, id(v)) for k, v in m._parameters.items()],
            [(k, id(v)) for k, v in m._buffers.items()],
            [(k, id(v)) for k, v in m._modules.items()],
        )
        for name, m in model.named_modules()
    }


def bits(model: nn.Module) -> dict[str, bytes]:
    """The bytes of every parameter and buffer."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {n: t.detach().contiguous().view(torch.uint8).numpy().tobytes() for n, t in tensors}


def rollback_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """An error at any parameter leaves the model bit for bit as it was, and usable."""
    import tpplan.rewrite.planned as styles

    found = Findings()
    # ranks differ, so that a value that was sent before the error is noticed
    model = hf("Qwen3", seed=200 + dist.get_rank(), tie_word_embeddings=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    whole = copy.deepcopy(model)
    before, values = snapshot(model), bits(model)
    original = styles.distributed
    total = len(list(model.parameters()))
    for n in (0, total // 2, total - 1):
        calls = 0

        def failing(value: torch.Tensor, *args: Any, n: int = n, **kwargs: Any) -> Any:
            nonlocal calls
            if not isinstance(value, FakeTensor):
                calls += 1
                if calls > n:
                    raise _Stop(f"at parameter {n}")
            return original(value, *args, **kwargs)

        styles.distributed = failing  # type: ignore[assignment]
        try:
            kind, _ = attempt(
                tpplan.parallelize, model, "llama.yaml", mesh, sequence_parallel=sp, prove=False
            )
        finally:
            styles.distributed = original
        found.add(f"parameter {n}: raised {kind}", same(kind == "_Stop"))
        now = snapshot(model)
        changed = [k for k in before if before[k] != now.get(k)]
        found.add(f"parameter {n}: changed {changed[:3]}", same(not changed))
        found.add(f"parameter {n}: bits", same(bits(model) == values))
        found.add(f"parameter {n}: computes", step(whole, model, labelled(2, 8, 1)))
    kind, message = attempt(
        tpplan.parallelize, model, {**SHARDED_LOGITS, "rules": {"nothing.here": "colwise"}}, mesh
    )
    found.add(f"wrong plan: {kind} {message[:60]}", same(kind == "PlanError"))
    found.add("wrong plan: unchanged", same(snapshot(model) == before and bits(model) == values))
    # and then it can be done
    reference = hf("Qwen3", seed=200, tie_word_embeddings=True)
    tpplan.parallelize(model, "llama.yaml", mesh, sequence_parallel=sp)
    found.add("afterwards", step(reference, model, labelled(2, 8, 1)))
    return found.errors


# --- recipes


def checkpoint_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A full state dict out of a sharded model into an unsharded one, and back."""
    found = Findings()
    for tied in (False, True):
        source = hf("Qwen3", seed=1, tie_word_embeddings=tied)
        fresh = sharded(source, mesh, sp)
        model = copy.deepcopy(fresh)
        found.add(f"tied {tied}: before", step(source, model, labelled(2, 9, 1)))

        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(model, options=options)
        plain = not any(isinstance(t, DTensor) for t in state.values())
        found.add(f"tied {tied}: plain tensors", same(plain))
        unsharded = hf("Qwen3", seed=2, tie_word_embeddings=tied)
        unsharded.load_state_dict(state)
        found.add(f"tied {tied}: out", compare_parameters(source, unsharded))
        pickled = pickle.loads(pickle.dumps(state))
        found.add(f"tied {tied}: pickled", same(pickled.keys() == source.state_dict().keys()))

        other = hf("Qwen3", seed=3, tie_word_embeddings=tied)
        for broadcast in (False, True):
            model = copy.deepcopy(fresh)
            given = other.state_dict()
            if broadcast and dist.get_rank() > 0:
                given = {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            name = f"tied {tied}: in, broadcast={broadcast}"
            with found.case(name):
                if broadcast and mesh.size() < dist.get_world_size():
                    continue  # it broadcasts over the whole world
                set_model_state_dict(model, given, options=options)
                found.add(name, compare_parameters(other, model))
                found.add(name, step(other, model, labelled(2, 9, 2)))
        # sharded state dicts between sharded models
        model = copy.deepcopy(fresh)
        set_model_state_dict(model, get_model_state_dict(sharded(other, mesh, sp)))
        found.add(f"tied {tied}: shards", step(other, model, labelled(2, 9, 3)))
    return found.errors


def materialized(model: Any, path: Path, mesh: DeviceMesh, sp: bool) -> Any:
    """The README's recipe: a model on meta, sharded, materialised, and filled shard by shard."""
    tpplan.parallelize(model, "llama.yaml", mesh, sequence_parallel=sp)
    model.to_empty(device="cpu")
    with torch.no_grad(), safe_open(path, framework="pt") as file:
        for name, parameter in model.named_parameters():
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            part = file.get_slice(name)
            where = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            parameter.to_local().copy_(part[where])
    # buffers that no checkpoint holds are computed from the config, as transformers does
    rotary = model.model.rotary_emb
    fresh = type(rotary)(config=model.config)
    for name, buffer in fresh.named_buffers():
        rotary.register_buffer(name, buffer, persistent=False)
    return model


def meta_job(mesh: DeviceMesh, sp: bool, folder: str) -> Errors:
    """Outputs and gradients of a model that never was whole."""
    found = Findings()
    for family in FAMILIES:
        tied = family == "Qwen2"
        reference = hf(family, seed=4, tie_word_embeddings=tied)
        path = Path(folder) / f"{family}.safetensors"
        if dist.get_rank() == 0:
            tensors = {n: p.detach().clone() for n, p in reference.named_parameters()}
            save_file(tensors, path)
        dist.barrier(group=mesh.get_group())
        model = hf(family, device="meta", tie_word_embeddings=tied)
        with found.case(family):
            model = materialized(model, path, mesh, sp)
            if tied:
                found.add("tied", same(model.lm_head.weight is model.model.embed_tokens.weight))
            found.add(f"{family}: values", compare_parameters(reference, model))
            found.add(family, step(reference, model, labelled(2, 13, 1)))
            found.add(f"{family}, again", step(reference, model, labelled(1, 16, 2)))
    return found.errors


def world_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """``mesh=None`` where a process group runs: the whole world."""
    found = Findings()
    reference = hf("Llama")
    model = tpplan.parallelize(copy.deepcopy(reference), "auto", sequence_parallel=sp)
    size = model.lm_head.weight.device_mesh.size()
    found.add(f"{size} ranks", same(size == dist.get_world_size()))
    found.add("auto", step(reference, model, labelled(2, 13, 1)))
    return found.errors


# --- tests


@SIZES
@MODES
@pytest.mark.parametrize("family", FAMILIES)
def test_structure(ranks: Ranks, family: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, structure_job, family, sp), 0.0)


@SIZES
def test_placements(ranks: Ranks, tp: int) -> None:
    assert not beyond(ranks.run(tp, placements_job, True), 0.0)


@SIZES
@MODES
def test_deepcopy(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, deepcopy_job, sp))


@SIZES
@MODES
def test_replaced_parameters(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, parts_job, sp))


@SIZES
@MODES
def test_refusals(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, refusals_job, sp))


@SIZES
@MODES
def test_an_error_half_way_undoes_everything(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, rollback_job, sp))


@SIZES
@MODES
def test_checkpoints(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, checkpoint_job, sp))


@SIZES
@MODES
def test_meta_recipe(ranks: Ranks, tp: int, sp: bool, tmp_path: Path) -> None:
    assert not beyond(ranks.run(tp, meta_job, sp, str(tmp_path)))


@MODES
def test_the_whole_world(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(4, world_job, sp))


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", FAMILIES)
@MODES
def test_a_single_process(family: str, sp: bool) -> None:
    assert "RANK" not in os.environ
    reference = hf(family)
    model = tpplan.parallelize(copy.deepcopy(reference), "llama.yaml", sequence_parallel=sp)
    errors = step(reference, model, labelled(3, 13, 1))
    assert not beyond([errors])
    assert not dist.is_initialized()
    ids = token_ids(1, 5, 2)
    how = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.eval().generate(ids, **how), reference.eval().generate(ids, **how))
    with pytest.raises(ValueError, match="before"):
        tpplan.parallelize(model, "llama.yaml")
    twin = copy.deepcopy(model)
    randomize(model, 9)
    assert error(reference(ids).logits, twin(ids).logits) <= 1e-5
