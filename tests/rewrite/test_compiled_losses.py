"""Losses that users compile, of sharded logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from tests.compare import full
from tests.models import SHARDED_LOGITS, VOCAB, hf, sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_chunks(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    rows, target = x.flatten(0, 1).split(6), t.flatten().split(6)
    sums = [F.cross_entropy(r, c, reduction="sum") for r, c in zip(rows, target, strict=True)]
    return torch.stack(sums).sum() / t.numel()


def weighed(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 2, x.size(-1), dtype=x.dtype)
    rows = x.view(-1, x.size(-1))
    return F.cross_entropy(rows, t.view(-1), label_smoothing=0.1, weight=weight)


LOSSES: dict[str, Loss] = {
    "whole": lambda x, t: F.cross_entropy(x.view(-1, x.size(-1)), t.view(-1)),
    "float": lambda x, t: F.cross_entropy(x.float().view(-1, x.size(-1)), t.view(-1)),
    "shifted": lambda x, t: F.cross_entropy(x[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
    "classes second": lambda x, t: F.cross_entropy(x.transpose(1, 2), t, ignore_index=3),
    "weighed": weighed,
    "in chunks": in_chunks,
    "by hand": lambda x, t: -x.log_softmax(-1).gather(-1, t[..., None]).mean(),
    "with a penalty": lambda x, t: x.logsumexp(-1).square().mean() + x.square().mean(),
}


def step(model: Any, loss: Loss, length: int) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    value = loss(model(input_ids=token_ids(2, length, 1)).logits, token_ids(2, length, 2))
    value.backward()
    return value.item(), [full(p.grad) for p in model.parameters()]


def far(expected: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    pairs = zip(expected, got, strict=True)
    return max(((e - g).abs().max() / e.abs().max()).item() for e, g in pairs)


def losses_job(mesh: DeviceMesh, sp: bool, fullgraph: bool) -> dict[str, str]:
    """Which losses, compiled, are not the unsharded model's."""
    reference = hf(use_cache=False).double()
    model = sharded(hf(use_cache=False).double(), mesh, sp, SHARDED_LOGITS)
    wrong = dict[str, str]()
    for name, loss in LOSSES.items():
        torch._dynamo.reset()
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=fullgraph)
        bar = 1e-5 if name == "float" else 1e-9
        for length in (9, 12):
            value, grads = step(reference, loss, length)
            own, mine = step(model, compiled, length)
            if abs(own - value) > bar * abs(value) or far(grads, mine) > bar:
                wrong[f"{name} {length}"] = f"{own} for {value}, gradients {far(grads, mine)} off"
    return wrong


def bounds_job(mesh: DeviceMesh) -> str:
    """What a compiled loss says of a target that is no class."""
    model = sharded(hf(use_cache=False), mesh, False, SHARDED_LOGITS)
    torch._dynamo.reset()
    compiled = torch.compile(LOSSES["whole"], backend="aot_eager")
    logits, target = model(input_ids=token_ids(2, 9, 1)).logits, token_ids(2, 9, 2)
    compiled(logits, target)
    target[1, 3] = VOCAB
    try:
        return f"the loss is {compiled(logits, target)}"
    except RuntimeError as error:
        return str(error)


@pytest.mark.turns(4)
def test_targets_that_are_no_classes(ranks: Ranks) -> None:
    assert all("out of bounds" in said for said in ranks.run(2, bounds_job))


@MODES
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.turns(8)
def test_compiled_losses(ranks: Ranks, tp: int, sp: bool, fullgraph: bool) -> None:
    assert ranks.run(tp, losses_job, sp, fullgraph) == [{}] * tp
