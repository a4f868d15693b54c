"""Mixtures of experts of transformers on real ranks: training, what routers give, generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from benchmarks import zoo
from tests.compare import Errors, Findings, beyond, compare_parameters, error, same
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES

# gated experts, biases in turns, shared experts, latent attention, dense products of all experts,
# linear attention beside
FAMILIES = ("mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3", "llama4_text", "qwen3_next")
ROUTED = ("mixtral", "qwen2_moe")  # with a loss that balances the experts
RATE = 0.5


def pair(name: str, mesh: DeviceMesh, sp: bool, whole: bool = False) -> tuple[nn.Module, nn.Module]:
    """A model, and the same sharded; ``whole``: whether by whole experts."""
    reference = zoo.tiny(name)
    plan = plan_of(reference, whole)
    model = tpplan.parallelize(
        copy.deepcopy(reference), plan, mesh=mesh, sequence_parallel=sp, prove=False
    )
    return reference, model


def plan_of(model: nn.Module, whole: bool) -> Any:
    """The shipped one; ``whole``: by whole experts."""
    plan = tpplan.load_plan("auto", model)
    if not whole:
        return plan
    own = {"style": "experts", "shard": "experts"}
    experts = {r.pattern.text: own for r in plan.rules if r.style == own["style"]}
    return tpplan.load_plan({"tpplan": 1, "extends": plan.name, "rules": experts})


def trained(model: Any, recompute: bool) -> list[torch.Tensor]:
    """The losses of two steps, each of two batches of other lengths."""
    if recompute:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        for length in (8, 13):
            ids = torch.randint(3, zoo.VOCAB, (2, length), generator=generator)
            # one of its own for the gradient of each rank's rows, not the model's loss of labels
            out = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            loss = -out.gather(-1, ids.roll(-1, 1)[..., None]).mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return losses


def training_job(
    mesh: DeviceMesh, name: str, sp: bool, recompute: bool, whole: bool = False
) -> Errors:
    """Losses of two steps, and the parameters after them."""
    found = Findings()
    reference, model = pair(name, mesh, sp, whole)
    theirs, ours = trained(reference, recompute), trained(model, recompute)
    for i, (due, got) in enumerate(zip(theirs, ours, strict=True)):
        found.add(f"loss {i}", error(due, got))
    found.add("after two steps", compare_parameters(reference, model))
    return found.errors


def routing_job(mesh: DeviceMesh, name: str, sp: bool) -> Errors:
    """The loss that balances experts, its gradients, and the routers' logits."""
    found, results = Findings(), []
    models = pair(name, mesh, sp)
    ids = torch.randint(3, zoo.VOCAB, (2, 11), generator=torch.Generator().manual_seed(3))
    for model in models:
        out = model(input_ids=ids, labels=ids, output_router_logits=True)
        (out.loss + 3 * out.aux_loss + sum(x.square().mean() for x in out.router_logits)).backward()
        results.append(out)
    due, got = results
    found.add("aux_loss", error(due.aux_loss, got.aux_loss))
    found.add("loss", error(due.loss, got.loss))
    for theirs, ours in zip(due.router_logits, got.router_logits, strict=True):
        found.add("router logits", error(theirs, ours))
    gradients = [{n: p.grad for n, p in model.named_parameters()} for model in models]
    largest = max(float(g.abs().max()) for g in gradients[0].values() if g is not None)
    for parameter, whole in gradients[0].items():
        mine = gradients[1][parameter]
        if whole is None or mine is None:
            found.add(parameter, same(whole is mine))
            continue
        off = float((mine.full_tensor() - whole).abs().max())
        found.add(parameter, off / max(float(whole.abs().max()), 1e-3 * largest))
    return found.errors


def generation_job(mesh: DeviceMesh, name: str, sp: bool) -> Errors:
    """The tokens of greedy generation, with padding on the left, and with caches."""
    found = Findings()
    reference, model = (m.eval() for m in pair(name, mesh, sp))
    ids = torch.randint(3, zoo.VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    how["use_cache"] = True
    with torch.no_grad():
        due: Any = reference.generate(ids, **how)  # type: ignore[operator]
        got: Any = model.generate(ids, **how)  # type: ignore[operator]
    found.add("tokens", same(torch.equal(due, got)))
    return found.errors


@MODES
@SIZES
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.matrix
def test_training(ranks: Ranks, name: str, recompute: bool, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, training_job, name, sp, recompute))


@MODES
@SIZES
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.matrix
def test_training_whole_experts(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, training_job, name, sp, False, True))


@MODES
@SIZES
@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.matrix
def test_routing(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, routing_job, name, sp))


@MODES
@SIZES
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.matrix
def test_generate(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, generation_job, name, sp))


def ties_job(mesh: DeviceMesh, sp: bool) -> str:
    """What is said where a rank's router orders the experts otherwise."""
    _, model = pair("mixtral", mesh, sp)
    ids = torch.randint(3, zoo.VOCAB, (2, 8), generator=torch.Generator().manual_seed(3))
    if mesh.get_local_rank() == 1:
        router: Any = model.get_submodule("model.layers.1.mlp.gate")
        router.register_forward_hook(lambda _, args, out: (*out[:-1], out[-1].flip(-1)))
    try:
        model(input_ids=ids)
    except ValueError as error:
        return str(error)
    return "nothing"


@MODES
def test_ranks_that_route_otherwise(ranks: Ranks, sp: bool) -> None:
    for said in ranks.run(2, ties_job, sp):
        assert "model.layers.1.mlp.experts: rank 1 of the tensor-parallel group sends" in said
