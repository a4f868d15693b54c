"""Tiny models of every causal-LM type of transformers, with random weights and calls for them.

``python -m benchmarks.zoo`` builds and runs them all, unsharded.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CAUSAL: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Every causal-LM model type of the installed transformers."""

VOCAB, BATCH, LENGTH = 136, 2, 13
_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers"
)
_SIZES: dict[str, Any] = {
    key: value
    for value, keys in (
        (64, "hidden_size n_embd d_model emb_dim embedding_size word_embed_proj_dim lru_width"),
        (64, "hidden_size_global"),
        (2, _LAYERS + " num_encoder_layers"),
        (8, "num_attention_heads n_head n_heads num_heads attention_heads"),
        (8, "decoder_attention_heads encoder_attention_heads swa_num_attention_heads"),
        (8, "num_decoder_attention_heads num_encoder_attention_heads"),
        (4, "num_key_value_heads num_kv_heads swa_num_key_value_heads"),
        (8, "head_dim d_head d_kv kv_channels swa_head_dim linear_head_dim attention_head_size"),
        (4, "rotary_dim"),
        (96, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size n_inner"),
        (96, "dff dim_ff d_inner d_ff feed_forward_size dense_intermediate_size"),
        (96, "intermediate_size_mlp"),
        (32, "input_embedding_size ple_embed_dim"),
        (48, "output_embedding_size"),
        (VOCAB, "vocab_size unpadded_vocab_size vocab_size_per_layer_input"),
        (VOCAB, "pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab"),
        (16, "pronunciation_embed_dim shape_embed_dim num_buckets hc_lowrank image_size"),
        (8, "hidden_size_per_layer_input laurel_rank d_rel num_mel_bins max_source_positions"),
        (4, "patch_size"),
        (64, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
        (8, "sliding_window sliding_window_size window_size attention_chunk_size"),
        # experts
        (4, "num_local_experts num_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token moe_k moe_topk"),
        (1, "n_group topk_group num_expert_group first_k_dense_replace moe_layer_start_index"),
        (1, "n_shared_experts num_shared_experts moe_num_shared_experts decoder_sparse_step"),
        (32, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
        (32, "shared_intermediate_size moe_shared_expert_intermediate_size"),
        (32, "shared_experts_intermediate_size rel_extent prompt_mid_dim"),
        (2, "zero_expert_num"),
        # latent attention
        (32, "q_lora_rank"),
        (16, "kv_lora_rank o_lora_rank router_hidden_size"),
        (8, "qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim index_n_heads index_topk"),
        # linear attention and state spaces
        (4, "linear_num_key_heads"),
        (8, "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_num_heads"),
        (8, "state_size mamba_d_state time_step_rank mamba_dt_rank n_mamba_heads mamba_n_heads"),
        (8, "ssm_state_size mamba_num_heads chunk_size mamba_chunk_size"),
        (16, "mamba_d_head mamba_head_dim mamba_headdim"),
        (1, "mamba_n_groups mamba_ngroups"),
        # special tokens, which no example holds
        (0, "pad_token_id"),
        (1, "bos_token_id decoder_start_token_id"),
        (2, "eos_token_id sep_token_id"),
    )
    for key in keys.split()
}
_WITHOUT_DEFAULT = ("num_key_value_heads", "head_dim")  # set also where the default is none
_PER_LAYER = ("_types", "_block_type", "attention_layers", "no_rope_layers")

_NESTED = (
    *("text_config", "vision_config", "audio_config"),
    *("patcher_config", "encoder_config", "decoder_config", "global_config"),
)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "head_dim"), 16)
_LATENT |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)

_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    # block-sparse attention is swapped for the full one in a forward on a short input
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "cohere2_moe": {"mlp_layer_types": ["dense", "sparse"]},
    "codegen": {"n_head": 16},  # four blocks of heads on each rank
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "per_layer_config": {2: {"num_attention_heads": 8, "num_key_value_heads": 8, **_LATENT}}
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"moe_layers": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "phi4_multimodal_audio": {
        "num_blocks": 2,
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
        "nemo_conv_channels": 16,
    },
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0], "attention_bias": True},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "mellum": {"mlp_layer_types": ["dense", "sparse"]},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 16,
        "num_key_value_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What single types (of configs) need besides."""


def _states(*size: int) -> Tensor:
    """Activations for a batch, the same at every call."""
    return torch.randn((BATCH, *size), generator=torch.Generator().manual_seed(5))


_CALLS: dict[str, Callable[[Callable[..., Tensor]], dict[str, Any]]] = {
    "git": lambda ids: {"pixel_values": _states(3, 16, 16)},
    "mllama_text_model": lambda ids: {"cross_attention_states": _states(LENGTH + 4, 64)},
    "musicgen_decoder": lambda ids: {"input_ids": ids(4 * BATCH)},
    "musicgen_melody_decoder": lambda ids: {"input_ids": ids(4 * BATCH)},
    "roc_bert": lambda ids: {"input_shape_ids": ids(), "input_pronunciation_ids": ids()},
}
"""What single types are called with besides."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-7b": ("falcon", {"multi_query": True, "parallel_attn": True}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}),
    "falcon-rw-1b": (
        "falcon",
        {
            "alibi": True,
            "parallel_attn": False,
            "multi_query": False,
            "num_kv_heads": 8,
            "bias": True,
        },
    ),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_bigcode-multi-head": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neo-local": ("gpt_neo", {"attention_types": [[["local"], 2]]}),
    "stablelm-qk-norm": ("stablelm", {"qk_layernorm": True}),
    "stablelm-parallel": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "phi-qk-norm": ("phi", {"qk_layernorm": True}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True}),
    "llama-1-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-2-kv-heads": ("llama", {"num_key_value_heads": 2}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mpt-clipped": ("mpt", {"attn_config": {"clip_qkv": 0.3}}),
    "opt-post-norm": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
}
"""Forms of one type that differ in what a plan has to say: name -> (type, config changes)."""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", {}),
    "roberta": ("RobertaForMaskedLM", {}),
    "modernbert": ("ModernBertForMaskedLM", {}),
    "modernbert-pooled": ("ModernBertForSequenceClassification", {"num_labels": 8}),
    "vit": ("ViTForImageClassification", {"num_labels": 8}),
    "t5": ("T5ForConditionalGeneration", {}),
    "t5-gated": (
        "T5ForConditionalGeneration",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart": ("BartForConditionalGeneration", {}),
    "whisper": ("WhisperForConditionalGeneration", {}),
    "blenderbot": ("BlenderbotForConditionalGeneration", {}),
    "marian": ("MarianMTModel", {}),
    "mbart": ("MBartForConditionalGeneration", {}),
    "mvp": ("MvpForConditionalGeneration", {}),
    "pegasus": ("PegasusForConditionalGeneration", {}),
}
"""Encoders and encoder-decoders: name -> (class, config changes)."""


def causal_types() -> tuple[str, ...]:
    """Every causal-LM model type of the installed transformers, sorted."""
    return CAUSAL


@cache
def causal_class(model_type: str) -> Any:
    """The causal-LM class of a type; of a multimodal one, its language model's."""
    found = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    if not found.__name__.endswith("ForConditionalGeneration"):
        return found
    return causal_class(found.config_class().get_text_config().model_type)


def tiny(model_type: str, seed: int = 1, **changes: Any) -> nn.Module:
    """A causal LM of a type, training, without randomness; ``changes`` go to its config."""
    return _built(causal_class(model_type), seed, changes)


def variant(name: str, seed: int = 1) -> nn.Module:
    """A model of ``VARIANTS``, as `tiny` makes them."""
    model_type, changes = VARIANTS[name]
    return tiny(model_type, seed, **changes)


def other(name: str, seed: int = 1, **changes: Any) -> nn.Module:
    """A model of ``OTHERS``, as `tiny` makes them."""
    class_name, own = OTHERS[name]
    return _built(getattr(transformers, class_name), seed, {**own, **changes})


def _built(found: Any, seed: int, changes: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(seed)  # for buffers that are drawn
    model: nn.Module = found(config_of(found.config_class, changes))
    randomize(model, seed)
    return model.float().train()


def config_of(config_class: Any, changes: Mapping[str, Any]) -> Any:
    """A tiny config that keeps what is characteristic of its class."""
    default = config_class()
    start = default.to_dict()
    values = {key: _small(key, value) for key, value in start.items()}
    values |= {
        key: config_of(type(getattr(default, key)), {}).to_dict()
        for key in _NESTED
        if isinstance(start.get(key), dict)
    }
    values |= _layer_kinds(start)
    values |= {key: _SIZES[key] for key in _WITHOUT_DEFAULT if key in start}
    if start.get("kv_lora_rank"):  # its keys are made for every head
        values["num_key_value_heads"] = _SIZES["num_attention_heads"]
    kept = {key: value for key, value in values.items() if value is not None}
    own = _OWN.get(config_class.model_type, {})
    return config_class(**{**kept, "use_cache": False, **own, **changes})


def _small(key: str, value: Any) -> Any:
    """The value a tiny config has instead of its default, or None to leave it."""
    if value is None:
        return None
    if key in _SIZES:
        return _SIZES[key]
    if isinstance(value, float) and ("drop" in key or "jitter" in key):
        return 0.0
    if key.endswith(("_token_id", "_token_index")):
        return 3
    return None


def _layer_kinds(start: Mapping[str, Any]) -> dict[str, Any]:
    """The fewest layers, at least two, that hold every kind of layer the default has."""
    depth = start.get("num_hidden_layers", 0)
    kinds = {
        key: value
        for key, value in start.items()
        if isinstance(value, list) and len(value) == depth and key.endswith(_PER_LAYER)
    }
    if not kinds:
        return {}
    columns = list(zip(*kinds.values(), strict=True))
    seen: set[tuple[int, Any]] = set()
    chosen = []
    for i, column in enumerate(columns):
        if not seen.issuperset(enumerate(column)):
            chosen.append(i)
            seen.update(enumerate(column))
    chosen += [depth - 1] * (2 - len(chosen))
    reduced = {key: [value[i] for i in chosen] for key, value in kinds.items()}
    return {"num_hidden_layers": len(chosen), **reduced}


def randomize(model: nn.Module, seed: int, std: float = 0.05) -> None:
    """Every parameter normal: around 1 where it was one throughout (a norm's scale), else around 0.

    No weight keeps a value (zero biases, norms of one) under which a mistake would go unseen.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if bool((parameter == 1).all()) else 0.0
            parameter.normal_(mean, std, generator=generator)


def example(model: nn.Module, padded: bool = False) -> dict[str, Any]:
    """Inputs of a tiny model, the same at every call; no id is a special token's.

    Args:
        padded: with a mask that hides the first tokens of one sequence, where the model takes one.
    """
    generator = torch.Generator().manual_seed(7)

    def ids(rows: int = BATCH, length: int = LENGTH) -> Tensor:
        return torch.randint(5, VOCAB, (rows, length), generator=generator)

    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {}
    if "pixel_values" in accepted and "input_ids" not in accepted:
        image = (BATCH, config.num_channels, config.image_size, config.image_size)
        found["pixel_values"] = torch.randn(image, generator=generator)
    elif "input_features" in accepted:
        mel = (BATCH, config.num_mel_bins, 2 * config.max_source_positions)
        found["input_features"] = torch.randn(mel, generator=generator)
    else:
        found["input_ids"] = ids()
    if config.is_encoder_decoder:
        found["decoder_input_ids"] = ids(length=LENGTH - 2)
    elif any(path.endswith(".encoder_attn") for path, _ in model.named_modules()):
        width = getattr(config, "d_model", config.hidden_size)
        states = _states(LENGTH - 2, width)
        named = "encoder_hidden_states" in accepted
        found |= {"encoder_hidden_states": states} if named else {"encoder_outputs": (states,)}
    found |= _CALLS.get(config.model_type, lambda ids: {})(ids)
    if "use_cache" in accepted:
        found["use_cache"] = False
    if padded and "attention_mask" in accepted and "input_ids" in found:
        mask = torch.ones_like(found["input_ids"])
        mask[0, :3] = 0
        found.setdefault("attention_mask", mask)
    return found


def objective(output: Any) -> Tensor:
    """A seeded random-weighted sum of the logits."""
    logits: Tensor = output.logits
    return (logits * weights(logits.shape)).sum()


def weights(shape: torch.Size) -> Tensor:
    """Of ``objective``, for logits of that shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


def hf_plan(model: nn.Module) -> dict[str, str]:
    """What transformers would apply to this model: its own, its base's and its parts' plans."""
    return dict(getattr(model, "tp_plan", None) or {})


@cache
def hf_support(model_type: str) -> str:
    """Whose plan transformers has for a type: its "own", one of a "part", for the "head", or ""."""
    config_class: Any = CONFIG_MAPPING[model_type]
    if config_class.base_model_tp_plan:
        return "own"
    found = causal_class(model_type)
    if found.config_class is not config_class and found.config_class.base_model_tp_plan:
        return "part"
    parts = [part for part in config_class.sub_configs.values() if part is not None]
    if any(getattr(part, "base_model_tp_plan", None) for part in parts):
        return "part"
    return "head" if getattr(found, "_tp_plan", None) else ""


def works_in_transformers(model_type: str) -> bool:
    """Whether the plan transformers has for a type covers more than the head."""
    return hf_support(model_type) in ("own", "part")


Maker = Callable[[], nn.Module]


def makers(names: Sequence[str] = ()) -> dict[str, Maker]:
    """Every model, or the named ones: what it is called in tables -> how it is made."""
    found: dict[str, Maker] = {name: partial(tiny, name) for name in CAUSAL}
    found |= {name: partial(variant, name) for name in VARIANTS}
    found |= {f"{name} ({OTHERS[name][0]})": partial(other, name) for name in OTHERS}
    if not names:
        return found
    unknown = {*names} - {*CAUSAL, *VARIANTS, *OTHERS}
    if unknown:
        raise SystemExit(f"neither types, variants nor others: {', '.join(sorted(unknown))}")
    return {name: make for name, make in found.items() if name.split(" (")[0] in names}


def report(make: Maker) -> list[str]:
    """Build, run forward and backward: class, parameters, seconds, what went wrong."""
    start = time.perf_counter()
    class_name, size, problem = "", "", "runs"
    try:
        model = make()
        class_name = type(model).__name__
        size = f"{sum(p.numel() for p in model.parameters()):,}"
        objective(model(**example(model))).backward()
    except Exception as error:  # whatever a model may raise belongs into the table
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return [class_name, size, f"{time.perf_counter() - start:.2f}", problem]


def main() -> int:
    """Print a line for each model; status 1 where one does not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="types, variants and others (default: all)")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    failed = 0
    chosen = makers(options.names)
    for name, make in chosen.items():
        class_name, size, seconds, problem = report(make)
        failed += problem != "runs"
        print(f"{name:40} {class_name:38} {size:>10} {seconds:>6} s  {problem}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} run")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
