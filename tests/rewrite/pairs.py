"""A transformers model of the zoo and the same sharded, trained and generating side by side."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from benchmarks import zoo
from tests.compare import Errors, Findings, compare_parameters, error, same

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
