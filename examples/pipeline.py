"""Train a Llama in a pipeline whose stages are tensor-parallel.

    torchrun --nproc-per-node 4 examples/pipeline.py

Two ranks share each stage (``--tp``), and the stages share the layers. On GPUs it uses nccl, on a
machine without them gloo. The text is this file, byte by byte; the loss is printed at each step.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForCausalLM

import tpplan

LENGTH, BATCH, MICROBATCHES = 64, 8, 4


class Stage(nn.Module):
    """A parallelized model of which only some layers are left."""

    def __init__(self, model: LlamaForCausalLM, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.model, self.first = model, first
        inner = model.model
        inner.layers = inner.layers[layers.start : layers.stop]
        if not first:
            inner.embed_tokens = nn.Identity()
        if not last:
            inner.norm, model.lm_head = nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        # a stage that has no head gives its states in the place of logits; a copy, as the schedule
        # detaches what it is given in place, and these may be a view
        return self.model(**given, use_cache=False).logits.clone()


def stage_of(mesh: DeviceMesh, sequence_parallel: bool) -> PipelineStage:
    """This rank's stage: all ranks build the same model, and keep their part of it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=256,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    tpplan.parallelize(model, "llama.yaml", mesh=mesh, sequence_parallel=sequence_parallel)
    index, count = mesh["pp"].get_local_rank(), mesh["pp"].size()
    each = -(-config.num_hidden_layers // count)
    layers = range(each * index, each * (index + 1))
    first, last = index == 0, index == count - 1
    stage = Stage(model, layers, first, last)
    tpplan.shard_stage(stage, first=first, last=last)
    device = next(stage.parameters()).device
    return PipelineStage(stage, index, count, device, group=mesh["pp"].get_group())


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of each next byte."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tp", type=int, default=2, help="ranks of each stage")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-sequence-parallel", action="store_true")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    stages = int(os.environ["WORLD_SIZE"]) // options.tp
    mesh = init_device_mesh(device, (stages, options.tp), mesh_dim_names=("pp", "tp"))
    stage = stage_of(mesh, not options.no_sequence_parallel)
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=3e-3)

    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    for step in range(options.steps):
        # the same numbers on every rank: tp ranks must be fed alike, and the last stage's targets
        # are what the first one was given
        start = torch.randint(len(text) - LENGTH, (BATCH,), generator=torch.manual_seed(step))
        ids = torch.stack([text[i : i + LENGTH] for i in start.tolist()])
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = {"target": ids, "losses": losses} if stage.is_last else {}
        schedule.step(*([ids] if stage.is_first else []), **given)
        optimizer.step()
        if losses and mesh["tp"].get_local_rank() == 0:
            print(f"step {step + 1:2}  loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
