"""torch's own ``nn.MultiheadAttention``, whose forward computes everything by itself.

It reads the weights of a projection it never calls, and sizes itself by the width of its input; so
it is computed here, from this rank's heads (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tpplan.comm import reduce_out
from tpplan.roles.heads import own_part
from tpplan.roles.linear import reduced
from tpplan.roles.lowered import Lowered


class MultiheadAttention(Lowered, nn.MultiheadAttention):
    """softmax(Q_i K_i^T / sqrt(d)) V_i of this rank's heads, projected out and summed."""

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``nn.MultiheadAttention.forward``.

        Raises:
            ValueError: for weights of single heads, which are on different ranks.
        """
        state = self._tpplan
        size = state.transition.group.size
        if need_weights and not average_attn_weights:
            raise ValueError(
                f"{state.plan.path}: each rank has the attention weights of its own heads only; "
                "ask for average_attn_weights=True, or the unsharded module"
            )
        heads = self.num_heads // size
        q, k, v = (_heads(x, heads, self.batch_first) for x in self._projected(query, key, value))
        mask = self._mask(attn_mask, key_padding_mask, heads, q.dtype, q.dim() == 3)
        causal = is_causal and mask is None
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            weights, out = _attend(q, k, v, mask, dropout)
            weights = reduce_out(weights.mean(-3) / size, state.transition)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        out = out.transpose(-3, -2).flatten(-2)
        if out.dim() == 3 and not self.batch_first:
            out = out.transpose(0, 1)
        projection = self.out_proj
        if not isinstance(projection, Lowered):
            raise RuntimeError(
                f"{state.plan.path}.out_proj is {type(projection).__name__}, put there after the "
                "model was parallelized, but nn.MultiheadAttention never calls it: each rank "
                "computes with its part of the weight that was sharded; put it there before, or "
                "load its numbers into the one that was there"
            )
        weight, *bias = projection._locals()
        return reduced(self, projection._tpplan_project(out, weight), bias), weights

    def _mask(
        self,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
        heads: int,
        dtype: torch.dtype,
        unbatched: bool,
    ) -> torch.Tensor | None:
        """Both masks as one that is added, of shape ([batch], heads or 1, target, source)."""
        state = self._tpplan

        def own(mask: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
            if mask is not None:
                mask = own_part(mask, dim, heads * state.transition.group.size, state)
            return _added(mask, dtype)

        of_heads = attn_mask is not None and attn_mask.dim() == 3  # (batch * heads, target, source)
        mask, padding = own(attn_mask, 0 if of_heads else None), own(key_padding_mask, None)
        if mask is not None and of_heads:
            mask = mask.unflatten(0, (-1, heads))
            mask = mask.squeeze(0) if unbatched else mask
        if padding is None:
            return mask
        padding = padding[..., None, None, :]
        return padding if mask is None else mask + padding

    def _projected(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        project = self._tpplan_project
        own = dict(zip(self._tpplan.own.names, self._locals(), strict=True))
        bias = own.get("in_proj_bias")
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        if "in_proj_weight" in own:
            weights = own["in_proj_weight"].chunk(3)
            if query is key and key is value:
                q, k, v = project(query, own["in_proj_weight"], bias).chunk(3, -1)
                return q, k, v
        else:
            weights = tuple(own[f"{name}_proj_weight"] for name in "qkv")
        given = (query, key, value)
        q, k, v = (project(x, w, b) for x, w, b in zip(given, weights, biases, strict=True))
        return q, k, v


def _heads(x: torch.Tensor, heads: int, batch_first: bool) -> torch.Tensor:
    """(batch, sequence, columns) as (batch, heads, sequence, width)."""
    if x.dim() == 3 and not batch_first:
        x = x.transpose(0, 1)
    split: torch.Tensor = x.unflatten(-1, (heads, -1))
    return split.transpose(-3, -2)


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    zeros: torch.Tensor = torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill_(mask, float("-inf"))


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights, weights @ v
