"""The models, their plans, and calls of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import nn

from tests.outside import (
    gptfast,
    library,
    meta,
    nanogpt,
    sentence,
    tune,
    uses,
    vit,
    xtransformers,
)

VOCAB = library.VOCAB
Call = Mapping[str, Any]


@dataclass(frozen=True)
class Outside:
    """A model as a user brings it.

    Attributes:
        make: the model with its own initial weights.
        plan: the plan that the user writes, or a shipped one.
        call: keyword arguments of a batch, a length and a seed.
        sharded: whether the plan shards attention and MLP both, and thus most of the parameters.
    """

    make: Callable[[], nn.Module]
    plan: str | Mapping[str, Any]
    call: Callable[[int, int, int], Call]
    sharded: bool = True


@dataclass(frozen=True)
class Refused:
    """A model that cannot be sharded in a mode, and a part of what its user is told.

    Attributes:
        sequence_parallel: the mode; in the other one it is right.
    """

    outside: Outside
    sequence_parallel: bool
    message: str


def plan_of(rules: str, **entries: Any) -> Mapping[str, Any]:
    """A plan of these rules, as its user's file would be read."""
    return {"tpplan": 1, **entries, "rules": yaml.safe_load(rules)}


def ids_of(batch: int, length: int, seed: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def images_of(batch: int, seed: int) -> torch.Tensor:
    """Random images."""
    shape = (batch, 3, library.IMAGE, library.IMAGE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _named(name: str) -> Callable[[int, int, int], Call]:
    return lambda batch, length, seed: {name: ids_of(batch, length, seed)}


def _nanogpt(batch: int, length: int, seed: int) -> Call:
    ids = ids_of(batch, length, seed)
    return {"idx": ids, "targets": ids.roll(-1, 1)} if seed % 2 else {"idx": ids}


def _gptfast(batch: int, length: int, seed: int) -> Call:
    ids = ids_of(batch, length, seed)
    return {"idx": ids, "input_pos": torch.arange(length)} if seed % 2 else {"idx": ids}


def _meta(batch: int, length: int, seed: int) -> Call:
    return {"tokens": ids_of(batch, length, seed), "start_pos": 0}


def _padded(batch: int, length: int, seed: int) -> Call:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length // 2 :] = 0
    return {"input_ids": ids_of(batch, length, seed), "attention_mask": mask}


def _sentences(batch: int, length: int, seed: int) -> Call:
    return {"input": _padded(batch, length, seed)}


def _sentence_encoder() -> nn.Module:
    return sentence.encoder(library.BERT)


def _image(batch: int, length: int, seed: int) -> Call:
    return {"x": images_of(batch, seed)}


def _pixels(batch: int, length: int, seed: int) -> Call:
    return {"pixel_values": images_of(batch, seed)}


def _captioned(batch: int, length: int, seed: int) -> Call:
    ids = ids_of(batch, length, seed)
    ids[:, -1] = library.END
    return {"input_ids": ids, "pixel_values": images_of(batch, seed)}


def _illustrated(batch: int, length: int, seed: int) -> Call:
    ids = ids_of(batch, length, seed).clamp(max=library.IMAGE_TOKEN - 1)
    ids[:, 1 : 1 + library.IMAGE_LENGTH] = library.IMAGE_TOKEN
    return {"input_ids": ids, "pixel_values": images_of(batch, seed)}


def _pictured(batch: int, length: int, seed: int) -> Call:
    """A picture of 4 x 4 patches for each sequence, in the place of four tokens."""
    call = _illustrated(batch, length, seed)
    images = call["input_ids"] == library.IMAGE_TOKEN
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": call["input_ids"],
        "mm_token_type_ids": images.int(),
        "pixel_values": torch.randn(16 * batch, 6 * library.PATCH**2, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * batch),
    }


_TUNE = _named("tokens")
_IDS = _named("ids")

MODELS: Mapping[str, Outside] = {
    "nanoGPT": Outside(lambda: nanogpt.GPT(nanogpt.GPTConfig()), "auto", _nanogpt),
    "nanoGPT without flash, biases": Outside(
        lambda: nanogpt.GPT(nanogpt.GPTConfig(bias=False), flash=False), "nanogpt.yaml", _nanogpt
    ),
    "gpt-fast": Outside(
        lambda: gptfast.Transformer(gptfast.ModelArgs()).setup_caches(64),
        plan_of(gptfast.RULES),
        _gptfast,
    ),
    "Meta's Llama": Outside(lambda: meta.Transformer(meta.ModelArgs()), plan_of(meta.RULES), _meta),
    "torchtune": Outside(lambda: tune.decoder(tied=False), plan_of(tune.UNTIED_RULES), _TUNE),
    "torchtune, tied": Outside(lambda: tune.decoder(tied=True), plan_of(tune.RULES), _TUNE),
    "timm ViT, class token": Outside(vit.VisionTransformer, plan_of(vit.TOKEN_RULES), _image),
    "timm ViT, norms in the blocks": Outside(
        lambda: vit.VisionTransformer(scale_norm=True), plan_of(vit.NORMED_RULES), _image
    ),
    "timm ViT, average": Outside(
        lambda: vit.VisionTransformer(global_pool="avg", class_token=False, fused_attn=False),
        plan_of(vit.AVERAGE_RULES),
        _image,
    ),
    "x-transformers": Outside(xtransformers.decoder, plan_of(xtransformers.RULES), _named("x")),
    "x-transformers, half the KV heads": Outside(
        lambda: xtransformers.decoder(heads=8, kv_heads=4),
        plan_of(xtransformers.GROUPED_RULES),
        _named("x"),
    ),
    "LlamaForSequenceClassification": Outside(
        library.llama_classifier,
        plan_of(library.LLAMA_CLASSIFIER_RULES, extends="llama.yaml"),
        _named("input_ids"),
    ),
    "BertForSequenceClassification": Outside(
        lambda: library.bert("SequenceClassification"),
        plan_of(library.CLASSIFIER_RULES, extends="bert.yaml"),
        _padded,
    ),
    "BertForTokenClassification": Outside(
        lambda: library.bert("TokenClassification"),
        plan_of(library.TOKENS_RULES, extends="bert.yaml"),
        _padded,
    ),
    "BertForQuestionAnswering": Outside(
        lambda: library.bert("QuestionAnswering"),
        plan_of(library.ANSWERS_RULES, extends="bert.yaml"),
        _padded,
    ),
    "sentence-transformers": Outside(
        _sentence_encoder, plan_of(sentence.RULES, layers=sentence.LAYERS), _sentences
    ),
    "CLIPModel": Outside(library.clip, plan_of(library.CLIP_RULES), _captioned),
    "Llava, with images": Outside(library.llava, plan_of(library.LLAVA_RULES), _illustrated),
    "Qwen2-VL, with images": Outside(
        library.qwen, plan_of(library.QWEN_RULES, layers=library.QWEN_LAYERS), _pictured
    ),
    "head by F.linear": Outside(lambda: uses.Tied("linear"), plan_of(uses.TIED_RULES), _IDS),
    "head by @": Outside(lambda: uses.Tied("matmul"), plan_of(uses.TIED_RULES), _IDS),
    "called by keyword": Outside(
        lambda: uses.Decoder("attention"), plan_of(uses.KEYWORD_RULES), _IDS
    ),
    "einsum attention": Outside(lambda: uses.Decoder("einsum"), plan_of(uses.EINSUM_RULES), _IDS),
    "einsum attention, whole": Outside(
        lambda: uses.Decoder("einsum"), plan_of(uses.WHOLE_RULES), _IDS, sharded=False
    ),
    "convolutions, a value": Outside(
        lambda: uses.Valued("convolution"), plan_of(uses.MIXER_RULES), _IDS
    ),
}

# what is said first of the plan that is right without sequence parallelism, and what then
REFUSED: Mapping[str, Refused] = {
    "sentence-transformers, no stack": Refused(
        Outside(_sentence_encoder, plan_of(sentence.RULES), _sentences),
        sequence_parallel=True,
        message="no layer stack was found for the sequence-sharded stream",
    ),
    "Swin": Refused(
        Outside(library.swin, plan_of(library.SWIN_RULES), _pixels),
        sequence_parallel=True,
        message="is not known to keep positions apart",
    ),
}
