"""Models of transformers that no shipped plan lists: what a user adds to one, or writes."""

from __future__ import annotations

from typing import Any

import transformers

VOCAB = 131
END = VOCAB - 1
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BERT: dict[str, Any] = {
    **_SIZES,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
IMAGE = 16
CLIP: dict[str, Any] = {
    "text_config": {
        **_SIZES,
        "vocab_size": VOCAB,
        "max_position_embeddings": 16,
        "eos_token_id": END,
        "bos_token_id": 1,
        "pad_token_id": 0,
    },
    "vision_config": {**_SIZES, "image_size": IMAGE, "patch_size": 4},
    "projection_dim": 16,
}

LLAMA_CLASSIFIER_RULES = """
lm_head: remove
score: replicate
"""
CLASSIFIER_RULES = "classifier: replicate"
TOKENS_RULES = "classifier: sequence_parallel"
ANSWERS_RULES = "qa_outputs: replicate"
CLIP_RULES = """
"{text,vision}_model.encoder.layers.*.layer_norm{1,2}": sequence_parallel
"{text,vision}_model.encoder.layers.*.self_attn.{q,k,v}_proj": colwise
"{text,vision}_model.encoder.layers.*.self_attn.out_proj": rowwise
"{text,vision}_model.encoder.layers.*.mlp.fc1": colwise
"{text,vision}_model.encoder.layers.*.mlp.fc2": rowwise
text_model.embeddings.token_embedding: vocab
text_model.embeddings.position_embedding: sequence_parallel
text_model.final_layer_norm: sequence_parallel
vision_model.embeddings.{patch,position}_embedding: replicate
"{text,visual}_projection": replicate
"""
SWIN_RULES = """
encoder.layers.*.blocks.*.attention.[qkv]_proj: colwise
"**.relative_position_bias_table": {style: colwise, dim: 1}
encoder.layers.*.blocks.*.attention.o_proj: rowwise
encoder.layers.*.blocks.*.mlp.fc1: colwise
encoder.layers.*.blocks.*.mlp.fc2: rowwise
encoder.layers.*.blocks.*.layernorm_{before,after}: sequence_parallel
encoder.layers.*.downsample: replicate
embeddings: replicate
layernorm: replicate
"""
_LANGUAGE = """
model.language_model.embed_tokens: {style: vocab, output: gather}
model.language_model.layers.*.{input,post_attention}_layernorm: sequence_parallel
model.language_model.layers.*.self_attn.{q,k,v}_proj: colwise
model.language_model.layers.*.self_attn.o_proj: rowwise
model.language_model.layers.*.mlp.{gate,up}_proj: colwise
model.language_model.layers.*.mlp.down_proj: rowwise
model.language_model.norm: sequence_parallel
lm_head: vocab
"""
LLAVA_RULES = (
    _LANGUAGE
    + """
"**.encoder.layers.*.layer_norm{1,2}": sequence_parallel
"**.encoder.layers.*.self_attn.{q,k,v}_proj": colwise
"**.encoder.layers.*.self_attn.out_proj": rowwise
"**.encoder.layers.*.mlp.fc1": colwise
"**.encoder.layers.*.mlp.fc2": rowwise
"**.{patch,position}_embedding": replicate
model.multi_modal_projector: replicate
"""
)
DECODER_RULES = """
model.decoder.embed_tokens: vocab
model.decoder.embed_positions: sequence_parallel
model.decoder.layers.*.*_layer_norm: sequence_parallel
model.decoder.layers.*.{self,encoder}_attn.{q,k,v}_proj: colwise
model.decoder.layers.*.{self,encoder}_attn.out_proj: rowwise
model.decoder.layers.*.fc1: colwise
model.decoder.layers.*.fc2: rowwise
model.decoder.layer_norm: sequence_parallel
lm_head: vocab
"""
QWEN_RULES = (
    _LANGUAGE
    + """
model.visual.patch_embed: replicate
model.visual.blocks.*.norm{1,2}: replicate
model.visual.blocks.*.attn.qkv: {style: colwise, packed: [q, k, v]}
model.visual.blocks.*.attn.proj: rowwise
model.visual.blocks.*.mlp.fc1: colwise
model.visual.blocks.*.mlp.fc2: rowwise
model.visual.merger.ln_q: replicate
model.visual.merger.mlp.0: colwise
model.visual.merger.mlp.2: rowwise
"""
)
QWEN_LAYERS = "model.language_model.layers.*"  # pictures stay whole
IMAGE_TOKEN, IMAGE_LENGTH, PATCH = VOCAB - 2, 4, 4


def llava() -> Any:
    """Images, each in the place of four tokens; its code counts them."""
    vision = {**_SIZES, "num_hidden_layers": 3, "image_size": IMAGE, "patch_size": 8}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**LLAMA),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=IMAGE_LENGTH,
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen() -> Any:
    """Pictures of any size, whose patches its tower has in one row without a batch."""
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
    patches = {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    text = {**_SIZES, "num_key_value_heads": 2, "vocab_size": VOCAB, "rope_scaling": rope}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": IMAGE_TOKEN - 1}
    config = transformers.Qwen2VLConfig(
        text_config={**text, **ends}, vision_config={**vision, **patches}, **tokens, **ends
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def decoder() -> Any:
    """A decoder that attends to what an encoder gave, where it is given that."""
    sizes = {"vocab_size": VOCAB, "d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 64}
    config = transformers.BlenderbotConfig(
        **sizes, decoder_attention_heads=4, max_position_embeddings=64, dropout=0.0
    )
    return transformers.BlenderbotForCausalLM(config)


def swin() -> Any:
    """Windows of an image, two stages, a bias for each head from a table [distances, heads]."""
    sizes = {"image_size": IMAGE, "patch_size": 2, "window_size": 4, "embed_dim": 16}
    config = transformers.SwinConfig(**sizes, depths=[2, 2], num_heads=[4, 8], drop_path_rate=0.0)
    return transformers.SwinModel(config)


def llama_classifier() -> Any:
    """A class for each sequence, from its last token that is no padding."""
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**LLAMA, num_labels=3)
    )


def bert(task: str) -> Any:
    """A BERT with the head of a task."""
    config = transformers.BertConfig(**BERT, num_labels=2 if task == "QuestionAnswering" else 3)
    return getattr(transformers, f"BertFor{task}")(config)


def clip() -> Any:
    """A text tower and a vision tower."""
    return transformers.CLIPModel(transformers.CLIPConfig(**CLIP))
