"""An Accelerator with a sharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, same
from tests.gpt import GPT
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


def train(accelerator: Any, prepared: Any, accumulated: int) -> list[float]:
    """As accelerate's own guide has it."""
    model, optimizer, loader = prepared
    losses, batches = [], iter(loader)
    for _ in range(STEPS):
        total = torch.zeros(())
        for _ in range(accumulated):
            with accelerator.accumulate(model):
                loss = model(**next(batches)).loss
                accelerator.backward(loss)
                total += accelerator.reduce(loss.detach(), "mean") / accumulated
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(total.item())
    return losses


def training_job(mesh: DeviceMesh, sp: bool, accumulated: int, late: bool) -> Errors:
    """``late``: the Accelerator is made after the model."""
    from accelerate import Accelerator

    fresh()
    accelerator = None if late else Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    model = sharded(mesh, sp)
    accelerator = accelerator or Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    loader = torch.utils.data.DataLoader(Texts(), batch_size=BATCH)
    prepared = accelerator.prepare(model, optimizer, loader)
    losses = train(accelerator, prepared, accumulated)
    by_hand = reference(accumulated * groups(mesh), rate=False, per_token=False)
    found = Findings()
    found.add("training", compared(model, losses, by_hand))
    found.add("itself", same(accelerator.unwrap_model(prepared[0]) is model))
    return found.errors


@MODES
@pytest.mark.parametrize("accumulated, late", [(1, False), (3, True)])
def test_training(pair: Ranks, accumulated: int, late: bool, sp: bool) -> None:
    assert not beyond(pair.run(2, training_job, sp, accumulated, late))


@MODES
def test_with_fsdp(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run("2x2", training_job, sp, 2, False))
