"""Small blocks whose layers checkpoint parts of themselves, sum branches, keep their outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import VOCAB, randomize

WIDTH, INNER, HEADS = 16, 32, 4
PLAN: dict[str, Any] = {
    "tpplan": 1,
    "rules": {
        "model.embed": "vocab",
        "model.layers.*.{norm,norm2}": "sequence_parallel",
        "model.layers.*.attn.{q,k,v}": "colwise",
        "model.layers.*.attn.out": "rowwise",
        "model.layers.*.mlp.fc": "colwise",
        "model.layers.*.mlp.out": "rowwise",
        "model.norm": "sequence_parallel",
        "head": "vocab",
    },
}


class Attention(nn.Module):
    """Causal attention with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two projections around a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.act(self.fc(x)))


class Layer(nn.Module):
    """Attention and MLP one after the other; ``part`` runs each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()
        self.part: Callable[..., torch.Tensor] = lambda f, x: f(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.part(lambda y: self.attn(self.norm(y)), x)
        return x + self.part(lambda y: self.mlp(self.norm2(y)), x)


class Parallel(Layer):
    """Attention and MLP beside each other: their sums are reduced together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.part is None:
            return x + self.attn(y)
        return self.norm2(x) + self.part(self.attn, y) + self.part(self.mlp, y)


class Base(nn.Module):
    """Embeddings, layers, a norm."""

    def __init__(self, layer: Callable[[], Layer], count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.norm = nn.LayerNorm(WIDTH)
        self.whole: Callable[..., torch.Tensor] = lambda f, x: f(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.whole(layer, x)
        return self.norm(x)


class Model(nn.Module):
    """The base and a head."""

    def __init__(self, layer: Callable[[], Layer] = Layer, count: int = 2) -> None:
        super().__init__()
        self.model = Base(layer, count)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        randomize(self, 1, 0.2)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(ids))


def checkpointing(reentrant: bool) -> Callable[..., torch.Tensor]:
    """Runs a function under activation checkpointing."""

    def run(f: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        return checkpoint(f, *args, use_reentrant=reentrant)  # type: ignore[no-any-return]

    return run
