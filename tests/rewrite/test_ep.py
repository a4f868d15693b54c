"""Expert parallelism on real ranks, beside the unsharded model on the batches of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.compare import Errors, Findings, beyond, error, same
from tests.ranks import Ranks
from tests.rewrite.ep import (
    average,
    batch,
    built,
    errors_of,
    gradients,
    mean_of,
    objective,
)

# gated experts, biases in turns, shared experts, latent attention
FAMILIES = ("mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3")
WAYS = [
    ("ep2", False, False),
    ("ep4", False, False),
    ("ep2xtp2", False, False),
    ("ep2xtp2", True, False),
    ("ep2xtp2", False, True),
    ("ep2xtp2", True, True),
]
RATE = 0.5


def place(mesh: DeviceMesh) -> tuple[int, Any]:
    """Among the ranks of ep, and their group."""
    ep = mesh["ep"] if mesh.ndim > 1 else mesh
    return ep.get_local_rank(), ep.get_group()


def gradients_job(mesh: DeviceMesh, name: str, sp: bool, whole: bool) -> Errors:
    """Loss and gradients of one step; batches of other lengths."""
    found = Findings()
    reference, model = built(name, mesh, sp, whole)
    mine, group = place(mesh)
    losses = mean_of(reference, [batch(i) for i in range(group.size())])
    loss = objective(model, batch(mine))
    loss.backward()
    found.add("loss", error(losses[mine], loss.detach()))
    average(model, group)
    found.add("gradient", errors_of(gradients(reference), gradients(model)))
    return found.errors


def training_job(mesh: DeviceMesh, name: str, sp: bool) -> Errors:
    """Two steps of two batches each, layers recomputed."""
    found = Findings()
    reference, model = built(name, mesh, sp)
    mine, group = place(mesh)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    both = [torch.optim.SGD(m.train().parameters(), lr=RATE) for m in (reference, model)]
    for number in range(2):
        for part in range(2):
            batches = [batch(100 * number + 10 * part + i, 5) for i in range(group.size())]
            due = mean_of(reference, batches)[mine]
            loss = objective(model, batches[mine])
            loss.backward()
            found.add(f"loss {number}, {part}", error(due, loss.detach()))
        average(model, group)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    held = [dict(m.named_parameters()) for m in (reference, model)]
    found.add("after two steps", errors_of(*held))  # type: ignore[arg-type]
    return found.errors


def starved_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """All tokens choose experts of the first rank, in training and without gradients."""
    found = Findings()
    reference, model = built("mixtral", mesh, sp)
    mine, group = place(mesh)

    def first_two(_: Any, args: Any, out: Any) -> Any:
        scores, weights, chosen = out
        return scores, weights, torch.arange(2).expand_as(chosen)

    for m in (reference, model):
        for layer in m.model.layers:  # type: ignore[union-attr]
            layer.mlp.gate.register_forward_hook(first_two)  # type: ignore[union-attr]
    losses = mean_of(reference, [batch(i) for i in range(group.size())])
    with torch.no_grad():
        found.add("loss", error(losses[mine], objective(model, batch(mine))))
    objective(model, batch(mine)).backward()
    average(model, group)
    theirs, ours = gradients(reference), gradients(model)
    found.add("all have gradients", same(None not in ours.values()))
    found.add("gradient", errors_of(theirs, ours))
    return found.errors


def fsdp_job(mesh: DeviceMesh, name: str) -> Errors:
    """FSDP2: experts over dp, all else over dp and ep; two steps."""
    found = Findings()
    reference, model = built(name, mesh["ep"], False)
    everyone = mesh["dp", "ep"]._flatten("dp_ep")
    for layer in model.model.layers:  # type: ignore[union-attr]
        if hasattr(layer.mlp, "experts"):  # type: ignore[union-attr]
            fully_shard(layer.mlp.experts, mesh=mesh["dp"])  # type: ignore[union-attr]
        fully_shard(layer, mesh=everyone)  # type: ignore[arg-type]
    fully_shard(model, mesh=everyone)
    mine = everyone.get_local_rank()
    both = [torch.optim.SGD(m.train().parameters(), lr=RATE) for m in (reference, model)]
    for number in range(2):
        batches = [batch(10 * number + i, 5) for i in range(everyone.size())]
        due = mean_of(reference, batches)[mine]
        loss = objective(model, batches[mine])
        loss.backward()
        found.add(f"loss {number}", error(due, loss.detach()))
        found.add(f"gradient {number}", errors_of(gradients(reference), gradients(model)))
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return found.errors


@pytest.mark.parametrize(("shape", "sp", "whole"), WAYS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(ranks: Ranks, name: str, shape: str, sp: bool, whole: bool) -> None:
    assert not beyond(ranks.run(shape, gradients_job, name, sp, whole))


@pytest.mark.parametrize(("shape", "sp"), [("ep2", False), ("ep2xtp2", True)], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_training(ranks: Ranks, name: str, shape: str, sp: bool) -> None:
    assert not beyond(ranks.run(shape, training_job, name, sp))


@pytest.mark.parametrize(("shape", "sp"), [("ep2", False), ("ep2xtp2", True)], ids=str)
def test_ranks_without_tokens(ranks: Ranks, shape: str, sp: bool) -> None:
    assert not beyond(ranks.run(shape, starved_job, sp))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_fsdp(ranks: Ranks, name: str) -> None:
    assert not beyond(ranks.run("dp2xep2", fsdp_job, name))
