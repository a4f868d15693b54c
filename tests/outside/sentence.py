"""A sentence encoder in the manner of sentence-transformers: modules that hand on a mapping."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

RULES = """
0.auto_model.embeddings.word_embeddings: vocab
0.auto_model.embeddings.{position,token_type}_embeddings: sequence_parallel
0.auto_model.embeddings.LayerNorm: sequence_parallel
0.auto_model.encoder.layer.*.attention.self.{query,key,value}: colwise
0.auto_model.encoder.layer.*.attention.output.dense: rowwise
0.auto_model.encoder.layer.*.attention.output.LayerNorm: sequence_parallel
0.auto_model.encoder.layer.*.intermediate.dense: colwise
0.auto_model.encoder.layer.*.output.dense: rowwise
0.auto_model.encoder.layer.*.output.LayerNorm: sequence_parallel
"""
# the stack is inside of the first module
LAYERS = "0.auto_model.encoder.layer.*"

Features = dict[str, torch.Tensor]


class Transformer(nn.Module):
    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__()
        self.auto_model = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, features: Features) -> Features:
        keys = ("input_ids", "attention_mask", "token_type_ids")
        trans_features = {key: features[key] for key in keys if key in features}
        outputs = self.auto_model(**trans_features, return_dict=True)
        features["token_embeddings"] = outputs[0]
        return features


class Pooling(nn.Module):
    """The mean of the tokens that the mask leaves."""

    def forward(self, features: Features) -> Features:
        token_embeddings = features["token_embeddings"]
        mask = features["attention_mask"].unsqueeze(-1).expand(token_embeddings.size())
        mask = mask.to(token_embeddings.dtype)
        sum_embeddings = torch.sum(token_embeddings * mask, 1)
        features["sentence_embedding"] = sum_embeddings / torch.clamp(mask.sum(1), min=1e-9)
        return features


class Normalize(nn.Module):
    def forward(self, features: Features) -> Features:
        embedding = features["sentence_embedding"]
        features["sentence_embedding"] = nn.functional.normalize(embedding, p=2, dim=1)
        return features


class SentenceTransformer(nn.Sequential):
    def forward(self, input: Features) -> Features:
        for module in self:
            input = module(input)
        return input


def encoder(config: dict[str, Any]) -> SentenceTransformer:
    """A BERT, pooled and normalised."""
    return SentenceTransformer(
        Transformer(transformers.BertConfig(**config)), Pooling(), Normalize()
    )
