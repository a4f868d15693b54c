"""Models from outside the zoo, each with the plan of a user: outputs and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

import tpplan
from tests.compare import Errors, Findings, beyond, step
from tests.models import randomize
from tests.outside.models import MODELS
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES

# batch, length, whether it trains: lengths that tp does not divide
RUNS = ((2, 8, True), (3, 7, False), (1, 13, True))


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


def outside_job(mesh: DeviceMesh, name: str, sp: bool) -> Errors:
    """Steps of a model and of its sharded copy."""
    found, outside = Findings(), MODELS[name]
    reference = outside.make()
    randomize(reference, 1)
    example = outside.call(2, 8, 1)
    model = tpplan.parallelize(
        copy.deepcopy(reference), outside.plan, mesh, sequence_parallel=sp, inputs=example
    )
    for seed, (batch, length, training) in enumerate(RUNS, 1):
        call = outside.call(batch, length, seed)
        reference.train(training), model.train(training)
        errors = step(reference, model, lambda m, call=call: _weighed(m(**call)), plain=False)
        found.add(f"{batch} x {length}", errors)
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("name", MODELS)
def test_outside(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, outside_job, name, sp))
