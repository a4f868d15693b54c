"""transformers' Trainer with a sharded model: the losses of an unsharded one by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from benchmarks import zoo
from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, Findings, beyond, compare_parameters
from tests.models import hf
from tests.ranks import Ranks
from tests.rewrite import MODES
from tests.trainers.training import (
    BATCH,
    CLIP,
    RATE,
    STEPS,
    Texts,
    compared,
    fresh,
    groups,
    plain,
    reference,
    sharded,
    watched,
)


def trainer(model: Any, folder: Path, **arguments: Any) -> tuple[Any, list[float]]:
    """A Trainer that takes the texts in order, and the losses it will have met."""
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []

    class InOrder(watched(Trainer, losses)):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    chosen = TrainingArguments(**{**plain(folder), **arguments})
    return InOrder(model=model, args=chosen, train_dataset=Texts()), losses


def training_job(mesh: DeviceMesh, sp: bool, accumulated: int, checkpointing: bool) -> Errors:
    fresh()
    model = sharded(mesh, sp)
    made, losses = trainer(
        model,
        shared_folder(),
        gradient_accumulation_steps=accumulated,
        activation_checkpointing=checkpointing,
    )
    made.train()
    steps = torch.tensor(losses).view(STEPS, accumulated).sum(1)
    if groups(mesh) > 1:
        # each has the part of its own texts, as often as there are groups
        dist.all_reduce(steps, group=mesh["dp"].get_group())
        steps /= groups(mesh)
    return compared(model, steps.tolist(), reference(accumulated * groups(mesh)))


def saving_job(mesh: DeviceMesh) -> Errors:
    """``save_model`` writes, from every rank, what an unsharded model loads."""
    fresh()
    model, folder = sharded(mesh, True), shared_folder()
    made, _ = trainer(model, folder, save_only_model=True)
    made.train()
    made.save_model(str(folder / "saved"))
    dist.barrier()
    return compare_parameters(type(hf()).from_pretrained(folder / "saved"), model)


def test_saving(pair: Ranks) -> None:
    assert not beyond(pair.run(2, saving_job))


@pytest.mark.turns(4)
@MODES
@pytest.mark.parametrize("accumulated", [1, 3])
def test_training(pair: Ranks, accumulated: int, sp: bool) -> None:
    assert not beyond(pair.run(2, training_job, sp, accumulated, False))


@pytest.mark.turns(4)
@MODES
def test_with_checkpointing(pair: Ranks, sp: bool) -> None:
    assert not beyond(pair.run(2, training_job, sp, 1, True))


@MODES
def test_with_fsdp(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run("2x2", training_job, sp, 2, False))


def ep_job(mesh: DeviceMesh) -> Errors:
    """Ranks that share experts, each with texts of its own: DistributedDataParallel's rest."""
    fresh()
    whole, model = zoo.tiny("mixtral"), zoo.tiny("mixtral")
    tpplan.parallelize(model, "auto", mesh=mesh, prove=False)
    made, losses = trainer(model, shared_folder(), average_tokens_across_devices=False)
    made.train()
    found = Findings()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    data = Texts().batches(BATCH)
    for step in range(STEPS):
        each = [whole(**next(data)).loss for _ in range(mesh.size())]
        torch.stack(each).mean().backward()
        found.add(f"loss {step}", abs(losses[step] - each[mesh.get_rank()].item()) / losses[step])
        torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found.errors


@pytest.mark.turns(24)
def test_ranks_of_ep(ranks: Ranks) -> None:
    assert not beyond(ranks.run("ep4", ep_job))


def ep_beside_tp_job(mesh: DeviceMesh) -> None:
    fresh()
    model = tpplan.parallelize(zoo.tiny("mixtral"), "auto", mesh=mesh, prove=False)
    with pytest.raises(ValueError, match="2 tensor-parallel groups hold the model"):
        trainer(model, shared_folder())[0].train()


@pytest.mark.turns(24)
def test_ranks_of_ep_beside_tp_are_refused(ranks: Ranks) -> None:
    ranks.run("ep2xtp2", ep_beside_tp_job)
