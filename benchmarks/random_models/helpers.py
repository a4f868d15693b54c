"""Functions and classes that the text of a model may use; each is there where it is named."""

from __future__ import annotations

import re
from collections.abc import Mapping

from benchmarks.random_models.recipe import Recipe

HEAD = """import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DROPPING = True


"""
_HELPERS: Mapping[str, str] = {
    "Conv1D": """
class Conv1D(nn.Module):
    def __init__(self, outer, inner):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inner, outer) / inner**0.5)
        self.bias = nn.Parameter(torch.zeros(outer))
        self.outer = outer

    def forward(self, x):
        shape = (*x.shape[:-1], self.weight.size(-1))
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(shape)
""",
    "Dense": """
class Dense(nn.Module):
    def __init__(self, inner, outer, bias=True):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outer)) if bias else None  # the weight comes last
        self.weight = nn.Parameter(torch.randn(outer, inner) / inner**0.5)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)
""",
    "Projection": '''
class Projection(nn.Linear):
    """A Linear by another name."""
''',
    "RMS": """
class RMS(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
""",
    "OwnLayerNorm": """
class OwnLayerNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.beta, self.gamma = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta
""",
    "PlusOne": """
class PlusOne(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return y * (1.0 + self.weight)
""",
    "Unit": """
class Unit(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.normalize(x, dim=-1) * x.size(-1) ** 0.5 * self.g
""",
    "quick_gelu": """
def quick_gelu(y):
    return y * torch.sigmoid(1.702 * y)
""",
    "angles": """
def angles(length, width, like, twice=True):
    inverse = 1.0 / 100 ** (torch.arange(0, width, 2 if twice else 1, device=like.device) / width)
    angle = torch.outer(torch.arange(length, device=like.device).float(), inverse)
    angle = torch.cat([angle, angle], -1) if twice else angle
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)
""",
    "rotated": """
def rotated(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin
""",
    "turned": """
def turned(x, cos, sin):
    turn = torch.complex(cos, sin)
    x = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(x * turn).flatten(-2)
""",
    "slopes": """
def slopes(heads, length, like):
    slope = 2.0 ** -torch.arange(1, heads + 1, device=like.device)
    position = torch.arange(length, device=like.device)
    return (slope.view(1, -1, 1, 1) * (position[None] - position[:, None])).to(like.dtype)
""",
    "distances": """
def distances(length, like):
    position = torch.arange(length, device=like.device)
    return (position[:, None] - position[None]).clamp(0, 7)
""",
    "future": """
def future(length, like):
    full = torch.full((length, length), float("-inf"), device=like.device, dtype=like.dtype)
    return full.triu(1)
""",
    "band": """
def band(length, window, like):
    position = torch.arange(length, device=like.device)
    distance = position[:, None] - position[None]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    nothing = torch.zeros(length, length, dtype=like.dtype, device=like.device)
    return nothing.masked_fill(~seen, float("-inf"))
""",
    "sinusoid": """
def sinusoid(length, width, like):
    inverse = torch.exp(torch.arange(0, width, 2, device=like.device) * (-math.log(1e4) / width))
    angle = torch.arange(length, device=like.device)[:, None] * inverse
    return torch.cat([angle.sin(), angle.cos()], -1).to(like.dtype)
""",
    "UnitGradient": """
class UnitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / (1 + grad.norm())
""",
    "HalfGradient": """
class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2
""",
    "Shifted": """
class Shifted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0.5
""",
    "Detaching": """
class Detaching(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach())
""",
    "Clipping": """
class Clipping(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y.clamp(max=y.detach().abs().mean())
""",
    "unit_inputs": """
def unit_inputs(module, given):
    return (F.normalize(given[0], dim=-1),)
""",
    "doubled_inputs": """
def doubled_inputs(module, given):
    return (2 * given[0],)
""",
    "less_mean": """
def less_mean(module, given, out):
    return out - out.mean(-1, keepdim=True)
""",
    "doubled": """
def doubled(module, given, out):
    return 2 * out
""",
    "cached": """
@functools.lru_cache
def cached(length):
    return torch.arange(1, length + 1) / length
""",
    "Output": """
@dataclass
class Output:
    logits: torch.Tensor = None
    loss: torch.Tensor = None
    auxiliary: torch.Tensor = None
""",
}


def with_helpers(r: Recipe, text: str) -> str:
    """The text of a model with what it uses before it."""
    needed = {name for name in _HELPERS if re.search(rf"\b{name}\b", text)}
    found = [part.lstrip("\n") for name, part in _HELPERS.items() if name in needed]
    if "CONFIG" in text:
        found.append(
            f"class Config:\n    heads, kv_heads, head_dim = {r.heads}, {r.kv_heads}, "
            f"{r.head_dim}\n\n\nCONFIG = Config()\n"
        )
    return HEAD + "".join(f"{part}\n\n" for part in found) + text
