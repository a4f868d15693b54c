"""Decoders in the manner of torchtune: built from parts that are given by keyword, one of them
with an output that is no module and reads the embedding's weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

RULES = """
tok_embeddings: vocab
layers.*.{sa,mlp}_norm: sequence_parallel
layers.*.attn.{q,k,v}_proj: colwise
layers.*.attn.output_proj: rowwise
layers.*.mlp.w{1,3}: colwise
layers.*.mlp.w2: rowwise
norm: sequence_parallel
"""
UNTIED_RULES = RULES + "output: vocab\n"


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.normalized_shape = (dim,)
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(
            x.float(), normalized_shape=self.normalized_shape, weight=self.scale, eps=self.eps
        ).to(x.dtype)


class RotaryPositionalEmbeddings(nn.Module):
    def __init__(self, dim: int, max_seq_len: int = 64, base: int = 10_000) -> None:
        super().__init__()
        self.dim = dim
        self.base = base
        self.max_seq_len = max_seq_len
        theta = 1.0 / (base ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
        self.register_buffer("theta", theta, persistent=False)
        idx_theta = torch.einsum("i, j -> ij", torch.arange(max_seq_len).float(), theta)
        cache = torch.stack([torch.cos(idx_theta), torch.sin(idx_theta)], dim=-1)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: torch.Tensor, *, input_pos: torch.Tensor | None = None) -> torch.Tensor:
        seq_len = x.size(1)
        rope_cache = self.cache[:seq_len] if input_pos is None else self.cache[input_pos]
        xshaped = x.float().reshape(*x.shape[:-1], -1, 2)
        rope_cache = rope_cache.view(-1, xshaped.size(1), 1, xshaped.size(3), 2)
        x_out = torch.stack(
            [
                xshaped[..., 0] * rope_cache[..., 0] - xshaped[..., 1] * rope_cache[..., 1],
                xshaped[..., 1] * rope_cache[..., 0] + xshaped[..., 0] * rope_cache[..., 1],
            ],
            -1,
        )
        return x_out.flatten(3).type_as(x)


class MultiHeadAttention(nn.Module):
    def __init__(
        self,
        *,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        output_proj: nn.Module,
        pos_embeddings: nn.Module | None = None,
        is_causal: bool = True,
        attn_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads != 0:
            raise ValueError("num_heads must be divisible by num_kv_heads")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.embed_dim = embed_dim
        self.attn_dropout = attn_dropout
        self.head_dim = head_dim
        self.is_causal = is_causal
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.v_proj = v_proj
        self.output_proj = output_proj
        self.pos_embeddings = pos_embeddings

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        b, s_x, _ = x.shape
        s_y = y.shape[1]
        q = self.q_proj(x)
        q_per_kv = self.num_heads // self.num_kv_heads
        q = q.view(b, s_x, self.num_kv_heads * q_per_kv, self.head_dim)
        if self.pos_embeddings is not None:
            q = self.pos_embeddings(q, input_pos=input_pos)
        q = q.transpose(1, 2)
        k = self.k_proj(y)
        v = self.v_proj(y)
        k = k.view(b, s_y, -1, self.head_dim)
        v = v.view(b, s_y, -1, self.head_dim)
        if self.pos_embeddings is not None:
            k = self.pos_embeddings(k, input_pos=input_pos)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        if self.num_heads != self.num_kv_heads:
            expand_shape = (b, self.num_kv_heads, q_per_kv, -1, self.head_dim)
            k = k.unsqueeze(2).expand(expand_shape).flatten(1, 2)
            v = v.unsqueeze(2).expand(expand_shape).flatten(1, 2)
        output = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask[:, None, :, :],
            dropout_p=self.attn_dropout if self.training else 0.0,
            is_causal=mask is None and self.is_causal,
        )
        output = output.transpose(1, 2).contiguous().view(b, s_x, -1)
        return self.output_proj(output)


class FeedForward(nn.Module):
    def __init__(self, *, gate_proj: nn.Module, down_proj: nn.Module, up_proj: nn.Module) -> None:
        super().__init__()
        self.w1 = gate_proj
        self.w2 = down_proj
        self.w3 = up_proj
        self.activation = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.activation(self.w1(x))
        h = h * self.w3(x)
        return self.w2(h)


class TransformerSelfAttentionLayer(nn.Module):
    def __init__(
        self,
        attn: MultiHeadAttention,
        mlp: nn.Module,
        *,
        sa_norm: nn.Module | None = None,
        mlp_norm: nn.Module | None = None,
        sa_scale: nn.Module | None = None,
        mlp_scale: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attn = attn
        self.mlp = mlp
        self.sa_norm = sa_norm or nn.Identity()
        self.mlp_norm = mlp_norm or nn.Identity()
        self.sa_scale = sa_scale or nn.Identity()
        self.mlp_scale = mlp_scale or nn.Identity()

    def forward(
        self,
        x: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        h = self.sa_norm(x)
        attn_out = self.attn(h, h, mask=mask, input_pos=input_pos)
        h = self.sa_scale(attn_out) + x
        mlp_out = self.mlp(self.mlp_norm(h))
        return h + self.mlp_scale(mlp_out)


class Linear(nn.Module):
    """A linear layer without a weight of its own."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)


class TiedLinear:
    """No module: it must not own the weight that it reads."""

    def __init__(self, tied_module: nn.Module) -> None:
        self.tied_module = tied_module
        self.linear = Linear()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.tied_module.weight)


class TransformerDecoder(nn.Module):
    def __init__(
        self,
        *,
        tok_embeddings: nn.Embedding,
        layers: list[nn.Module],
        max_seq_len: int,
        num_heads: int,
        head_dim: int,
        norm: nn.Module,
        output: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self.tok_embeddings = tok_embeddings
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.output = output
        self.max_seq_len = max_seq_len
        self.num_heads = num_heads
        self.head_dim = head_dim

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if tokens.shape[1] > self.max_seq_len:
            raise ValueError("seq_len of input tensor should be smaller than max_seq_len")
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, mask=mask, input_pos=input_pos)
        return self.unembed(h)

    def unembed(self, h: torch.Tensor) -> torch.Tensor:
        """Logits in float32."""
        h = self.norm(h)
        return self.output(h).float()


def _attention(
    embed_dim: int, num_heads: int, num_kv_heads: int, rope: nn.Module, bias: bool
) -> MultiHeadAttention:
    head_dim = embed_dim // num_heads
    return MultiHeadAttention(
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_proj=nn.Linear(embed_dim, num_heads * head_dim, bias=bias),
        k_proj=nn.Linear(embed_dim, num_kv_heads * head_dim, bias=bias),
        v_proj=nn.Linear(embed_dim, num_kv_heads * head_dim, bias=bias),
        output_proj=nn.Linear(embed_dim, embed_dim, bias=False),
        pos_embeddings=rope,
    )


def decoder(
    *,
    tied: bool,
    vocab_size: int = 131,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    embed_dim: int = 32,
    intermediate_dim: int = 64,
    max_seq_len: int = 64,
) -> TransformerDecoder:
    """As the builder of Llama 3; tied, as that of Qwen 2, whose q, k and v have biases."""
    # one module of positions for all layers
    rope = RotaryPositionalEmbeddings(embed_dim // num_heads, max_seq_len)
    layers = [
        TransformerSelfAttentionLayer(
            attn=_attention(embed_dim, num_heads, num_kv_heads, rope, bias=tied),
            mlp=FeedForward(
                gate_proj=nn.Linear(embed_dim, intermediate_dim, bias=False),
                down_proj=nn.Linear(intermediate_dim, embed_dim, bias=False),
                up_proj=nn.Linear(embed_dim, intermediate_dim, bias=False),
            ),
            sa_norm=RMSNorm(dim=embed_dim, eps=1e-5),
            mlp_norm=RMSNorm(dim=embed_dim, eps=1e-5),
        )
        for _ in range(num_layers)
    ]
    tok_embeddings = nn.Embedding(vocab_size, embed_dim)
    return TransformerDecoder(
        tok_embeddings=tok_embeddings,
        layers=layers,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        head_dim=embed_dim // num_heads,
        norm=RMSNorm(embed_dim, eps=1e-5),
        output=TiedLinear(tok_embeddings) if tied else nn.Linear(embed_dim, vocab_size, bias=False),
    )
