"""Selective checkpointing, which keeps what ops give: nothing may be written into that later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tpplan
from tests.compare import Errors, beyond, step
from tests.models import hf, keep_products, token_ids
from tests.ranks import RankError, Ranks


def keep_all(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what every op gives."""
    return CheckpointPolicy.MUST_SAVE


def keep_sent(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what collectives give."""
    sent = "c10d" in str(op)
    return CheckpointPolicy.MUST_SAVE if sent else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES: dict[str, Callable[..., CheckpointPolicy]] = {
    "products": keep_products,
    "all": keep_all,
    "sent": keep_sent,
}


def selective_job(mesh: DeviceMesh, sp: bool, kept: str, how: dict[str, str]) -> Errors:
    reference = hf(use_cache=False)
    model = tpplan.parallelize(hf(use_cache=False), "llama.yaml", mesh, sp, prove=False, **how)
    contexts = partial(create_selective_checkpoint_contexts, POLICIES[kept])
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
    errors: Errors = {}
    for seed in (1, 2):
        ids = token_ids(2, 9, seed)

        def run(m: Any, ids: torch.Tensor = ids) -> dict[str, torch.Tensor]:
            loss = m(input_ids=ids, labels=ids).loss
            return {"loss": loss, "objective": loss}

        errors |= {f"{name} {seed}": e for name, e in step(reference, model, run).items()}
    return errors


@pytest.mark.parametrize("kept", POLICIES)
@pytest.mark.parametrize("overlap", ["none", "chunked"])
@pytest.mark.parametrize(("sp", "save"), [(False, "shard"), (True, "shard"), (True, "gathered")])
@pytest.mark.turns(4)
def test_selective(ranks: Ranks, sp: bool, kept: str, overlap: str, save: str) -> None:
    how = {"overlap": overlap, "save": save}
    if sp and overlap == "chunked" and kept == "all":
        # pieces are written into one tensor, which is kept as well: not silent
        with pytest.raises(RankError, match="during selective activation checkpoint has been mut"):
            ranks.run(2, selective_job, sp, kept, how)
        return
    assert not beyond(ranks.run(2, selective_job, sp, kept, how))
