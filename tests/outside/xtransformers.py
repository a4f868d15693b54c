"""A decoder in the manner of x-transformers: lists of [norms, block, residual] that the model
indexes, and heads that modules of einops split by sizes they hold in a tuple."""

from __future__ import annotations

import torch
from torch import einsum, nn
from torch.nn import Module, ModuleList

RULES = """
token_emb.emb: vocab
pos_emb.emb: sequence_parallel
attn_layers.layers.*.0.0: sequence_parallel
attn_layers.layers.*.1.to_{q,k,v}: colwise
attn_layers.layers.*.1.to_out: rowwise
attn_layers.layers.*.1.ff.0.0: colwise
attn_layers.layers.*.1.ff.2: rowwise
attn_layers.final_norm: sequence_parallel
to_logits: vocab
"""
# query head h attends to key-value head h modulo their number: two rounds of them
GROUPED_RULES = RULES.replace("to_{q,k,v}: colwise", "to_{k,v}: colwise").replace(
    "attn_layers.layers.*.1.to_out: rowwise",
    """attn_layers.layers.*.1.to_q: {style: colwise, packed: [q1, q2]}
attn_layers.layers.*.1.to_out: {style: rowwise, packed: [q1, q2]}""",
)


class Rearrange(Module):
    """Of einops' patterns the two that split heads and merge them."""

    def __init__(self, pattern: str, **axes_lengths: int) -> None:
        super().__init__()
        self.pattern = pattern
        self.axes_lengths = axes_lengths
        self._axes_lengths = tuple(axes_lengths.items())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        lengths = dict(self._axes_lengths)
        if self.pattern == "b n (h d) -> b h n d":
            b, n, width = input.shape
            h = lengths["h"] if "h" in lengths else width // lengths["d"]
            return input.reshape(b, n, h, width // h).permute(0, 2, 1, 3)
        assert self.pattern == "b h n d -> b n (h d)"
        return input.permute(0, 2, 1, 3).flatten(2)


class TokenEmbedding(Module):
    def __init__(self, dim: int, num_tokens: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(num_tokens, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.emb(x.long())


class AbsolutePositionalEmbedding(Module):
    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.scale = dim**-0.5
        self.max_seq_len = max_seq_len
        self.emb = nn.Embedding(max_seq_len, dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor | None = None) -> torch.Tensor:
        seq_len, device = x.shape[1], x.device
        assert seq_len <= self.max_seq_len
        if pos is None:
            pos = torch.arange(seq_len, device=device)
        pos_emb = self.emb(pos)
        return pos_emb * self.scale


class LayerNorm(Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(dim, elementwise_affine=False)
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.ln(x)
        return normed * self.gamma


class Residual(Module):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x + residual


class FeedForward(Module):
    def __init__(self, dim: int, mult: int = 4) -> None:
        super().__init__()
        inner_dim = dim * mult
        project_in = nn.Sequential(nn.Linear(dim, inner_dim), nn.GELU())
        self.ff = nn.Sequential(project_in, nn.Dropout(0.0), nn.Linear(inner_dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff(x)


class Attend(Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.attn_dropout = nn.Dropout(0.0)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = q.shape[-1] ** -0.5
        heads, kv_heads = q.shape[1], k.shape[1]
        keys = "b h j d"
        if kv_heads == 1:
            k, v, keys = k.squeeze(1), v.squeeze(1), "b j d"
        elif kv_heads < heads:
            k, v = (t.repeat(1, heads // kv_heads, 1, 1) for t in (k, v))
        sim = einsum(f"b h i d, {keys} -> b h i j", q, k) * scale
        if self.causal:
            i, j = sim.shape[-2:]
            mask = torch.ones((i, j), device=q.device, dtype=torch.bool).triu(j - i + 1)
            sim = sim.masked_fill(mask, -torch.finfo(sim.dtype).max)
        attn = self.attn_dropout(sim.softmax(dim=-1))
        return einsum(f"b h i j, {keys} -> b h i d", attn, v), sim


class Attention(Module):
    def __init__(self, dim: int, dim_head: int, heads: int, kv_heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        inner = dim_head * heads
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_k = nn.Linear(dim, dim_head * kv_heads, bias=False)
        self.to_v = nn.Linear(dim, dim_head * kv_heads, bias=False)
        self.split_q_heads = Rearrange("b n (h d) -> b h n d", h=heads)
        self.split_k_heads = Rearrange("b n (h d) -> b h n d", d=dim_head)
        self.split_v_heads = Rearrange("b n (h d) -> b h n d", d=dim_head)
        self.merge_heads = Rearrange("b h n d -> b n (h d)")
        self.attend = Attend(causal)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        q = self.split_q_heads(q)
        k = self.split_k_heads(k)
        v = self.split_v_heads(v)
        out, sim = self.attend(q, k, v)
        out = self.merge_heads(out)
        return self.to_out(out), sim


class AttentionLayers(Module):
    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        attn_dim_head: int,
        causal: bool,
        attn_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        kv_heads = attn_kv_heads or heads
        self.layer_types = ("a", "f") * depth
        self.layers = ModuleList([])
        for layer_type in self.layer_types:
            layer: Module
            if layer_type == "a":
                layer = Attention(dim, attn_dim_head, heads, kv_heads, causal)
            else:
                layer = FeedForward(dim)
            norms = ModuleList([LayerNorm(dim), None, None])
            self.layers.append(ModuleList([norms, layer, Residual()]))
        self.final_norm = LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer_type, (norm, block, residual_fn) in zip(
            self.layer_types, self.layers, strict=True
        ):
            inner_residual = x
            pre_norm, post_branch_norm, post_main_norm = norm
            if pre_norm is not None:
                x = pre_norm(x)
            if layer_type == "a":
                out, _inter = block(x)
            else:
                out = block(x)
            if post_branch_norm is not None:
                out = post_branch_norm(out)
            x = residual_fn(out, inner_residual)
            if post_main_norm is not None:
                x = post_main_norm(x)
        return self.final_norm(x)


class TransformerWrapper(Module):
    def __init__(self, *, num_tokens: int, max_seq_len: int, attn_layers: AttentionLayers) -> None:
        super().__init__()
        dim = attn_layers.dim
        self.max_seq_len = max_seq_len
        self.token_emb = TokenEmbedding(dim, num_tokens)
        self.pos_emb = AbsolutePositionalEmbedding(dim, max_seq_len)
        self.emb_dropout = nn.Dropout(0.0)
        self.project_emb = nn.Identity()
        self.attn_layers = attn_layers
        self.to_logits = nn.Linear(dim, num_tokens, bias=False)

    def forward(self, x: torch.Tensor, pos: torch.Tensor | None = None) -> torch.Tensor:
        token_emb = self.token_emb(x)
        x = token_emb + self.pos_emb(x, pos=pos)
        x = self.emb_dropout(x)
        x = self.project_emb(x)
        x = self.attn_layers(x)
        return self.to_logits(x)


def decoder(heads: int = 4, kv_heads: int | None = None) -> TransformerWrapper:
    """The library's defaults, small."""
    layers = AttentionLayers(
        dim=32, depth=2, heads=heads, attn_dim_head=8, causal=True, attn_kv_heads=kv_heads
    )
    return TransformerWrapper(num_tokens=131, max_seq_len=64, attn_layers=layers)
