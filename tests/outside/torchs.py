"""Models of torch's own layers, as its tutorials build them."""

from __future__ import annotations

import torch
from torch import nn

VOCAB, WIDTH, HEADS, INNER, LONGEST = 64, 32, 4, 64, 64


class Classified(nn.Module):
    """``nn.TransformerEncoder`` between an embedding with positions and a head over its words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of words for every position."""
        places = torch.arange(ids.size(1), device=ids.device)
        out: torch.Tensor = self.head(self.encoder(self.embed(ids) + self.positions(places)))
        return out


class Translator(nn.Module):
    """``nn.Transformer`` between two embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, HEADS, 2, 2, INNER, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Scores of the next words of a translation."""
        later = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        out = self.transformer(
            self.source(source), self.target(target), tgt_mask=later, tgt_is_causal=True
        )
        scores: torch.Tensor = self.head(out)
        return scores


def encoder() -> nn.Module:
    """``nn.TransformerEncoder`` alone."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def transformer() -> nn.Module:
    """``nn.Transformer`` alone, as it is by default: the sequence first."""
    return nn.Transformer(WIDTH, HEADS, 2, 2, INNER, dropout=0.0)
