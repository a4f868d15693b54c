"""Models of which one call does not come to every module."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, local, same, step
from tests.models import randomize
from tests.outside import library
from tests.outside.models import Call, ids_of, plan_of
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tpplan.render import explain

PLAN = plan_of(library.DECODER_RULES)
NO_CALL = r"layers.\*.encoder_attn.k_proj \(2 of them\).*: no call came to it"


def without(length: int, seed: int) -> Call:
    """Tokens alone."""
    return {"input_ids": ids_of(2, length, seed)}


def attending(length: int, seed: int) -> Call:
    """Tokens, and what an encoder gave."""
    given = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(seed))
    return {**without(length, seed), "encoder_hidden_states": given}


def logits(call: Call, model: nn.Module) -> dict[str, torch.Tensor]:
    """Of a call, and a weighted sum of them."""
    found: torch.Tensor = model(**call).logits
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    return {"logits": found, "objective": (found * weights).sum()}


def several_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Steps of either kind, where the plan was compiled with both."""
    found = Findings()
    reference = library.decoder()
    randomize(reference, 1)
    model = tpplan.parallelize(
        copy.deepcopy(reference),
        PLAN,
        mesh,
        sequence_parallel=sp,
        inputs=[without(8, 1), attending(8, 1)],
    )
    for name, make in (("without", without), ("attending", attending), ("again", without)):
        call = make(7, 2)
        errors = step(reference, model, lambda m, call=call: logits(call, m), plain=False)
        found.add(name, errors)
    return found.errors


def one_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Steps of the kind that the plan was compiled with; the other one is an error."""
    found = Findings()
    reference = library.decoder()
    randomize(reference, 1)
    first = mesh.get_local_rank() == 0
    with pytest.warns(UserWarning, match=NO_CALL) if first else contextlib.nullcontext():
        model = tpplan.parallelize(
            copy.deepcopy(reference), PLAN, mesh, sequence_parallel=sp, inputs=without(8, 1)
        )
    held, whole = (
        sum(local(p).numel() for n, p in m.named_parameters() if "encoder_attn.k_proj.weight" in n)
        for m in (model, reference)
    )
    found.add("it is sharded", same(held * mesh.size() == whole))
    call = without(7, 2)
    found.add("without", step(reference, model, lambda m: logits(call, m), plain=False))
    with pytest.raises(RuntimeError, match="no call came to it when the plan was compiled"):
        model(**attending(8, 1))
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("job", [several_job, one_job])
def test_decoder(ranks: Ranks, job: object, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, job, sp))


@pytest.mark.turns(24)
def test_each_call_is_verified() -> None:
    result = tpplan.verify(library.decoder, PLAN, 2, inputs=[without(8, 1), attending(8, 1)])
    floors = [check.floor["forward"] for check in result.checks]
    assert [check.counts["forward"]["reduce_scatter"] for check in result.checks] == [0, 0, 5, 7]
    assert [floor.get("all_reduce", 0) for floor in floors] == [5, 7, 0, 0]


@pytest.mark.turns(4)
def test_said() -> None:
    with pytest.warns(UserWarning, match=NO_CALL):
        compiled = tpplan.check(library.decoder(), PLAN, 2, inputs=without(8, 1))
    plan = compiled.modules["model.decoder.layers.0.encoder_attn.k_proj"]
    assert plan.unreached and not compiled.parameter(f"{plan.path}.weight").summed
    told = explain(library.decoder(), compiled, plan.path)
    assert "no call came to it" in told
