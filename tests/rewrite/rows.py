"""Models with packed projections and shared key-value heads, and what is compared of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, full, same
from tests.models import VOCAB, randomize, token_ids
from tpplan.comm.rows import RowsTensor

_DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT: dict[str, Any] = {
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCAB,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# the plan, the class, the configuration, and the parameters that are placed by rows at tp 4
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "gpt2": ("gpt2.yaml", "GPT2", _GPT, "c_attn"),
    "bigcode": ("gpt_bigcode.yaml", "GPTBigCode", {**_GPT, "multi_query": True}, "c_attn"),
    "phi3": ("phi3.yaml", "Phi3", {**_DECODER, "num_key_value_heads": 2}, "qkv_proj"),
    "llama 2": (
        "llama.yaml",
        "Llama",
        {**_DECODER, "num_key_value_heads": 2, "attention_bias": True},
        "k_proj",
    ),
    "llama 1": ("llama.yaml", "Llama", {**_DECODER, "num_key_value_heads": 1}, "v_proj"),
}
ALL = tuple(CASES)


def built(case: str, seed: int = 1, device: str = "cpu", layers: int = 2) -> Any:
    """The whole model of a case, in training mode."""
    import transformers

    _, family, sizes, _ = CASES[case]
    config = {**sizes, "n_layer" if "n_embd" in sizes else "num_hidden_layers": layers}
    kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    with torch.device(device):
        model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**config))
    if device != "meta":
        randomize(model, seed)
    return model.train()


def sharded(case: str, model: Any, mesh: DeviceMesh, sp: bool) -> Any:
    """A sharded copy; the model itself stays whole."""
    return tpplan.parallelize(
        copy.deepcopy(model), CASES[case][0], mesh, sequence_parallel=sp, prove=False
    )


def by_rows(model: nn.Module) -> dict[str, RowsTensor]:
    """The parameters that are placed by rows."""
    return {n: p for n, p in model.named_parameters() if isinstance(p, RowsTensor)}


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The model's own loss."""
    return model(input_ids=ids, labels=ids).loss


def labelled(batch: int, length: int, seed: int) -> Any:
    """A call for ``step``."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        out = model(input_ids=ids, labels=ids)
        return {"logits": full(out.logits), "loss": out.loss, "objective": out.loss}

    return run


def canonical(expected: nn.Module, model: nn.Module) -> Errors:
    """Whether every parameter, gathered, is bit for bit the original."""
    theirs = dict(expected.named_parameters())
    return {
        f"{name} is the original": same(torch.equal(full(p), full(theirs[name])))
        for name, p in model.named_parameters()
    }


def copies_agree(tensors: Mapping[str, torch.Tensor]) -> Errors:
    """Whether ranks that hold the same rows hold the same bits: what each would save."""
    errors = {}
    for name, t in tensors.items():
        if not isinstance(t, RowsTensor):
            continue
        local = t.detach().to_local()
        whole = full(t)
        errors[f"copies of {name} agree"] = same(
            torch.equal(t.rows.take(whole, t.device_mesh.get_local_rank()), local)
        )
    return errors
