"""torch.compile of a parallelized model: one graph, the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, step
from tests.models import hf, token_ids
from tests.ranks import Ranks


def compiled(mesh: DeviceMesh, sequence_parallel: bool, warm: bool) -> Errors:
    reference = hf()
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, "llama.yaml", mesh, sequence_parallel=sequence_parallel, prove=False)
    ids = token_ids(2, 16, 0)
    if warm:
        model(ids)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)

    def run(m: torch.nn.Module) -> dict[str, torch.Tensor]:
        out = (whole if m is model else m)(ids, labels=ids)
        return {"objective": out.loss, "logits": out.logits}

    return step(reference, model, run)


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "after an eager call"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_fullgraph(ranks: Ranks, sequence_parallel: bool, warm: bool) -> None:
    assert beyond(ranks.run(2, compiled, sequence_parallel, warm)) == {}
