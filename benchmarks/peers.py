"""What tpplan's kernels compute, by PyTorch's own ops, by Liger-Kernel and by quack.

The first is also what torch.compile is given, and in float64 the reference of all.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]

EPS, RANKS = 1e-5, 8
PEERS = ("eager", "compile", "liger", "quack")
SYNCHRONIZING = {
    ("liger", "cross entropy statistics"),
    ("liger", "cross entropy both"),
}
"""Peers that read a value on the host, which no graph can hold."""


def wide(x: Tensor) -> Tensor:
    """In at least float32."""
    return x if x.dtype == torch.float64 else x.float()


def _residual(norm: Function) -> Function:
    def function(x: Tensor, residual: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, *rest), total

    return function


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, [*weight.shape], weight, EPS)


def _gelu(approximate: str) -> Function:
    return lambda x, bias: F.gelu(x + bias, approximate=approximate)


def _gated(activation: Function) -> Function:
    return lambda gate, up: activation(gate) * up


def _packed(activation: Function) -> Function:
    def function(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up  # type: ignore[no-any-return]

    return function


def _statistics(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    top = wide(logits)
    largest = top.amax(1)
    total = (top - largest.unsqueeze(1)).exp().sum(1)
    return largest, total, wide(logits.gather(1, target.unsqueeze(1)).squeeze(1))


def _gradient(logits: Tensor, target: Tensor, *of_rows: Tensor) -> Tensor:
    largest, log_sum, of_sum, of_target = (t.unsqueeze(1) for t in of_rows)
    grad = (wide(logits) - largest - log_sum).exp() * of_sum
    # a scatter would be an op of its own, which no compiler fuses
    columns = torch.arange(logits.shape[1], device=logits.device)
    chosen = columns == target.unsqueeze(1)
    return (grad + torch.where(chosen, of_target, 0.0)).to(logits.dtype)


def _both(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    largest, total, chosen = _statistics(logits, target)
    each = torch.full_like(total, 1.0 / logits.shape[0])
    grad = _gradient(logits, target, largest, total.log(), each, -each)
    return (largest + total.log() - chosen).mean(), grad


def _look_up(ids: Tensor, weight: Tensor) -> Tensor:
    row = ids - weight.shape[0]
    elsewhere = (row < 0) | (row >= weight.shape[0])
    found = F.embedding(row.masked_fill(elsewhere, 0), weight)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def _unpack(packed: Tensor) -> Tensor:
    return packed.transpose(0, 1).flatten(1, 2)


def _pack(whole: Tensor) -> Tensor:
    batch, length, width = whole.shape
    return whole.view(batch, RANKS, length // RANKS, width).transpose(0, 1).contiguous()


_tanh = functools.partial(F.gelu, approximate="tanh")

PLAIN: Mapping[str, Function] = {
    "LayerNorm": _layer_norm,
    "RMSNorm": _rms_norm,
    "residual + LayerNorm": _residual(_layer_norm),
    "residual + RMSNorm": _residual(_rms_norm),
    "bias + GeLU tanh": _gelu("tanh"),
    "bias + GeLU erf": _gelu("none"),
    "SwiGLU": _gated(F.silu),
    "SwiGLU packed": _packed(F.silu),
    "GeGLU tanh": _gated(_tanh),
    "GeGLU tanh packed": _packed(_tanh),
    "GeGLU erf": _gated(F.gelu),
    "GeGLU erf packed": _packed(F.gelu),
    "cross entropy statistics": _statistics,
    "cross entropy gradient": _gradient,
    "cross entropy both": _both,
    "look-up": _look_up,
    "SP unpack": _unpack,
    "SP pack": _pack,
}


def ours() -> dict[str, Function]:
    """tpplan's kernels."""
    from tpplan.kernels import cross_entropy, embedding, gated, gelu, norm, transition

    def statistics(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        found = cross_entropy.statistics(logits, target, 0, smooth=False, fuse=True)
        return found[:3]

    def gradient(
        logits: Tensor,
        target: Tensor,
        largest: Tensor,
        log_sum: Tensor,
        of_sum: Tensor,
        of_target: Tensor,
    ) -> Tensor:
        return cross_entropy.gradient(
            logits, target, 0, None, largest, log_sum, of_sum, of_target, None, fuse=True
        )

    def both(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        largest, total, chosen = statistics(logits, target)
        log_sum = total.log()
        each = torch.full_like(total, 1.0 / logits.shape[0])
        grad = gradient(logits, target, largest, log_sum, each, -each)
        return (largest + log_sum - chosen).mean(), grad

    kinds: dict[str, gated.Kind] = {
        "SwiGLU": "silu",
        "GeGLU tanh": "gelu_tanh",
        "GeGLU erf": "gelu",
    }
    found: dict[str, Function] = {
        "LayerNorm": functools.partial(norm.norm, eps=EPS, centred=True),
        "RMSNorm": functools.partial(norm.norm, eps=EPS, centred=False),
        "residual + LayerNorm": functools.partial(norm.residual_norm, eps=EPS, centred=True),
        "residual + RMSNorm": functools.partial(norm.residual_norm, eps=EPS, centred=False),
        "bias + GeLU tanh": functools.partial(gelu.gelu, tanh=True),
        "bias + GeLU erf": functools.partial(gelu.gelu, tanh=False),
        "cross entropy statistics": statistics,
        "cross entropy gradient": gradient,
        "cross entropy both": both,
        "look-up": lambda ids, weight: embedding.look_up(ids, weight, weight.shape[0]),
        "SP unpack": lambda packed: transition.unpack(packed, 1, RANKS * packed.shape[2]),
        "SP pack": lambda whole: transition.pack(whole, 1, RANKS),
    }
    for name, kind in kinds.items():
        found[name] = functools.partial(gated.gated, kind=kind)
        found[f"{name} packed"] = functools.partial(gated.gated_packed, kind=kind)
    return found


def _liger() -> dict[str, Function]:
    ops: Any = importlib.import_module("liger_kernel.ops")

    def cross_entropy(logits: Tensor, target: Tensor) -> Any:
        return ops.LigerCrossEntropyFunction.apply(logits, target, None)[0]

    def both(logits: Tensor, target: Tensor) -> Any:
        # the gradient takes the place of the logits, in the forward
        return cross_entropy(logits.detach().requires_grad_(), target)

    rounded = (EPS, 0.0, "gemma", False)  # where F.rms_norm rounds, and not in place
    found: dict[str, Function] = {
        "LayerNorm": lambda x, w, b: ops.LigerLayerNormFunction.apply(x, w, b, EPS),
        "RMSNorm": lambda x, w: ops.LigerRMSNormFunction.apply(x, w, *rounded),
        "residual + RMSNorm": lambda x, r, w: ops.LigerFusedAddRMSNormFunction.apply(
            x, r, w, *rounded
        ),
        # their backward writes its results over gate and up: repeated, over its own
        "SwiGLU": lambda gate, up: ops.LigerSiLUMulFunction.apply(gate, up),
        "GeGLU tanh": lambda gate, up: ops.LigerGELUMulFunction.apply(gate, up),
        "cross entropy statistics": cross_entropy,
        "cross entropy both": both,
    }
    if hasattr(ops, "LigerFusedGateUpSiLUMulFunction"):
        found["SwiGLU packed"] = lambda x: ops.LigerFusedGateUpSiLUMulFunction.apply(x)
    return found


def _quack() -> dict[str, Function]:
    norm: Any = importlib.import_module("quack.rmsnorm")
    loss: Any = importlib.import_module("quack.cross_entropy")
    return {
        "RMSNorm": lambda x, w: norm.rmsnorm(x, w, eps=EPS),
        "residual + RMSNorm": lambda x, r, w: norm.rmsnorm(x, w, residual=r, eps=EPS, prenorm=True),
        "cross entropy statistics": lambda logits, target: loss.cross_entropy_fwd(
            logits, target, return_lse=True
        ),
        "cross entropy both": lambda logits, target: loss.cross_entropy_fwd(
            logits, target, return_dx=True
        ),
    }


def load(wanted: tuple[str, ...]) -> tuple[dict[str, Mapping[str, Function]], dict[str, str]]:
    """The functions of each peer that is wanted and can run here; why the others cannot."""
    found: dict[str, Mapping[str, Function]] = {}
    left_out = {}
    for name in wanted:
        if name == "eager":
            found[name] = PLAIN
        elif not torch.cuda.is_available():
            left_out[name] = "there is no GPU"
        elif name == "compile":
            from torch._functorch import config

            config.donated_buffer = False  # else one forward has one backward
            found[name] = {
                op: torch.compile(function, dynamic=False) for op, function in PLAIN.items()
            }
        else:
            try:
                found[name] = {"liger": _liger, "quack": _quack}[name]()
            except Exception as error:  # a package that is there may miss what it needs
                left_out[name] = f"{type(error).__name__}: {error}"
    return found, left_out
