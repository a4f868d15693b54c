"""One Llama-like transformer block twice: unmodified, and lowered by hand to raw collectives."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops._c10d_functional

SHARDED_DIM = {
    "attn.q_proj.weight": 0,
    "attn.k_proj.weight": 0,
    "attn.v_proj.weight": 0,
    "attn.o_proj.weight": 1,
    "mlp.gate_proj.weight": 0,
    "mlp.up_proj.weight": 0,
    "mlp.down_proj.weight": 1,
}
"""The dimension along which each sharded parameter of a block is divided."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """The unmodified block: it knows nothing of parallelism."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.post_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = MLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))  # type: ignore[no-any-return]


class HandLoweredBlock(nn.Module):
    """The same block as Megatron-LM would have it, for a batch of one.

    Plain local parameters, one collective at each boundary, and under sequence parallelism a
    residual stream that is this rank's plain slice of the sequence. With a batch of one the
    slices lie one behind the other in memory: gathering and scattering copy nothing.
    """

    def __init__(self, block: Block, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.size = mesh.size()
        self.group = mesh.get_group().group_name
        self.sequence_parallel = sequence_parallel
        self.input_norm, self.post_norm = block.input_norm, block.post_norm
        self.attn, self.mlp = block.attn, block.mlp
        for name, dim in SHARDED_DIM.items():
            path = name.removesuffix(".weight")
            whole = block.get_parameter(name).detach()
            part = whole.chunk(self.size, dim)[mesh.get_local_rank()].clone()
            self.get_submodule(path).weight = nn.Parameter(part)

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence_parallel:
            return self._forward_sequence_parallel(x)
        group = self.group
        h = _CopyIn.apply(self.input_norm(x), group)
        x = x + _ReduceOut.apply(self.attn(h), group)
        h = _CopyIn.apply(self.post_norm(x), group)
        return x + _ReduceOut.apply(self.mlp(h), group)  # type: ignore[no-any-return]

    def _forward_sequence_parallel(self, x: Tensor) -> Tensor:
        size, group = self.size, self.group
        first, second = self.input_norm, self.post_norm
        w1, w2 = _SumGradients.apply(first.weight, second.weight, group)
        h = F.rms_norm(x, first.normalized_shape, w1, first.eps)
        h = _GatherIn.apply(h, size, group)
        x = x + _ScatterOut.apply(self.attn(h), size, group)
        h = F.rms_norm(x, second.normalized_shape, w2, second.eps)
        h = _GatherIn.apply(h, size, group)
        return x + _ScatterOut.apply(self.mlp(h), size, group)  # type: ignore[no-any-return]


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x, "sum", group))  # type: ignore[no-any-return]


def _all_gather(x: Tensor, size: int, group: str) -> Tensor:
    whole = _ops.wait_tensor(_ops.all_gather_into_tensor(x, size, group))
    return whole.view(1, -1, x.size(2))  # type: ignore[no-any-return]


def _reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    part = _ops.wait_tensor(_ops.reduce_scatter_tensor(x.squeeze(0), "sum", size, group))
    return part.unsqueeze(0)  # type: ignore[no-any-return]


class _CopyIn(torch.autograd.Function):
    """f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_reduce(grad, ctx.group), None


class _ReduceOut(torch.autograd.Function):
    """f*."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherIn(torch.autograd.Function):
    """g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _all_gather(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _reduce_scatter(grad, ctx.size, ctx.group), None, None


class _ScatterOut(torch.autograd.Function):
    """g*."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _reduce_scatter(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _all_gather(grad, ctx.size, ctx.group), None, None


class _SumGradients(torch.autograd.Function):
    """Two replicated weights of one size; one all-reduce sums the gradients of both."""

    @staticmethod
    def forward(ctx: Any, w1: Tensor, w2: Tensor, group: str) -> tuple[Tensor, Tensor]:
        ctx.group = group
        return w1.view_as(w1), w2.view_as(w2)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, g1: Tensor, g2: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        first, second = _all_reduce(torch.cat((g1, g2)), ctx.group).chunk(2)
        return first, second, None
