"""A dry run against a run: every shipped plan, on gloo ranks, collective by collective."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from benchmarks import zoo
from tests.ranks import Ranks
from tests.shipped import class_of, listed, plans, ways
from tpplan.simulate import Collective, Recorder
from tpplan.simulate.execute import objective


def built(label: str) -> Any:
    """A small model with random weights."""
    return zoo.makers()[label]()


def call_of(name: str, model: Any) -> dict[str, Any]:
    """An example call; BLT looks at its numbers for patches, and a dry run has none."""
    call: dict[str, Any] = zoo.example(model)
    if name == "blt":
        batch, length = call["input_ids"].shape
        call["patch_lengths"] = torch.tensor([[1, length // 2, length - length // 2 - 1]] * batch)
    return call


def sent(collectives: Iterable[Collective]) -> list[tuple[Any, ...]]:
    """What is compared of collectives; those of the first forward only are left out."""
    return [
        (c.phase, c.kind, c.module, c.shape, c.dtype, c.bytes, c.dimension, c.ranks, c.reason)
        for c in collectives
        if c.phase != "startup"
    ]


def step_job(mesh: DeviceMesh, name: str, sp: bool) -> list[tuple[Any, ...]]:
    """Forward, backward, clipping and a step of AdamW; what this rank sent."""
    model = built(name)
    call = call_of(name, model)
    tpplan.parallelize(
        model, plans()[class_of(name)], mesh, sequence_parallel=sp, inputs=call, prove=False
    )
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder({mesh.get_group().group_name: "tp"}) as recorder:
        out = model(**call)
        with recorder.during("backward"):
            result = objective(out)
            assert result is not None
            result.backward(torch.ones_like(result))
        with recorder.during("optimizer"):
            trained = [p for p in model.parameters() if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
    return sent(recorder.collectives)


@pytest.mark.turns(256)
@pytest.mark.parametrize(("name", "tp", "sp"), ways(listed()))
def test_what_is_predicted_is_sent(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    model = built(name)
    plan = plans()[class_of(name)]
    sp = sp and plan.sequence_parallel
    report = tpplan.dry_run(model, plan, tp, inputs=call_of(name, model), sequence_parallel=sp)
    predicted = sent(report.collectives)
    for measured in ranks.run(tp, step_job, name, sp):
        assert measured == predicted
