"""A plain PyTorch decoder: LayerNorm, biases, GELU, learned positions, dropout, a tied head."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, error, step
from tests.gpt import GPT
from tests.models import VOCAB, randomize, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES


def new(dropout: float = 0.0) -> GPT:
    model = GPT(vocabulary=VOCAB, dropout=dropout).train()
    randomize(model, 3)
    return model


def loss(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = model(ids)
    return {"objective": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


def parity(mesh: DeviceMesh, sequence_parallel: bool) -> Errors:
    found = Findings()
    reference = new()
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, "gpt", mesh, sequence_parallel=sequence_parallel)
    for seed, (batch, length) in enumerate([(1, 16), (3, 16), (3, 13), (2, 3)]):
        ids = token_ids(batch, length, seed)
        found.add(f"{batch}×{length}", step(reference, model, lambda m, ids=ids: loss(m, ids)))
    with torch.no_grad():
        # torch cannot reduce a gradient of one position to (1, width) where it is sharded
        ids = token_ids(2, 1, 8)
        found.add("one position", error(reference(ids), model(ids)))
    reference, model = new(dropout=0.3).eval(), new(dropout=0.3).eval()
    tpplan.parallelize(model, "gpt", mesh, sequence_parallel=sequence_parallel)
    ids = token_ids(2, 9, 9)
    found.add("dropout in eval", step(reference, model, lambda m: loss(m, ids)))
    return found.errors


@SIZES
@MODES
def test_parity(ranks: Ranks, tp: int, sp: bool) -> None:
    assert beyond(ranks.run(tp, parity, sp)) == {}
