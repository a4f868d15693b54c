"""A plain PyTorch decoder as textbooks write it: no library, nothing made for parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal multi-head self-attention with biased projections and a fixed number of heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.n_head = heads
        self.head_dim = width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, self.n_head, self.head_dim)
        q = self.q(x).view(shape).transpose(1, 2)
        k = self.k(x).view(shape).transpose(1, 2)
        v = self.v(x).view(shape).transpose(1, 2)
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = self.drop(F.softmax(scores.masked_fill(future, float("-inf")), dim=-1))
        y = (weights @ v).transpose(1, 2).reshape(batch, length, self.n_head * self.head_dim)
        return self.out(y)


class MLP(nn.Module):
    """Two biased projections around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.act(self.fc(x)))


class Block(nn.Module):
    """Pre-norm: attention and MLP, each with a residual connection and dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    """Token and learned position embeddings, blocks, a final norm, a head tied to the tokens."""

    def __init__(
        self,
        vocabulary: int = 128,
        width: int = 64,
        heads: int = 8,
        layers: int = 2,
        positions: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(vocabulary, width)
        self.pos_emb = nn.Embedding(positions, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tok_emb.weight

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.tok_emb(idx) + self.pos_emb(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))
