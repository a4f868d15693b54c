"""An Accelerator with a sharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, Findings, beyond, compare_parameters, same
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


@pytest.mark.turns(4)
@MODES
@pytest.mark.parametrize("accumulated, late", [(1, False), (3, True)])
def test_training(pair: Ranks, accumulated: int, late: bool, sp: bool) -> None:
    assert not beyond(pair.run(2, training_job, sp, accumulated, late))


@MODES
def test_with_fsdp(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run("2x2", training_job, sp, 2, False))


def shuffling_job(mesh: DeviceMesh, apart: bool) -> Errors:
    """``apart``: the ranks stand elsewhere in the random sequence."""
    from accelerate import Accelerator

    fresh()
    found = Findings()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(sharded(mesh, sp=False))
    torch.manual_seed(dist.get_rank() if apart else 5)
    loader = torch.utils.data.DataLoader(Texts(), batch_size=BATCH, shuffle=True)
    prepared = accelerator.prepare(loader)
    orders = []
    for epoch in range(2):
        torch.manual_seed(dist.get_rank() if apart else 5)
        order = torch.cat([batch["input_ids"] for batch in prepared])
        orders.append(order)
        everybody = [torch.empty_like(order) for _ in range(mesh.size())]
        dist.all_gather(everybody, order)
        found.add(f"epoch {epoch}", same(all(torch.equal(other, order) for other in everybody)))
    if apart:
        found.add("another order", same(not torch.equal(*orders)))
    else:
        torch.manual_seed(5)
        unsharded = torch.utils.data.DataLoader(Texts(), batch_size=BATCH, shuffle=True)
        expected = torch.cat([batch["input_ids"] for batch in unsharded])
        found.add("as it would be", same(torch.equal(orders[0], expected)))
    found.add("shuffled", same(not torch.equal(orders[0], Texts().ids)))
    model(**next(iter(prepared)))
    return found.errors


@pytest.mark.parametrize("apart", [False, True])
def test_shuffling(pair: Ranks, apart: bool) -> None:
    """All ranks of a tp group draw one order."""
    assert not beyond(pair.run(2, shuffling_job, apart), 0.0)


def saving_job(mesh: DeviceMesh) -> Errors:
    """Both ways of accelerate's guide."""
    from accelerate import Accelerator

    fresh()
    found, folder = Findings(), shared_folder()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(sharded(mesh, True))
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder / "pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    again = type(hf()).from_pretrained(folder / "pretrained")
    found.add("save_pretrained", compare_parameters(again, unwrapped))
    accelerator.save_model(model, folder / "model")
    accelerator.wait_for_everyone()
    again.load_state_dict(load_file(folder / "model" / "model.safetensors"))
    found.add("save_model", compare_parameters(again, unwrapped))
    return found.errors


def test_saving(pair: Ranks) -> None:
    assert not beyond(pair.run(2, saving_job))
