"""A vision transformer in the manner of timm: q, k and v in one reshape, pooled in two ways."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

RULES = """
patch_embed.proj: replicate
pos_embed: replicate
blocks.*.norm{1,2}: sequence_parallel
blocks.*.attn.qkv: {style: colwise, packed: [q, k, v]}
blocks.*.attn.proj: rowwise
blocks.*.mlp.fc1: colwise
blocks.*.mlp.fc2: rowwise
head: replicate
"""
TOKEN_RULES = RULES + "cls_token: replicate\nnorm: sequence_parallel\n"
# with norms over what attention and the MLP put together, in the places of identities (EVA-02)
NORMED_RULES = TOKEN_RULES + "blocks.*.{attn,mlp}.norm: colwise\n"
# of the identity that stands where the norm would be nothing is said
AVERAGE_RULES = RULES


class PatchEmbed(nn.Module):
    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.img_size = (img_size, img_size)
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
        self.norm = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, _, height, width = x.shape
        assert (height, width) == self.img_size
        x = self.proj(x)
        x = x.flatten(2).transpose(1, 2)
        return self.norm(x)


class Attention(nn.Module):
    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool, fused_attn: bool, scale_norm: bool
    ) -> None:
        super().__init__()
        assert dim % num_heads == 0, "dim should be divisible by num_heads"
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attn_dim = num_heads * self.head_dim
        self.scale = self.head_dim**-0.5
        self.fused_attn = fused_attn
        self.qkv = nn.Linear(dim, self.attn_dim * 3, bias=qkv_bias)
        self.q_norm = nn.Identity()
        self.k_norm = nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.norm = nn.LayerNorm(self.attn_dim, eps=1e-6) if scale_norm else nn.Identity()
        self.proj = nn.Linear(self.attn_dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, N, _C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            p = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1)
            attn = self.attn_drop(attn.softmax(dim=-1))
            x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, self.attn_dim)
        x = self.norm(x)
        x = self.proj(x)
        return self.proj_drop(x)


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int, scale_norm: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(0.0)
        self.norm = nn.LayerNorm(hidden_features, eps=1e-6) if scale_norm else nn.Identity()
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop2 = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop1(self.act(self.fc1(x)))
        return self.drop2(self.fc2(self.norm(x)))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, fused_attn: bool, scale_norm: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads, True, fused_attn, scale_norm)
        self.ls1 = nn.Identity()
        self.drop_path1 = nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim, scale_norm)
        self.ls2 = nn.Identity()
        self.drop_path2 = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Classes of images, from the class token or from the mean of the patches."""

    def __init__(
        self,
        img_size: int = 16,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 10,
        global_pool: Literal["token", "avg"] = "token",
        embed_dim: int = 32,
        depth: int = 2,
        num_heads: int = 4,
        class_token: bool = True,
        fused_attn: bool = True,
        scale_norm: bool = False,
    ) -> None:
        super().__init__()
        use_fc_norm = global_pool == "avg"
        self.num_classes = num_classes
        self.global_pool = global_pool
        self.num_features = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1 if class_token else 0
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        embed_len = self.patch_embed.num_patches + self.num_prefix_tokens
        self.pos_embed = nn.Parameter(torch.randn(1, embed_len, embed_dim) * 0.02)
        self.pos_drop = nn.Dropout(p=0.0)
        self.norm_pre = nn.Identity()
        self.blocks = nn.Sequential(
            *[Block(embed_dim, num_heads, fused_attn, scale_norm) for _ in range(depth)]
        )
        self.norm = nn.Identity() if use_fc_norm else nn.LayerNorm(embed_dim, eps=1e-6)
        self.fc_norm = nn.LayerNorm(embed_dim, eps=1e-6) if use_fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(0.0)
        self.head = nn.Linear(embed_dim, num_classes)

    def _pos_embed(self, x: torch.Tensor) -> torch.Tensor:
        to_cat = []
        if self.cls_token is not None:
            to_cat.append(self.cls_token.expand(x.shape[0], -1, -1))
        if to_cat:
            x = torch.cat([*to_cat, x], dim=1)
        return self.pos_drop(x + self.pos_embed)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Of every token."""
        x = self.patch_embed(x)
        x = self._pos_embed(x)
        x = self.norm_pre(x)
        x = self.blocks(x)
        return self.norm(x)

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        """One vector for an image."""
        if self.global_pool == "token":
            return x[:, 0]
        return x[:, self.num_prefix_tokens :].mean(dim=1)

    def forward_head(self, x: torch.Tensor) -> torch.Tensor:
        """The classes' scores."""
        x = self.pool(x)
        x = self.fc_norm(x)
        x = self.head_drop(x)
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.forward_features(x)
        return self.forward_head(x)
