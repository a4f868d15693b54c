"""Fine-tune a small Llama with LoRA, sharded over the ranks, and hand the adapters on.

    torchrun --nproc-per-node 2 examples/finetune_lora.py

Runs in seconds on CPUs (gloo); on GPUs each rank takes its own (nccl). The model has random
weights: take ``AutoModelForCausalLM.from_pretrained(path)`` for one of yours.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import tpplan

STEPS, BATCH, LENGTH = 20, 8, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base_model() -> LlamaForCausalLM:
    """The same on every rank, and every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,  # or it has less to adapt than a trained one
    )
    return LlamaForCausalLM(config)


def batch(step: int, device: torch.device) -> torch.Tensor:
    """Counting, from random numbers on: the same batch on all ranks of a tp group."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, 256, (BATCH, 1), generator=generator)
    return ((first + torch.arange(LENGTH)) % 256).to(device)


def train(model: Any) -> float:
    """A few steps on the adapters; the last loss."""
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=2e-2)
    for step in range(STEPS):
        ids = batch(step, adapters[0].device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1:>3}  loss {loss.item():.3f}")
    return loss.item()


def main() -> None:
    # adapters first: their factors are then sharded as the layers are that they are added to
    config = LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base_model(), config)
    tpplan.parallelize(model, "auto")
    train(model)

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model.save_pretrained(folder[0])  # on every rank; the first one writes
    ids = batch(STEPS, next(model.parameters()).device)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
    if dist.get_rank() == 0:
        whole = PeftModel.from_pretrained(base_model(), folder[0]).to(ids.device)
        with torch.no_grad():
            difference = (whole.eval()(input_ids=ids).logits - logits).abs().max().item()
        sharded = sum(isinstance(p, DTensor) for p in model.parameters())
        print(f"{sharded} sharded parameters; adapters saved to {folder[0]}")
        print(f"loaded into an unsharded model: logits differ by {difference:.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
