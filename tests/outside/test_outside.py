"""Models from outside the zoo, each with the plan of a user: outputs and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

import tpplan
from benchmarks import outside as table
from tests.compare import Errors, Findings, beyond, local, same, step
from tests.models import randomize
from tests.outside.models import MODELS, REFUSED, Outside
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES

# batch, length, whether it trains: lengths that tp does not divide
RUNS = ((2, 8, True), (3, 7, False), (1, 13, True))
# of the parameters that one of two ranks may hold, where attention and MLP are sharded
SHARE = 0.6
ALL: Mapping[str, Outside] = {**MODELS, **{name: one.outside for name, one in REFUSED.items()}}


def _weighed(out: object) -> Mapping[str, torch.Tensor]:
    """Everything that is given out by a number, and a random sum of it all."""
    tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    generator = torch.Generator().manual_seed(0)
    objective = torch.zeros(())
    for t in tensors:
        if t.requires_grad:
            weights = torch.randn(t.shape, generator=generator) / max(1, t.numel()) ** 0.5
            objective = objective + (weights * t).sum()
    return {**{str(i): t for i, t in enumerate(tensors)}, "objective": objective}


def _share(reference: nn.Module, model: nn.Module) -> float:
    """What this rank holds of the parameters."""
    held = sum(local(p).numel() for p in model.parameters())
    return held / sum(p.numel() for p in reference.parameters())


def outside_job(mesh: DeviceMesh, name: str, sp: bool) -> Errors:
    """Steps of a model and of its sharded copy."""
    found, outside = Findings(), ALL[name]
    reference = outside.make()
    randomize(reference, 1)
    example = outside.call(2, 8, 1)
    model = tpplan.parallelize(
        copy.deepcopy(reference), outside.plan, mesh, sequence_parallel=sp, inputs=example
    )
    if outside.sharded:
        found.add("most of it is on a rank", same(_share(reference, model) <= SHARE))
    for seed, (batch, length, training) in enumerate(RUNS, 1):
        call = outside.call(batch, length, seed)
        reference.train(training), model.train(training)
        errors = step(reference, model, lambda m, call=call: _weighed(m(**call)), plain=False)
        found.add(f"{batch} x {length}", errors)
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns(48)
def test_outside(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, outside_job, name, sp))


@pytest.mark.parametrize("tp", [2, 4], ids=["2 ranks", "4 ranks"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.turns(48)
def test_in_the_other_mode(ranks: Ranks, name: str, tp: int) -> None:
    sp = not REFUSED[name].sequence_parallel
    assert not beyond(ranks.run(tp, outside_job, name, sp))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """It is said where, and the model is left as it was."""
    refused = REFUSED[name]
    model, call = refused.outside.make(), refused.outside.call(2, 8, 1)
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters()}
    with pytest.raises(tpplan.PlanError) as raised:
        tpplan.check(model, refused.outside.plan, 2, refused.sequence_parallel, inputs=call)
    assert any(refused.message in d.message for d in raised.value.diagnostics)
    assert all(d.position is not None for d in raised.value.diagnostics)
    for n, p in model.named_parameters():
        assert p is before[n][0] and torch.equal(p, before[n][1])


def test_table() -> None:
    """What is printed of a model, and that the page that is kept has all of them."""
    row = table.examine("torchtune", MODELS["torchtune"], 2)
    assert row.cells[:-1] == ("torchtune", "own", "8", "50%", "6/6", "5/5", "11/11", "10/10")
    page = Path(table.__file__).with_name("results") / "outside.md"
    listed = [line.split(" | ")[0].removeprefix("| ") for line in page.read_text().splitlines()]
    assert [name for name in listed if name in MODELS] == list(MODELS)


def test_table_of_a_refusal() -> None:
    name, refused = next(iter(REFUSED.items()))
    row = table.examine(name, refused.outside, 2)
    assert set(row.checks) == {"TP"} and refused.message in row.reason
