"""Expert parallelism on real ranks, beside the unsharded model on each rank's batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpplan
from benchmarks import zoo
from tests.compare import Errors, Findings, beyond, error
from tests.ranks import Ranks


def batch(rank: int, tokens: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(30 + rank)
    return torch.randint(3, zoo.VOCAB, (2, tokens + rank), generator=generator)


def objective(model: Any, ids: torch.Tensor) -> torch.Tensor:
    out = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    return -out.gather(-1, ids.roll(-1, 1)[..., None]).mean()


def gradients_job(mesh: DeviceMesh, name: str) -> Errors:
    found = Findings()
    reference = zoo.tiny(name)
    ep = mesh.size(0)
    model = tpplan.parallelize(copy.deepcopy(reference), "auto", mesh=mesh, prove=False)
    mine = mesh.get_coordinate()[0]
    sums: dict[str, list[torch.Tensor]] = {}
    for rank in range(ep):
        reference.zero_grad()
        loss = objective(reference, batch(rank))
        loss.backward()
        if rank == mine:
            due = loss.detach()
        for n, p in reference.named_parameters():
            sums.setdefault(n, []).append(p.grad.clone())
    got = objective(model, batch(mine))
    got.backward()
    found.add("loss", error(due, got.detach()))
    for n, p in model.named_parameters():
        whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        if "experts" in n and "shared" not in n:
            expected = torch.stack(sums[n]).mean(0)
        else:
            expected = sums[n][mine]
        found.add(n, error(expected, whole))
    return found.errors


def test_forward_and_gradients(ranks: Ranks) -> None:
    assert not beyond(ranks.run("ep2", gradients_job, "mixtral"))
