"""The same training by hand, unsharded and in one process, as what trainers do is measured by."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tpplan
from tests.compare import Errors, Findings, compare_parameters, same
from tests.models import hf

STEPS, BATCH, LENGTH = 5, 2, 12
RATE, CLIP = 1e-2, 0.5


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens of a few, of each text as many to learn from as it happens."""

    def __init__(self, count: int = 64) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, 13, (count, LENGTH), generator=generator)
        self.labels = self.ids.clone()
        for labels in self.labels:
            labels[: int(torch.randint(0, 6, (), generator=generator))] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}

    def batches(self, size: int, groups: int = 1) -> Iterator[dict[str, torch.Tensor]]:
        """In order; for groups that take turns text by text, each group's."""
        for start in range(0, len(self), size * groups):
            for group in range(groups):
                chosen = slice(start + group, start + size * groups, groups)
                yield {"input_ids": self.ids[chosen], "labels": self.labels[chosen]}


def fresh() -> None:
    """A process as torchrun starts it: of what accelerate keeps of one, nothing is left."""
    from accelerate.state import AcceleratorState, GradientState

    os.environ.update(
        LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def plain(folder: Path | str) -> dict[str, Any]:
    """What every Trainer of transformers', and of TRL's, is told here."""
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "max_grad_norm": CLIP,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }


def watched(kind: Any, losses: list[float]) -> Any:
    """A class of trainers that leave their losses in ``losses``."""

    class Watched(kind):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    return Watched


def sharded(mesh: DeviceMesh, sp: bool) -> Any:
    """A model as a user would have it; over "dp", where there is one, by FSDP2."""
    model = tpplan.parallelize(hf(), "llama.yaml", mesh=mesh, sequence_parallel=sp, prove=False)
    if mesh.ndim > 1:
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def groups(mesh: DeviceMesh) -> int:
    """Of how many different batches a step is made."""
    return mesh["dp"].size() if mesh.ndim > 1 else 1


def reference(
    batches: int,
    *,
    rate: bool = True,
    per_token: bool = True,
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, list[float]]:
    """An unsharded model after training, and its losses.

    Args:
        batches: how many a step is made of.
        rate: whether the learning rate falls linearly.
        per_token: whether a step's loss is that of all its tokens; else the mean over batches.
        groups: which take turns text by text.
        dtype: in which the model is trained.
    """
    model = hf().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / STEPS if rate else 1.0
    )
    data, losses = Texts().batches(BATCH, groups), []
    for _ in range(STEPS):
        step = [next(data) for _ in range(batches)]
        tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in step)
        found = [
            model(**batch, num_items_in_batch=tokens).loss
            if per_token
            else model(**batch).loss / batches
            for batch in step
        ]
        total = torch.stack(found).sum()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return model, losses


def compared(
    model: nn.Module, losses: list[float], by_hand: tuple[nn.Module, list[float]]
) -> Errors:
    """How far the losses of a training, and what became of the model, are from the reference."""
    found = Findings()
    trained, expected = by_hand
    found.add("steps", same(len(losses) == len(expected)))
    for step, (loss, right) in enumerate(zip(losses, expected, strict=False)):
        found.add(f"loss {step}", abs(loss - right) / right)
    found.add("learnt", same(expected[-1] < 0.99 * expected[0]))
    # Adam makes steps of one size of gradients that are nothing but rounding
    apart = max(compare_parameters(trained, model).values())
    found.add("parameters", same(apart < 1e-2 * STEPS * RATE))
    return found.errors
