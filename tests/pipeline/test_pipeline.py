"""A pipeline whose stages are tensor-parallel computes and trains as the unsharded model does."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.compare import Errors, Findings, beyond, gradient_errors
from tests.models import token_ids
from tests.pipeline.stages import BATCHES, MODELS, SCHEDULES, WAYS, Pipeline, loss_of, whole
from tests.ranks import Ranks
from tests.rewrite import MODES

STEPS = 5


def training_job(
    _: DeviceMesh, way: str, schedules: tuple[str, ...], sp: bool, model: str
) -> Errors:
    """Five steps: the losses, and of the first ones the gradient of every parameter."""
    found = Findings()
    reference, pipeline = whole(model), Pipeline(way, schedules[0], sp, model)
    names = pipeline.parameters
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    ours = torch.optim.SGD(names.values(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if 0 < step < len(schedules):
            pipeline.follow(schedules[step])
        ids = token_ids(2 * BATCHES, 15, step)
        theirs.zero_grad()
        ours.zero_grad()
        loss = loss_of(reference(ids).logits, ids)
        loss.backward()
        got = pipeline.step(ids)
        if got is not None:
            found.add(f"loss {step}", abs(got.item() - loss.item()))
        if step < 3:
            expected = {n: p.grad for n, p in reference.named_parameters() if n in names}
            errors = gradient_errors(expected, {n: p.grad for n, p in names.items()})
            found.add(f"gradients {step}", errors)
        theirs.step()
        ours.step()
    return found.errors


def check(ranks: Ranks, way: str, *schedules: str, sp: bool, model: str = "llama") -> None:
    """On two stages of two ranks, which together have every parameter."""
    results = ranks.run("2x2", training_job, way, schedules, sp, model)
    assert not beyond(results)
    compared = {name for errors in results for name in errors}
    for name, _ in whole(model).named_parameters():
        assert f"gradients 0: {name}" in compared


@MODES
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(ranks: Ranks, schedule: str, sp: bool) -> None:
    check(ranks, "trimmed", schedule, sp=sp)


@MODES
@pytest.mark.parametrize("schedule", ["1f1b", "zero bubble"])
@pytest.mark.parametrize("way", sorted({*WAYS} - {"trimmed"}))
def test_ways(ranks: Ranks, way: str, schedule: str, sp: bool) -> None:
    check(ranks, way, schedule, sp=sp)


@MODES
@pytest.mark.parametrize("model", sorted({*MODELS} - {"llama"}))
def test_models(ranks: Ranks, model: str, sp: bool) -> None:
    check(ranks, "trimmed", "zero bubble", sp=sp, model=model)


@MODES
@pytest.mark.parametrize("way", ["trimmed", "sliced"])
def test_another_schedule(ranks: Ranks, way: str, sp: bool) -> None:
    """What was kept for a backward in one serves none in two."""
    check(ranks, way, "interleaved", "zero bubble", "interleaved", sp=sp)
