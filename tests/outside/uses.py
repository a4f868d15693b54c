"""Small decoders that use their modules as people do: weights read outside of their module, layers
called by keyword, attention of bare parameters, convolutions among the layers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

_MLP = """
layers.*.norm2: sequence_parallel
layers.*.up: colwise
layers.*.down: rowwise
norm: sequence_parallel
"""
_ATTENTION = """
layers.*.norm1: sequence_parallel
layers.*.attn.qkv: {style: colwise, packed: [q, k, v]}
layers.*.attn.out: rowwise
"""
TIED_RULES = _MLP + _ATTENTION + "embed: replicate\n"
KEYWORD_RULES = _MLP + _ATTENTION + "embed: vocab\nhead: vocab\n"
MIXER_RULES = (
    _MLP + "layers.*.norm1: sequence_parallel\nembed: vocab\nhead: vocab\nvalue: replicate\n"
    "layers.*.attn: {style: replicate, input: gather}\n"
)
WHOLE_RULES = MIXER_RULES.replace("value: replicate\n", "")
EINSUM_RULES = WHOLE_RULES.replace(
    "layers.*.attn: {style: replicate, input: gather}\n",
    "layers.*.attn.qkv: {style: colwise, dim: 1}\nlayers.*.attn.out: {style: rowwise, dim: 0}\n",
)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(input=x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(input=y.transpose(1, 2).flatten(2))


class EinsumAttention(nn.Module):
    """Weights with a dimension for the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Parameter(0.1 * torch.randn(3, heads, width // heads, width))
        self.out = nn.Parameter(0.1 * torch.randn(heads, width // heads, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.einsum("btc,nhdc->nbhtd", x, self.qkv)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.einsum("bhtd,hdc->btc", a, self.out)


class Convolution(nn.Module):
    """Mixes each position with the two before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, groups=width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class Layer(nn.Module):
    """Everything in it is called by keyword."""

    def __init__(self, width: int, attn: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = attn
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x=self.norm1(input=x))
        return x + self.down(input=F.gelu(self.up(input=self.norm2(input=x))))


Kind = Literal["attention", "einsum", "convolution"]


def _layers(kind: Kind, width: int) -> nn.ModuleList:
    kinds = {
        "attention": lambda: Attention(width, 4),
        "einsum": lambda: EinsumAttention(width, 4),
        "convolution": lambda: Convolution(width),
    }
    return nn.ModuleList(Layer(width, kinds[kind]()) for _ in range(2))


class Tied(nn.Module):
    """Its logits are products with the embedding's weight, by either of two spellings."""

    def __init__(self, how: Literal["linear", "matmul"], width: int = 32, vocab: int = 131) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(vocab, width)
        self.layers = _layers("attention", width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.how == "linear" else x @ self.embed.weight.T


class Decoder(nn.Module):
    """Everything in it is called by keyword."""

    def __init__(self, kind: Kind, width: int = 32, vocab: int = 131) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = _layers(kind, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """What the stack makes of the tokens."""
        x = self.embed(input=ids)
        for layer in self.layers:
            x = layer(x=x)
        return self.norm(input=x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(input=self.hidden(ids))


class Valued(Decoder):
    """A value for each sequence beside its logits, from the mean of its positions."""

    def __init__(self, kind: Kind, width: int = 32, vocab: int = 131) -> None:
        super().__init__(kind, width, vocab)
        self.value = nn.Linear(width, 1)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.hidden(ids)
        return self.head(x), self.value(x.mean(1)).squeeze(-1)
