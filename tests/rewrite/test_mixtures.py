"""What is of mixtures alone, on real ranks: what routers give, whole experts, other choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from benchmarks import zoo
from tests.compare import Errors, Findings, beyond, error, same
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.pairs import pair, training_job

ROUTED = ("mixtral", "qwen2_moe")  # with a loss that balances the experts


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


@MODES
@SIZES
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.turns(128)
def test_training_whole_experts(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, training_job, name, sp, False, True))


@MODES
@SIZES
@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.turns(128)
def test_routing(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, routing_job, name, sp))


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


@pytest.mark.parametrize("sp", [False, True], ids=["TP", "TP+SP"])
def test_after_a_call_for_hidden_states(sp: bool) -> None:
    model = zoo.tiny("mixtral")
    model(input_ids=torch.ones(1, 4, dtype=torch.long), output_hidden_states=True)  # type: ignore[operator]
    assert tpplan.check(model, "auto", 2, sp).sequence_parallel is sp
