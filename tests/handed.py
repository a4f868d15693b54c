"""A small decoder that returns its keys and values, and is given them again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, VOCABULARY, BLOCKS = 32, 4, 48, 2
Pair = tuple[torch.Tensor, torch.Tensor]

RULES = {
    "table": "vocab",
    "blocks.*.{first,second}": "sequence_parallel",
    "blocks.*.mixer.{q,k,v}": "colwise",
    "blocks.*.mixer.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "last": "sequence_parallel",
    "head": "vocab",
}


def plan(sequence_parallel: bool) -> dict[str, Any]:
    return {"tpplan": 1, "sequence_parallel": sequence_parallel, "rules": RULES}


class Mixer(nn.Module):
    """``weights``: gives what its heads attend to as well; ``shared``: heads to a key."""

    def __init__(self, heads: int, weights: bool, shared: int) -> None:
        super().__init__()
        self.heads, self.weights, self.shared = heads, weights, shared
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // shared) for _ in range(2))

    def forward(self, x: torch.Tensor, past: Pair | None) -> Any:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, WIDTH // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        keys, values = (t.repeat_interleave(self.shared, 1) for t in (k, v))
        scores = q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
        before = torch.ones(length, k.shape[2], dtype=torch.bool).tril(k.shape[2] - length)
        weights = scores.masked_fill(~before, -torch.inf).softmax(-1)
        out = self.o((weights @ values).transpose(1, 2).reshape(batch, length, -1))
        return out, (k, v), weights if self.weights else None


class Block(nn.Module):
    def __init__(self, heads: int, weights: bool, shared: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer = Mixer(heads, weights, shared)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, past: Pair | None = None) -> Any:
        mixed, cache, weights = self.mixer(self.first(x), past)
        x = x + mixed
        return x + self.down(F.gelu(self.up(self.second(x)))), cache, weights


class Model(nn.Module):
    """Gives its logits, a pair for each block, and the weights of attention if asked to."""

    def __init__(self, heads: int = HEADS, weights: bool = False, shared: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, weights, shared) for _ in range(BLOCKS))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, past: list[Pair] | None = None) -> dict[str, Any]:
        x = self.table(ids)
        out: dict[str, Any] = {"logits": None, "past": [], "weights": []}
        for block, kept in zip(self.blocks, past or [None] * BLOCKS, strict=True):
            x, cache, weights = block(x, kept)
            out["past"].append(cache)
            out["weights"].append(weights)
        return {**out, "logits": self.head(self.last(x))}
