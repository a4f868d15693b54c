"""Models with packed projections and shared key-value heads train, save and load as others do."""

from __future__ import annotations

import copy
import io
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
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
from tests.models import VOCAB, randomize, token_ids, weighed
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tpplan.comm.rows import RowsTensor

INFINITY = float("inf")
_DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCAB,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# the plan, the class, the configuration, and the parameters that are placed by rows at tp 4
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "gpt2": ("gpt2.yaml", "GPT2", _GPT, "c_attn"),
    "bigcode": ("gpt_bigcode.yaml", "GPTBigCode", {**_GPT, "multi_query": True}, "c_attn"),
    "phi3": ("phi3.yaml", "Phi3", {**_DECODER, "num_key_value_heads": 2}, "qkv_proj"),
    "llama 2": (
        "llama.yaml",
        "Llama",
        {**_DECODER, "num_key_value_heads": 2, "attention_bias": True},
        "k_proj",
    ),
    "llama 1": ("llama.yaml", "Llama", {**_DECODER, "num_key_value_heads": 1}, "v_proj"),
}
ALL = tuple(CASES)


def built(case: str, seed: int = 1, device: str = "cpu") -> Any:
    """The whole model of a case, in training mode."""
    import transformers

    _, family, config, _ = CASES[case]
    kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    with torch.device(device):
        model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**config))
    if device != "meta":
        randomize(model, seed)
    return model.train()


def sharded(case: str, model: Any, mesh: DeviceMesh, sp: bool) -> Any:
    """A sharded copy; the model itself stays whole."""
    return tpplan.parallelize(copy.deepcopy(model), CASES[case][0], mesh, sequence_parallel=sp)


def by_rows(model: nn.Module) -> dict[str, RowsTensor]:
    """The parameters that are placed by rows."""
    return {n: p for n, p in model.named_parameters() if isinstance(p, RowsTensor)}


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The model's own loss."""
    return model(input_ids=ids, labels=ids).loss


def labelled(batch: int, length: int, seed: int) -> Any:
    """A call for ``step``."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        out = model(input_ids=ids, labels=ids)
        return {"logits": full(out.logits), "loss": out.loss, "objective": out.loss}

    return run


def canonical(expected: nn.Module, model: nn.Module) -> Errors:
    """Whether every parameter, gathered, is bit for bit the original."""
    theirs = dict(expected.named_parameters())
    return {
        f"{name} is the original": same(torch.equal(full(p), full(theirs[name])))
        for name, p in model.named_parameters()
    }


def copies_agree(tensors: Mapping[str, torch.Tensor]) -> Errors:
    """Whether ranks that hold the same rows hold the same bits: what each would save."""
    errors = {}
    for name, t in tensors.items():
        if not isinstance(t, RowsTensor):
            continue
        local = t.detach().to_local()
        whole = full(t)
        errors[f"copies of {name} agree"] = same(
            torch.equal(t.rows.take(whole, t.device_mesh.get_local_rank()), local)
        )
    return errors


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
            for to_none in (False, True):
                model.zero_grad(set_to_none=to_none)
                cleared = all(
                    p.grad is None if to_none else not full(p.grad).any()
                    for p in model.parameters()
                )
                found.add(f"{case}: zero_grad({to_none})", same(cleared))
                reference.zero_grad()
                for m in (reference, model):
                    loss_of(m, ids).backward()
                found.add(f"{case}: after zero_grad", compare_gradients(reference, model))
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
        for foreach, kind in itertools.product((True, False), (2.0, 1.0, INFINITY)):
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
    for name in names:
        reference = built(case)
        model = sharded(case, reference, mesh, sp)
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
            moved = max(compare_parameters(built(case), reference).values())
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
            rows.grad.to_local().view(-1)[0] = INFINITY
        scaler.step(optimizer)
        found.add(f"{case}: skipped", compare_parameters(before, model))
    return found.errors


# --- copies, dtypes, state dicts


def copies_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """deepcopy, other dtypes, loading of whole and sharded state dicts, torch.save."""
    found = Findings()
    for case in ("gpt2", "llama 1"):
        reference, other = built(case), built(case, seed=2)
        model = sharded(case, reference, mesh, sp)
        with found.case(case):
            found.add(f"{case}: keys", same([*reference.state_dict()] == [*model.state_dict()]))
            loss_of(model, token_ids(1, 8, 1)).backward()
            model.zero_grad()
            twin = copy.deepcopy(model)
            found.add(f"{case}: copy", step(reference, twin, labelled(2, 9, 1)))
            with torch.no_grad():
                for p in twin.parameters():
                    p.zero_()
            found.add(f"{case}: copied", canonical(reference, model))
            twin.load_state_dict(other.state_dict())
            found.add(f"{case}: whole state", canonical(other, twin))
            found.add(f"{case}: whole state", step(other, twin, labelled(2, 9, 2)))
            tied = case == "gpt2"  # which torch's own assign=True unties
            twin.load_state_dict(model.state_dict(), assign=not tied)
            found.add(f"{case}: sharded state", canonical(reference, twin))
            buffer = io.BytesIO()
            torch.save(model.state_dict(), buffer)
            buffer.seek(0)
            twin = sharded(case, other, mesh, sp)
            twin.load_state_dict(torch.load(buffer))
            found.add(f"{case}: torch.load", canonical(reference, twin))
            found.add(f"{case}: torch.load", step(reference, twin, labelled(2, 9, 3)))

            whole = copy.deepcopy(reference).double()
            model.double()
            found.add(f"{case}: double", canonical(whole, model))
            found.add(f"{case}: double", step(whole, model, labelled(2, 9, 4)))
            whole.to(torch.bfloat16)
            model.to(torch.bfloat16)
            found.add(f"{case}: bfloat16", canonical(whole, model))
            kept = all(type(p) is RowsTensor for p in by_rows(model).values())
            found.add(f"{case}: still rows", same(kept))
            dtypes = {p.to_local().dtype for p in model.parameters()}
            found.add(f"{case}: local dtypes", same(dtypes == {torch.bfloat16}))
    return found.errors


def meta_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Built on meta, materialised, and filled from a whole state dict, or drawn at random."""
    found = Findings()
    for case in ("phi3", "llama 1"):
        reference = built(case)
        model = built(case, device="meta")
        with found.case(case):
            tpplan.parallelize(model, CASES[case][0], mesh, sequence_parallel=sp)
            model.to_empty(device="cpu")
            model.load_state_dict(reference.state_dict())
            buffers = dict(reference.named_buffers())  # not persistent, so not in the state
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            found.add(case, canonical(reference, model))
            found.add(case, step(reference, model, labelled(2, 9, 1)))
            torch.manual_seed(dist.get_rank())
            for p in by_rows(model).values():
                nn.init.normal_(p)
            found.add(f"{case}: drawn", copies_agree(by_rows(model)))
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
        try:
            q[0] = 0.0
            found.add("a write through a view raises", same(False))
        except RuntimeError as e:
            found.add("a write through a view raises", same("would be lost" in str(e)))
    return found.errors


# --- checkpoints


@contextmanager
def folder(mesh: DeviceMesh) -> Iterator[str]:
    """A folder that all ranks see."""
    with tempfile.TemporaryDirectory() as mine:
        path = [mine]
        dist.broadcast_object_list(path, src=0)
        yield path[0]
        dist.barrier()


def trained(case: str, seed: int, shard: Callable[[Any], Any]) -> tuple[Any, Any]:
    model = shard(built(case, seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    loss_of(model, token_ids(2, 9, seed)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def states_differ(expected: Any, got: Any) -> Errors:
    """The errors between the states of two (model, optimizer) pairs."""
    errors = canonical(expected[0], got[0])
    sides = [get_optimizer_state_dict(*pair)["state"] for pair in (expected, got)]
    for name, values in sides[0].items():
        for key, value in values.items():
            equal = torch.equal(full(value), full(sides[1][name][key]))
            errors[f"{key} of {name} is the original"] = same(equal)
    return errors


def checkpoint_job(mesh: DeviceMesh, sp: bool, case: str) -> Errors:
    """Saved at tp 4; loaded whole, at tp 2, and at tp 4 again, and back from whole."""
    found = Findings()
    half = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))["tp"]
    shards: dict[str, Callable[[Any], Any]] = {
        "whole": lambda m: m,
        "tp 2": lambda m: sharded(case, m, half, sp),
        "tp 4": lambda m: sharded(case, m, mesh, sp),
    }
    for source, target in (("tp 4", "whole"), ("tp 4", "tp 2"), ("whole", "tp 4")):
        title = f"{case}, {source} to {target}"
        with found.case(title), folder(mesh) as path:
            saved, loaded = trained(case, 1, shards[source]), trained(case, 2, shards[target])
            state = {
                "model": get_model_state_dict(saved[0]),
                "optimizer": get_optimizer_state_dict(*saved),
            }
            dcp.save(state, checkpoint_id=path)
            saved_as = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            for name, p in saved[0].named_parameters():
                found.add(
                    f"{title}: shape of {name}", same(saved_as[f"model.{name}"].size == p.shape)
                )
            into = {
                "model": get_model_state_dict(loaded[0]),
                "optimizer": get_optimizer_state_dict(*loaded),
            }
            dcp.load(into, checkpoint_id=path)
            set_model_state_dict(loaded[0], into["model"])
            set_optimizer_state_dict(*loaded, into["optimizer"])
            found.add(title, states_differ(saved, loaded))
    return found.errors


def full_state_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """torch's own functions for full state dicts: out; in, they are right, or raise."""
    found = Findings()
    for case in ("gpt2", "phi3", "llama 1"):
        saved = trained(case, 1, lambda m, case=case: sharded(case, m, mesh, sp))
        expected = {n: full(p).clone() for n, p in saved[0].state_dict().items()}
        for offload in (False, True):
            options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
            with found.case(case):
                state = get_model_state_dict(saved[0], options=options)
                moments = get_optimizer_state_dict(*saved, options=options)
                if offload and dist.get_rank() > 0:
                    found.add(f"{case}: only rank 0", same(not state))
                    continue
                for name, value in expected.items():
                    equal = torch.equal(state[name], value)
                    found.add(f"{case}, offload={offload}: {name}", same(equal))
                    if name not in moments["state"]:  # tied
                        continue
                    plain = not isinstance(moments["state"][name]["exp_avg"], DTensor)
                    found.add(f"{case}, offload={offload}: exp_avg", same(plain))
        for broadcast in (False, True):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            other = {name: 2 * value for name, value in expected.items()}
            given = dict(other) if dist.get_rank() == 0 or not broadcast else {}
            title = f"{case}: set, broadcast={broadcast}"
            try:
                set_model_state_dict(saved[0], given, options=options)
                # possible where every rank holds all rows: one KV head for all
                for name, p in saved[0].named_parameters():
                    found.add(f"{title}: {name}", same(torch.equal(full(p), other[name])))
            except RuntimeError as e:
                told = "Rows" in str(e) or "must match" in str(e)
                found.add(f"{title} is refused: {e}", same(told))
        saved[0].load_state_dict(expected)  # each rank takes its rows
        for name, p in saved[0].named_parameters():
            found.add(f"{case}: {name} loaded", same(torch.equal(full(p), expected[name])))
    return found.errors


# --- FSDP2


def fsdp_job(mesh: DeviceMesh, sp: bool, case: str) -> Errors:
    """Two data-parallel halves of two ranks each."""
    found = Findings()
    reference = built(case)
    model = sharded(case, reference, mesh, sp)
    placed = [*by_rows(model)]
    found.add("has rows", same(bool(placed)))
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    for layer in layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    found.add("placed", canonical(reference, model))
    half = mesh.get_local_rank("dp")
    both = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5) for m in (reference, model)]
    for i in range(3):
        halves = [token_ids(2, 9, 10 * i + k) for k in range(2)]
        for ids in halves:
            (loss_of(reference, ids) / 2).backward()
        loss_of(model, halves[half]).backward()
        expected = {n: p.grad for n, p in reference.named_parameters()}
        ours = {n: full(p.grad) for n, p in model.named_parameters()}
        found.add(f"step {i}: gradients", gradient_errors(expected, ours))
        for kind, foreach in itertools.product((1.0, INFINITY, 2.0), (False, True)):
            norms = [
                nn.utils.get_total_norm([p.grad for p in m.parameters()], kind, foreach=foreach)
                for m in (reference, model)
            ]
            found.add(f"step {i}: norm {kind} {foreach}", error(norms[0], full(norms[1])))
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (reference, model)]
        found.add(f"step {i}: clipped", error(norms[0], full(norms[1])))
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        for name, p in model.named_parameters():
            theirs = reference.get_parameter(name)
            found.add(f"step {i}: {name}", (full(p) - theirs).abs().max().item())
    with folder(mesh) as path:
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        whole = built(case, seed=2)
        into = {"model": whole.state_dict()}
        dcp.load(into, checkpoint_id=path)
        whole.load_state_dict(into["model"])
        found.add("saved", canonical(model, whole))
    return found.errors


# --- torch.compile


def compile_job(mesh: DeviceMesh, sp: bool, case: str) -> Errors:
    """One graph, the same numbers."""
    found = Findings()
    reference = built(case)
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


@pytest.mark.parametrize(
    ("job", "tp", "sp"),
    [
        (one_head_job, 4, True),
        (hooks_job, 4, True),
        (hooks_job, 2, False),
        (clipping_job, 4, True),
        (scaler_job, 4, True),
        (copies_job, 4, False),
        (meta_job, 4, True),
        (reads_job, 2, True),
        (full_state_job, 4, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).removesuffix("_job"),
)
def test_training(ranks: Ranks, job: Any, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, job, sp))


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


@pytest.mark.parametrize("case", ["gpt2", "bigcode"])
def test_checkpoints(ranks: Ranks, case: str) -> None:
    assert not beyond(ranks.run(4, checkpoint_job, True, case))


@pytest.mark.parametrize(("case", "sp"), [("gpt2", True), ("bigcode", False), ("llama 1", True)])
def test_fsdp(ranks: Ranks, case: str, sp: bool) -> None:
    assert not beyond(ranks.run("2x2", fsdp_job, sp, case))


@pytest.mark.parametrize(("case", "sp"), [("gpt2", True), ("llama 1", False)])
def test_compile(ranks: Ranks, case: str, sp: bool) -> None:
    assert not beyond(ranks.run(2, compile_job, sp, case))
