"""transformers' Trainer with a sharded model: the losses of an unsharded one by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, beyond, compare_parameters
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
    reference,
    sharded,
)


def trainer(model: Any, folder: Path, **arguments: Any) -> tuple[Any, list[float]]:
    """A Trainer that takes the texts in order, and the losses it will have met."""
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    chosen = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        max_grad_norm=CLIP,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **arguments,
    )
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


@MODES
@pytest.mark.parametrize("accumulated", [1, 3])
def test_training(pair: Ranks, accumulated: int, sp: bool) -> None:
    assert not beyond(pair.run(2, training_job, sp, accumulated, False))


@MODES
def test_with_checkpointing(pair: Ranks, sp: bool) -> None:
    assert not beyond(pair.run(2, training_job, sp, 1, True))


@MODES
def test_with_fsdp(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run("2x2", training_job, sp, 2, False))
