"""Small models with LoRA adapters that do something: none of their factors is zero."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.models import VOCAB, hf, randomize

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def lora(model: nn.Module, targets: list[str], seed: int = 5, **options: Any) -> Any:
    """A model with LoRA on these of its layers, and the rest frozen."""
    from peft import LoraConfig, get_peft_model

    kind = "CAUSAL_LM" if hasattr(model, "generate") else None
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type=kind, **options)
    adapted = get_peft_model(model, config).train()
    factors = nn.ParameterDict(
        {n.replace(".", "/"): p for n, p in adapted.named_parameters() if "lora_" in n}
    )
    randomize(factors, seed, std=0.2)
    return adapted


def llama(targets: list[str] = ALL, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    """A Llama with LoRA."""
    return lora(hf(**(changes or {})), targets, **options)


def gpt2(seed: int = 5) -> Any:
    """A GPT-2 with LoRA on its Conv1Ds, one of them packed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(**_GPT2))
    randomize(model, 1)
    return lora(model, ["c_attn", "c_proj", "c_fc"], seed, fan_in_fan_out=True)


def phi3(seed: int = 5) -> Any:
    """A Phi-3 with LoRA on its packed projections, and on those after them."""
    return lora(hf("Phi3"), ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"], seed)
