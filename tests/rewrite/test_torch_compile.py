"""torch.compile of a parallelized model: one graph, the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, error, full, step
from tests.models import hf, token_ids
from tests.ranks import Ranks

pytestmark = pytest.mark.turns(32)


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


@pytest.mark.parametrize(
    ("sequence_parallel", "warm"),
    [
        # every day: one line that TorchDynamo cannot trace breaks all of them
        pytest.param(True, False, id="TP+SP-first call", marks=pytest.mark.turns(12)),
        pytest.param(True, True, id="TP+SP-after an eager call", marks=pytest.mark.turns(24)),
        pytest.param(False, False, id="TP-first call", marks=pytest.mark.turns(24)),
        pytest.param(False, True, id="TP-after an eager call", marks=pytest.mark.turns(24)),
    ],
)
def test_fullgraph(ranks: Ranks, sequence_parallel: bool, warm: bool) -> None:
    assert beyond(ranks.run(2, compiled, sequence_parallel, warm)) == {}


def exported(mesh: DeviceMesh, sequence_parallel: bool) -> Errors:
    """What ``torch.export`` makes of each rank, run in the place of the model."""
    reference = hf(use_cache=False)
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, "llama.yaml", mesh, sequence_parallel=sequence_parallel, prove=False)
    ids, others = token_ids(2, 16, 0), token_ids(2, 16, 1)
    if sequence_parallel:
        with pytest.raises(RuntimeError, match="without strict=True records no collec"):
            torch.export.export(model, (ids,))
    with pytest.raises(RuntimeError, match=r"torch\.jit records no collectives"):
        torch.jit.trace(model, ids, check_trace=False)
    program = torch.export.export(model, (ids,), strict=sequence_parallel).module()
    with torch.no_grad():
        return {"logits": error(reference(others).logits, full(program(others).logits))}


@pytest.mark.turns(24)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
def test_exported(ranks: Ranks, sequence_parallel: bool) -> None:
    assert beyond(ranks.run(2, exported, sequence_parallel)) == {}
