"""Tiny Hugging Face models with random weights, and calls for them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tpplan

VOCAB = 131  # a prime: no tp divides it
SHARDED_LOGITS: dict[str, Any] = {
    "tpplan": 1,
    "extends": "llama.yaml",
    "rules": {"lm_head": {"style": "vocab", "output": "shard"}},
}
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"head_dim": 16},  # heads wider than hidden_size / heads
    "Qwen2": {},  # biases on q, k and v only
    "Qwen3": {"head_dim": 8, "attention_bias": True},  # each head's q and k are normalised
}
FAMILIES = tuple(_OWN)


def hf(family: str = "Llama", seed: int = 1, device: str = "cpu", **changes: Any) -> Any:
    """Any ``<family>ForCausalLM`` in training mode; ``changes`` go to its config."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **{**_SIZES, **_OWN.get(family, {}), **changes}
    )
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    if device != "meta":
        randomize(model, seed)
    return model.train()


def randomize(model: nn.Module, seed: int, std: float = 0.05) -> None:
    """Every parameter normal: around 1 where it scales a norm, else around 0.

    No weight keeps a value (zero biases, norms of one) under which a mistake would go unseen.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
        with torch.no_grad():
            parameter.normal_(mean, std, generator=generator)


def token_ids(batch: int, length: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    """Random ids without the padding id, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab, (batch, length), generator=generator)


def padded(batch: int, length: int, left: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """A padding mask whose rows are of different lengths, and the position ids that fit it."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        missing = min(2 * row, length - 1)
        mask[row, slice(0, missing) if left else slice(length - missing, length)] = 0
    return mask, (mask.cumsum(1) - 1).clamp(min=0)


def weights_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Random weights for a scalar loss that no symmetry of the output hides from."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def weighed(*outputs: torch.Tensor) -> torch.Tensor:
    """A scalar that every element of the outputs has its own weight in."""
    parts = [(t * weights_like(t, i)).sum() for i, t in enumerate(outputs)]
    return torch.stack(parts).sum()


def sharded(model: Any, mesh: DeviceMesh, sp: bool, plan: Any = "llama.yaml") -> Any:
    """A sharded copy; the model itself stays whole."""
    return tpplan.parallelize(copy.deepcopy(model), plan, mesh, sequence_parallel=sp, prove=False)


def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Of selective checkpointing: all but products is recomputed."""
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(model: Any, selective: bool, **options: Any) -> None:
    """Backward recomputes the layers of a Llama, all of them or but for their products."""
    if selective:
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
        options["context_fn"] = contexts
    for layer in model.model.layers:
        run = functools.partial(checkpoint, layer.forward, use_reentrant=False, **options)
        layer.forward = run
