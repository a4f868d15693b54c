"""Lightning's ModelParallelStrategy with a sharded model."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tpplan
from tests.compare import Errors, beyond
from tests.models import hf
from tests.ranks import Ranks
from tests.rewrite import MODES
from tests.trainers.training import BATCH, CLIP, RATE, STEPS, Texts, compared, fresh, reference


def module(sp: bool, path: Path | None = None) -> Any:
    """As a user writes one: the model is sharded when the meshes are known.

    ``path``: of the checkpoint to read, into a model that was made on meta.
    """
    from lightning.pytorch import LightningModule

    class Learner(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            # in float32, of a gradient near zero Adam makes a step of its rounding
            self.model = hf(device="cpu" if path is None else "meta").double()
            self.losses = list[torch.Tensor]()

        def configure_model(self) -> None:
            if self.losses:
                return
            meshes: Any = self.device_mesh
            tpplan.parallelize(
                self.model,
                "llama.yaml",
                mesh=meshes["tensor_parallel"],
                sequence_parallel=sp,
                prove=False,
            )
            if path is not None:
                tpplan.load_checkpoint(self.model, path)
            if meshes["data_parallel"].size() > 1:
                for layer in self.model.model.layers:
                    fully_shard(layer, mesh=meshes["data_parallel"])
                fully_shard(self.model, mesh=meshes["data_parallel"])

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0)

    return Learner()


def dealt() -> torch.utils.data.Dataset[Any]:
    """The texts, so that they are in order when Lightning has shuffled them."""
    texts = Texts()
    shuffled = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.Subset(texts, shuffled.argsort().tolist())


def training_job(mesh: DeviceMesh, sp: bool, accumulated: int, path: Path | None = None) -> Errors:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    fresh()
    os.environ.update(TORCHELASTIC_RUN_ID="0", GROUP_RANK="0")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    groups = mesh["dp"].size() if mesh.ndim > 1 else 1
    learner = module(sp, path)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ModelParallelStrategy(groups, dist.get_world_size() // groups),
        max_steps=STEPS,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(learner, torch.utils.data.DataLoader(dealt(), batch_size=BATCH))
    losses = torch.stack(learner.losses)
    dist.all_reduce(losses)
    steps = losses.view(STEPS, accumulated).mean(1) / dist.get_world_size()
    how = {"rate": False, "per_token": False, "groups": groups, "dtype": torch.float64}
    by_hand = reference(accumulated * groups, **how)
    return compared(learner.model, steps.tolist(), by_hand)


@pytest.mark.turns(4)
@MODES
@pytest.mark.parametrize("accumulated", [1, 2])
def test_training(pair: Ranks, accumulated: int, sp: bool) -> None:
    assert not beyond(pair.run(2, training_job, sp, accumulated))


@MODES
def test_with_fsdp(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run("2x2", training_job, sp, 1))


@MODES
def test_from_meta(pair: Ranks, tmp_path: Path, sp: bool) -> None:
    """What a checkpoint was read into is left to Lightning as it is: nothing of it is on meta."""
    hf().save_pretrained(tmp_path)
    assert not beyond(pair.run(2, training_job, sp, 1, tmp_path))
