"""Train a Llama over data-parallel groups of tensor-parallel ranks, save it, and go on.

    torchrun --nproc-per-node 4 examples/train.py --folder run
    torchrun --nproc-per-node 2 examples/train.py --folder run --dp 1   # goes on, on other ranks

FSDP2 shards over "dp" what tpplan shards over "tp". On GPUs it uses nccl, on a machine without
them gloo. The text is the README of this repository, byte by byte.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import tpplan

LENGTH, BATCH = 64, 8
TEXT = Path(__file__).parent.parent / "README.md"


def sharded(mesh: DeviceMesh, folder: Path) -> LlamaForCausalLM:
    """The model on meta, parallelized, then filled: no rank ever holds all of it."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=256,
        max_position_embeddings=LENGTH,
    )
    if (folder / "model.safetensors").exists():
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
    else:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    tpplan.parallelize(model, "llama.yaml", mesh=mesh)
    if mesh["dp"].size() > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    if (folder / "model.safetensors").exists():
        tpplan.load_checkpoint(model, folder)
    return model


def batch(step: int, text: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The same on the ranks of a tp group, another one in each of the groups."""
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=torch.manual_seed(step))
    mine = starts.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    return torch.stack([text[start : start + LENGTH] for start in mine.tolist()])


def plot(losses: list[float], height: int = 8, width: int = 60) -> str:
    """The curve, in characters."""
    chosen = [losses[i * len(losses) // width] for i in range(width)][: len(losses)]
    low, high = min(losses), max(losses)
    rows = [round((height - 1) * (high - loss) / (high - low or 1)) for loss in chosen]
    lines = ["".join("*" if row == y else " " for row in rows) for y in range(height)]
    return "\n".join([f"{high:.2f}", *lines, f"{low:.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint")
    parser.add_argument("--dp", type=int, default=2, help="data-parallel groups")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = options.dp, int(os.environ["WORLD_SIZE"]) // options.dp
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "tp"))
    first = dist.get_rank() == 0
    model = sharded(mesh, options.folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    done: list[float] = []
    if (options.folder / "losses.json").exists():
        done = json.loads((options.folder / "losses.json").read_text())
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=options.folder / "optimizer")
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    text = torch.tensor(list(TEXT.read_bytes()), device=device)
    for step in range(len(done), len(done) + options.steps):
        ids = batch(step, text, mesh)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().clone()
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        done.append(loss.item() / mesh["dp"].size())
        if first:
            print(f"step {step + 1:3}  loss {done[-1]:.4f}", flush=True)

    tpplan.save_checkpoint(model, options.folder)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    writer = dcp.FileSystemWriter(options.folder / "optimizer", overwrite=True)
    dcp.save(state, storage_writer=writer)
    if first:
        (options.folder / "losses.json").write_text(json.dumps(done))
        print(plot(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
