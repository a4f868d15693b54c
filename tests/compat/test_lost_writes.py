"""Writes through views of DTensors: they arrive, or they raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.compare import Errors, beyond, compare_gradients
from tests.models import VOCAB, hf, sharded, token_ids
from tests.ranks import Ranks

# whether it crosses rows, and columns, of (16, 8)
WRITES: dict[str, tuple[bool, bool, Callable[[Any], object]]] = {
    "rows": (True, False, lambda x: x[:12].zero_()),
    "a row": (True, False, lambda x: x[3].mul_(2)),
    "columns": (False, True, lambda x: x[:, 1:3].clamp_(-0.1, 0.1)),
    "narrow": (True, False, lambda x: x.narrow(0, 2, 9).add_(1)),
    "chunk": (True, False, lambda x: x.chunk(4)[1].add_(1)),
    "view of a view": (True, True, lambda x: x.view(-1)[5:50].mul_(3)),
    "turned": (False, True, lambda x: x.T[2].add_(1)),
    "diagonal": (True, True, lambda x: x.diagonal().add_(1)),
    "assigned": (True, False, lambda x: x.__setitem__(slice(2, 6), x[:4] * 2)),
    "an element": (True, True, lambda x: x.__setitem__((3, 2), x[0, 0])),
    "of data": (True, False, lambda x: x.data[:3].mul_(2)),
    "a list": (True, False, lambda x: torch._foreach_mul_([x[:3]], 2)),
    "out": (True, False, lambda x: torch.mul(x[:4], 2, out=x[:4])),
    "whole": (False, False, lambda x: x.mul_(2)),
    "all, turned": (False, False, lambda x: x.T.mul_(2)),
    "all of another shape": (False, False, lambda x: x.unsqueeze(0).mul_(2)),
    "read": (False, False, lambda x: x[:4].sum() + x[:, 1:].sum()),
    "a copy": (False, False, lambda x: x[:4].clone().mul_(2)),
}


def writes_job(mesh: DeviceMesh, dim: int | None) -> dict[str, str]:
    """What is neither right nor refused, or not as expected."""
    placement = Replicate() if dim is None else Shard(dim)
    wrong = dict[str, str]()
    for name, (*crosses, write) in WRITES.items():
        whole = torch.arange(128.0).view(16, 8) - 50
        x = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [placement]))
        refused = dim is not None and crosses[dim]
        with torch.no_grad():
            try:
                write(x)
                raised = False
            except RuntimeError as error:
                raised = "so the write would be lost" in str(error)
            if not refused:
                write(whole)
        if raised is not refused or not torch.equal(x.full_tensor(), whole):  # type: ignore[attr-defined]
            wrong[name] = f"{raised=} {refused=}"
    return wrong


@pytest.mark.parametrize("dim", [0, 1, None])
def test_writes(ranks: Ranks, dim: int | None) -> None:
    assert ranks.run(2, writes_job, dim) == [{}, {}]


def gradients_job(mesh: DeviceMesh) -> Errors:
    """Rows of an embedding's gradient that are not to be trained."""
    reference, model = hf(tie_word_embeddings=False), sharded(hf(), mesh, sp=False)
    for m in (reference, model):
        m(input_ids=token_ids(2, 9, 1), labels=token_ids(2, 9, 2)).loss.backward()
        grad = m.get_input_embeddings().weight.grad
        if m is model:
            with pytest.raises(RuntimeError, match="so the write would be lost"):
                grad[:100].zero_()
        kept = (torch.arange(VOCAB) >= 100).to(grad.dtype)[:, None].expand(grad.shape)
        grad.mul_(kept if m is reference else distribute_tensor(kept, mesh, grad.placements))
    return compare_gradients(reference, model)


def test_rows_of_a_gradient(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, gradients_job), 1e-5)
