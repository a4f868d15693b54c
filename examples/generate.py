"""Generate text with a sharded model: a checkpoint's, or one of random numbers.

    torchrun --nproc-per-node 2 examples/generate.py --folder run   # what train.py saved there

Every rank generates, and all of them the same tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig

import tpplan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="with config.json and safetensors files")
    parser.add_argument("--prompt", default="tpplan ")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()

    source = options.folder or LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=256,
    )
    torch.manual_seed(0)  # alike on all ranks: for random weights, and for what is sampled
    model = tpplan.from_pretrained(source)
    device = next(model.parameters()).device
    ids = torch.tensor([list(options.prompt.encode())], device=device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=options.tokens,
        do_sample=options.temperature > 0,
        temperature=options.temperature or None,
        pad_token_id=0,
        eos_token_id=None,
    )
    if dist.get_rank() == 0:
        print(bytes(out[0].tolist()).decode(errors="replace"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
