"""A pipeline whose stages are tensor-parallel computes and trains as the unsharded model does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor.debug import CommDebugMode

import tpplan
from tests.compare import Errors, Findings, beyond, error, gradient_errors, same
from tests.models import sharded, token_ids
from tests.pipeline.stages import (
    BATCHES,
    LAYERS,
    MODELS,
    SCHEDULES,
    WAYS,
    Pipeline,
    Stage,
    Trimmed,
    loss_of,
    whole,
)
from tests.ranks import Ranks
from tests.rewrite import MODES
from tpplan.roles.lowered import Lowered

STEPS = 5


def training_job(
    _: DeviceMesh, way: str, schedules: tuple[str, ...], sp: bool, model: str, shards: bool
) -> Errors:
    """Five steps: the losses, and of the first ones the gradient of every parameter."""
    found = Findings()
    reference, pipeline = whole(model), Pipeline(way, schedules[0], sp, model, shards)
    names = pipeline.parameters
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    ours = torch.optim.SGD(names.values(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if 0 < step < len(schedules):
            pipeline.follow(schedules[step])
        ids = token_ids(2 * BATCHES, 16 if shards else 15, step)
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


def check(
    ranks: Ranks,
    way: str,
    *schedules: str,
    sp: bool,
    model: str = "llama",
    shards: bool = False,
) -> None:
    """On two stages of two ranks, which together have every parameter."""
    results = ranks.run("2x2", training_job, way, schedules, sp, model, shards)
    assert not beyond(results)
    compared = {name for errors in results for name in errors}
    for name, _ in whole(model).named_parameters():
        assert f"gradients 0: {name}" in compared


@MODES
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.turns(32)
def test_schedules(ranks: Ranks, schedule: str, sp: bool) -> None:
    check(ranks, "trimmed", schedule, sp=sp)


@MODES
@pytest.mark.parametrize("schedule", ["1f1b", "zero bubble"])
@pytest.mark.parametrize("way", sorted({*WAYS} - {"trimmed"}))
@pytest.mark.turns(32)
def test_ways(ranks: Ranks, way: str, schedule: str, sp: bool) -> None:
    check(ranks, way, schedule, sp=sp)


@MODES
@pytest.mark.parametrize("schedule", ["1f1b", "zero bubble", "dual v"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.turns(32)
def test_shards(ranks: Ranks, way: str, schedule: str, sp: bool) -> None:
    check(ranks, way, schedule, sp=sp, shards=True)


@MODES
@pytest.mark.parametrize("model", sorted({*MODELS} - {"llama"}))
@pytest.mark.turns(48)
def test_models(ranks: Ranks, model: str, sp: bool) -> None:
    check(ranks, "trimmed", "zero bubble", sp=sp, model=model)


@MODES
@pytest.mark.parametrize("way", ["trimmed", "sliced"])
@pytest.mark.turns(48)
def test_another_schedule(ranks: Ranks, way: str, sp: bool) -> None:
    """What was kept for a backward in one serves none in two."""
    check(ranks, way, "interleaved", "zero bubble", "interleaved", sp=sp)


def nodes(module: nn.Module) -> int:
    """How many graph nodes the local tensors of its parameters come from."""
    lowered = [m for m in module.modules() if isinstance(m, Lowered)]
    kept = [t for m in lowered for t in m._tpplan.own._kept if t is not None]
    return len({t.grad_fn for t in kept})


def nodes_job(_: DeviceMesh) -> Errors:
    """The parameters of a stage share graph nodes, one for sums, until its backward is split."""
    found = Findings()
    pipeline = Pipeline("trimmed", "interleaved", True)
    for schedule, shared in (("interleaved", True), ("zero bubble", False), ("looped", False)):
        pipeline.follow(schedule)
        pipeline.step(token_ids(2 * BATCHES, 15, 0))
        for stage in pipeline.stages:
            count = len(list(stage.submod.parameters()))
            made = nodes(stage.submod)
            found.add(
                f"{schedule}: {made} of {count}", same(made <= 4 if shared else made == count)
            )
    return found.errors


@pytest.mark.turns(48)
def test_nodes(ranks: Ranks) -> None:
    assert not beyond(ranks.run("2x2", nodes_job))


def complaint(run: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a schedule's error is caused by."""
    try:
        run(*args, **kwargs)
    except RuntimeError as error:
        return str(error.__cause__)
    return ""


def counted(stage: Stage) -> list[None]:
    """As many as the stage has run microbatches to the end."""
    done: list[None] = []
    forward = stage.forward_one_chunk

    def forward_one_chunk(*args: Any, **kwargs: Any) -> Any:
        made = forward(*args, **kwargs)
        done.append(None)
        return made

    stage.forward_one_chunk = forward_one_chunk
    return done


def batches_job(mesh: DeviceMesh, trains: bool, sp: bool) -> Errors:
    """A stage is compared what it is given, from the first microbatch on, and no tried sizes."""
    found = Findings()
    rank = mesh["tp"].get_local_rank()
    for first_wrong in (0, 1, 3):
        model = Trimmed(sharded(whole(), mesh["tp"], sp), slice(LAYERS), True, True)
        group = mesh["dp"].get_group()
        stage = Stage(model, 0, 1, torch.device("cpu"), group=group)
        done = counted(stage)
        schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of if trains else None)
        ids = token_ids(4, 8, 0)
        ids[first_wrong:] += rank
        run = schedule.step if trains else schedule.eval
        told = complaint(run, ids, **({"target": ids} if trains else {}))
        # of the calls, it is the first, second and fourth that are compared
        found.add(f"from {first_wrong}", same("same inputs" in told))
        found.add(f"{first_wrong} calls", same(len(done) == first_wrong))
    return found.errors


@MODES
@pytest.mark.parametrize("trains", [False, True], ids=["evaluated", "trained"])
def test_batches_are_compared(ranks: Ranks, trains: bool, sp: bool) -> None:
    assert not beyond(ranks.run("1x4", batches_job, trains, sp))


def piece(mesh: DeviceMesh, first: bool, last: bool, sp: bool = True, shards: bool = True) -> Any:
    """A model of which only the stage's layers are left."""
    model = Trimmed(sharded(whole(), mesh["tp"], sp), slice(LAYERS // 2), first, last)
    return tpplan.shard_stage(model, first=first, last=last) if shards else model


def shard_job(mesh: DeviceMesh) -> Errors:
    """A stage gives this rank's rows, one all-gather less each way, and says what it cannot."""
    found = Findings()
    rank, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
    ids = token_ids(2, 4 * size, 0)
    expected = piece(mesh, True, False, shards=False)(ids)
    first = piece(mesh, True, False)
    rows = first(ids)
    own = expected.chunk(size, 1)[rank]
    found.add("rows", error(own, rows))
    plain = piece(mesh, True, False, sp=False)
    found.add("no rows in plain TP", error(expected, plain(ids)))

    counts = []
    for shards in (False, True):
        middle = piece(mesh, False, False, shards=shards)
        x = (rows if shards else expected).detach().requires_grad_()
        for _ in range(3):  # of the first two calls the ranks compare what they are given
            with CommDebugMode() as forward:
                out = middle(x)
            with CommDebugMode() as backward:
                out.sum().backward()
        counts.append((forward.get_total_counts(), backward.get_total_counts()))
    found.add(f"collectives: {counts}", same(counts[1][0] == counts[0][0] - 1))
    found.add(f"of backward: {counts}", same(counts[1][1] == counts[0][1] - 1))

    last = piece(mesh, False, True)
    found.add("end", error(piece(mesh, False, True, shards=False)(expected), last(rows)))
    told = {}
    for what, run in {
        "pad it": lambda: first(ids[:, 1:]),
        "receives": lambda: last(ids),
        "0 parallelized": lambda: tpplan.shard_stage(nn.Linear(2, 2), first=True, last=True),
    }.items():
        try:
            run()
        except (RuntimeError, ValueError) as raised:
            told[what] = str(raised)
        found.add(what, same(what in told.get(what, "")))
    found.add("after an error", error(own, first(ids)))
    twin = copy.deepcopy(first)
    found.add("copy", error(own, twin(ids)))
    found.add("apart", same(twin.model.model.embed_tokens is not first.model.model.embed_tokens))
    return found.errors


@pytest.mark.parametrize("shape", ["1x4", "2x2"])
@pytest.mark.turns(24)
def test_what_a_stage_gives(ranks: Ranks, shape: str) -> None:
    assert not beyond(ranks.run(shape, shard_job))
