"""Local tensors are kept for one queue of a device (a CUDA stream), which their node runs on."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.compare import Errors, Findings, beyond, same, step
from tests.models import hf, sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES
from tpplan import compat


def nodes_of(model: nn.Module) -> list[Any]:
    """The autograd nodes of the local tensors that ``model`` keeps."""
    owns = [m._tpplan.own for m in model.modules() if hasattr(m, "_tpplan")]
    return [t.grad_fn for own in owns for t in own._kept if t is not None and t.grad_fn is not None]


def job(mesh: DeviceMesh, sp: bool) -> Errors:
    found = Findings()
    reference = hf()
    model = sharded(reference, mesh, sp)
    kept: list[list[Any]] = []

    def run(m: Any) -> dict[str, torch.Tensor]:
        logits = m(token_ids(2, 8, len(kept))).logits
        return {"objective": logits.square().sum(), "logits": logits}

    for queue in (0, 0, 5, 5, 0):
        with patch.object(compat, "queue_of", lambda _, queue=queue: queue):
            found.add(f"step {len(kept)}", step(reference, model, run))
        kept.append(nodes_of(model))
    assert kept[0]
    for n, (before, after) in enumerate(itertools.pairwise(kept)):
        again = [any(node is other for other in before) for node in after]
        found.add(f"kept {n}", same(not any(again) if n in (1, 3) else all(again)))
    return found.errors


@MODES
def test_kept_for_one_queue(ranks: Ranks, sp: bool) -> None:
    assert beyond(ranks.run(2, job, sp)) == {}
