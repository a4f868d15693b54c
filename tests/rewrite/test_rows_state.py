"""States of models with parameters placed by rows: copies, dtypes, checkpoints, FSDP2."""

from __future__ import annotations

import copy
import io
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
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
from tests.compare import Errors, Findings, beyond, error, full, gradient_errors, same, step
from tests.models import token_ids
from tests.ranks import Ranks
from tests.rewrite.rows import (
    CASES,
    built,
    by_rows,
    canonical,
    copies_agree,
    labelled,
    loss_of,
    sharded,
)
from tpplan.comm.rows import RowsTensor

pytestmark = pytest.mark.turns(48)

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
            tpplan.parallelize(model, CASES[case][0], mesh, sequence_parallel=sp, prove=False)
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


def assigned_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """On meta still when a whole state dict is assigned: packed and tied ones have memory then."""
    found = Findings()
    for case in ("gpt2", "phi3", "llama 1"):  # the first one's head is its table
        reference = built(case)
        model = built(case, device="meta")
        with found.case(case):
            tpplan.parallelize(model, CASES[case][0], mesh, sequence_parallel=sp, prove=False)
            nowhere = {
                n: torch.empty_like(t, device="meta") for n, t in reference.state_dict().items()
            }
            model.load_state_dict(nowhere, assign=True)
            found.add(f"{case}: nothing given", same(all(p.is_meta for p in model.parameters())))
            model.load_state_dict(reference.state_dict(), assign=True)
            reference.load_state_dict(copy.deepcopy(reference.state_dict()), assign=True)
            found.add(f"{case}: memory", same(not any(p.is_meta for p in model.parameters())))
            for name, buffer in reference.named_buffers():  # those not in the state
                path, _, leaf = name.rpartition(".")
                model.get_submodule(path)._buffers[leaf] = buffer.clone()
            found.add(case, canonical(reference, model))
            for turn in (1, 2):
                found.add(f"{case}: {turn}", step(reference, model, labelled(2, 9, turn)))
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
    for source, targets in (("tp 4", ("whole", "tp 2")), ("whole", ("tp 4",))):
        with found.case(f"{case}, {source}"), folder(mesh) as path:
            saved = trained(case, 1, shards[source])
            state = {
                "model": get_model_state_dict(saved[0]),
                "optimizer": get_optimizer_state_dict(*saved),
            }
            dcp.save(state, checkpoint_id=path)
            saved_as = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            for name, p in saved[0].named_parameters():
                fits = saved_as[f"model.{name}"].size == p.shape
                found.add(f"{case}, {source}: shape of {name}", same(fits))
            for target in targets:
                loaded = trained(case, 2, shards[target])
                into = {
                    "model": get_model_state_dict(loaded[0]),
                    "optimizer": get_optimizer_state_dict(*loaded),
                }
                dcp.load(into, checkpoint_id=path)
                set_model_state_dict(loaded[0], into["model"])
                set_optimizer_state_dict(*loaded, into["optimizer"])
                found.add(f"{case}, {source} to {target}", states_differ(saved, loaded))
    return found.errors


def full_state_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """torch's own functions for full state dicts: out, and in again."""
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
            set_model_state_dict(saved[0], given, options=options)
            for name, p in saved[0].named_parameters():
                found.add(f"{title}: {name}", same(torch.equal(full(p), other[name])))
        saved[0].load_state_dict(expected)  # each rank takes its rows
        for name, p in saved[0].named_parameters():
            found.add(f"{case}: {name} loaded", same(torch.equal(full(p), expected[name])))
    return found.errors


def full_optimizer_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """The state of an unsharded model's optimizer, into that of a sharded one."""
    found = Findings()
    for case in ("gpt2", "llama 1"):
        whole = trained(case, 1, lambda m: m)
        state = get_optimizer_state_dict(*whole)
        for broadcast in (False, True):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            model, optimizer = trained(case, 2, lambda m, case=case: sharded(case, m, mesh, sp))
            model.load_state_dict(whole[0].state_dict())
            given = copy.deepcopy(state) if dist.get_rank() == 0 or not broadcast else {}
            with found.case(f"{case}, broadcast={broadcast}"):
                set_optimizer_state_dict(model, optimizer, given, options=options)
                errors = states_differ(whole, (model, optimizer))
                found.add(f"{case}, broadcast={broadcast}", errors)
    return found.errors


def async_job(mesh: DeviceMesh, sp: bool, case: str) -> Errors:
    """Saved while the model goes on training, by whatever copies the state first."""
    found = Findings()
    stagers: dict[str, dict[str, Any]] = {
        "torch's choice": {},
        "blocking": {"async_stager": BlockingAsyncStager()},
    }
    for title, options in stagers.items():
        with found.case(f"{case}, {title}"), folder(mesh) as path:
            model, optimizer = trained(case, 1, lambda m: sharded(case, m, mesh, sp))
            moments = get_optimizer_state_dict(model, optimizer)
            expected = trained(case, 1, lambda m: sharded(case, m, mesh, sp))
            state = {"model": model.state_dict(), "optimizer": moments}
            saving = dcp.async_save(state, checkpoint_id=path, **options)
            getattr(saving, "upload_completion", saving).result()
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            dist.barrier()
            whole = trained(case, 2, lambda m: m)
            into = {"model": whole[0].state_dict(), "optimizer": get_optimizer_state_dict(*whole)}
            dcp.load(into, checkpoint_id=path)
            whole[0].load_state_dict(into["model"])
            set_optimizer_state_dict(*whole, into["optimizer"])
            found.add(f"{case}, {title}", states_differ(expected, whole))
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
        for kind, foreach in itertools.product((1.0, math.inf, 2.0), (False, True)):
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


# --- tests: each job where the ranks, the mode and the model make a difference


@pytest.mark.turns(24)
@pytest.mark.parametrize(
    ("job", "sp"),
    [
        (copies_job, False),
        (meta_job, True),
        (assigned_job, True),
        (full_state_job, True),
        (full_optimizer_job, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).removesuffix("_job"),
)
def test_state(ranks: Ranks, job: Any, sp: bool) -> None:
    assert not beyond(ranks.run(4, job, sp))


@pytest.mark.turns(24)
@pytest.mark.parametrize("case", ["gpt2", "bigcode"])
def test_checkpoints(ranks: Ranks, case: str) -> None:
    assert not beyond(ranks.run(4, checkpoint_job, True, case))


@pytest.mark.turns(24)
@pytest.mark.parametrize("case", ["gpt2", "llama 2"])
def test_async(ranks: Ranks, case: str) -> None:
    assert not beyond(ranks.run("1x4", async_job, True, case))


@pytest.mark.turns(24)
@pytest.mark.parametrize(("case", "sp"), [("gpt2", True), ("bigcode", False), ("llama 1", True)])
def test_fsdp(ranks: Ranks, case: str, sp: bool) -> None:
    assert not beyond(ranks.run("2x2", fsdp_job, sp, case))
