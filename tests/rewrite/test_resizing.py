"""``resize_token_embeddings`` of transformers' models: before sharding, and what is said after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.compare import Errors, Findings, beyond, error, full, same
from tests.models import VOCAB, token_ids
from tests.ranks import Ranks
from tests.rewrite.rows import built, sharded

LARGER = VOCAB + 9
OTHER: tuple[dict[str, Any], ...] = (
    {"new_num_tokens": LARGER},
    {"new_num_tokens": VOCAB - 9, "mean_resizing": False},
    {"pad_to_multiple_of": 64},
)
SAME: tuple[dict[str, Any], ...] = ({}, {"new_num_tokens": VOCAB}, {"pad_to_multiple_of": 1})


def resizing_job(mesh: DeviceMesh) -> Errors:
    """Resized, then sharded; another size is refused and changes nothing, the same one is none."""
    found, reference = Findings(), built("llama 2").eval()
    model = sharded("llama 2", reference, mesh, True)
    weight = model.model.embed_tokens.weight
    for asked in OTHER:
        with pytest.raises(ValueError, match=r"resize the model before tpplan\.parallelize"):
            model.resize_token_embeddings(**asked)
    for asked in SAME:
        found.add(f"{asked}", same(model.resize_token_embeddings(**asked).weight is weight))
    found.add("size", same(model.config.vocab_size == VOCAB))
    ids = token_ids(2, 8, seed=3)
    found.add("logits", error(reference(ids).logits, full(model(ids).logits)))
    torch.manual_seed(0)
    reference.resize_token_embeddings(LARGER)
    model = sharded("llama 2", reference, mesh, True)
    ids = token_ids(2, 8, seed=4, vocab=LARGER)
    ids[0, 0] = LARGER - 1
    found.add("larger", error(reference(ids).logits, full(model(ids).logits)))
    return found.errors


def test_resizing(ranks: Ranks) -> None:
    assert not beyond(ranks.run(2, resizing_job))
